"""Mirror tables in a JDBC catalog, here in a Postgres database: the compare-and-swap holds between processes,
and loads, points and upkeep work there as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.database import Database
from tests.spark.logs import WrittenLog, delete, insert, model, table_shape, update

ORDERS = table_shape()

# A driver beside another: both apply the same changes, stretch by stretch, to the same table, as fast as they can.
DRIVER = """
import json, sys
from pathlib import Path
from pgtide.config import load_config
from pgtide.local.spark import build_session
from pgtide.sinks.iceberg import IcebergSink
from pgtide.spark.apply import Applier, MirrorTable
from pgtide.spark.targets import target_of
config = load_config(Path(sys.argv[1]))
session = build_session(master="local[2]", conf=config.spark.conf, catalog=config.mirror.catalog)
applier = Applier(session, IcebergSink(session), config.log_location, config.mirror)
shape = applier.reader().shapes()["public.orders"]
table = MirrorTable(shape, target_of(config, shape.qualified_name))
session.sql("SHOW NAMESPACES IN lake").collect()
print("ready", flush=True)
sys.stdin.readline()
for end in json.loads(sys.argv[2]):
    applier.apply(table, end)
mark = applier.refresh(table).mark
rows = [row.asDict() for row in session.table(table.target).collect()]
print(json.dumps({"rows": rows, "offset": mark.offset, "changes": mark.changes}), flush=True)
session.stop()
"""

# A source, capture and mirror: a bulk load, changes, points, then upkeep that compacts and keeps only the newest point.
WHOLE = """
import json, sys
from pathlib import Path
import psycopg
from pgtide.config import load_config
from pgtide.errors import PgtideError
from pgtide.local.spark import build_session
from pgtide.spark import at
from pgtide.spark.at import points
from pgtide.spark.targets import target_of
from tests.spark.shop import Shop
from tests.waiting import wait_for
class Source:
    def execute(self, *statements):
        with psycopg.connect(config.source.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)
    def rows(self, query):
        with psycopg.connect(config.source.dsn) as connection:
            return connection.execute(query).fetchall()
config = load_config(Path(sys.argv[1]))
session = build_session(master="local[2]", conf=config.spark.conf, catalog=config.mirror.catalog)
shop = Shop(Source(), session, config)
orders = target_of(config, "public.orders")
found = {}
def is_gone(point):
    try:
        point.table("orders").count()
    except PgtideError:
        return True
    return False
def live():
    session.sql(f"REFRESH TABLE {orders}")
    return session.table(f"{orders}.files").count(), session.table(f"{orders}.snapshots").count()
with shop.capturing():
    with shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal("public.orders", "public.visits")
        loaded = at(session, config=config)
        for number in range(3):
            shop.database.execute(
                f"INSERT INTO orders VALUES ({5000 + number}, 'new')",
                f"UPDATE orders SET note = 'changed' WHERE id = {number}",
                "DELETE FROM visits WHERE ctid = (SELECT min(ctid) FROM visits)",
            )
            wait_until_equal("public.orders", "public.visits")
    found["at the load"] = loaded.table("orders").where("note = 'old'").count()
    found["points"] = len(points(session, config, 100))
    files, snapshots = live()
    mirror = config.mirror.model_copy(update={"compact_minutes": 1e-6, "keep_points_hours": 1e-7})
    shop.config = config.model_copy(update={"mirror": mirror}).at(config.file)
    with shop.mirroring_from_here() as wait_until_equal:
        wait_for(lambda: is_gone(loaded), limit_s=120, what="the version of an old point to be let go")
        wait_for(lambda: live()[0] < files and live()[1] < snapshots, limit_s=120, what="orders to be compacted")
        shop.database.execute("DELETE FROM orders WHERE id < 3")
        wait_until_equal("public.orders", "public.visits")
    found["different"] = shop.differences("public.orders", "public.visits")
    found["points kept"] = len(points(session, config, 100))
print(json.dumps(found), flush=True)
session.stop()
"""


@pytest.fixture
def config_file(database: Database, tmp_path: Path) -> Path:
    """The catalog's tables are in the test's own database; the lake's files in a folder."""
    found = psycopg.conninfo.conninfo_to_dict(database.dsn)
    catalog = {
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "jdbc",
        "spark.sql.catalog.lake.uri": f"jdbc:postgresql://{found['host']}:{found['port']}/{found['dbname']}",
        "spark.sql.catalog.lake.jdbc.user": found["user"],
        "spark.sql.catalog.lake.jdbc.password": found.get("password", ""),
        "spark.sql.catalog.lake.warehouse": str(tmp_path / "lake"),
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    listed = "\n".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in catalog.items())
    file = tmp_path / "pgtide.toml"
    file.write_text(f'[source]\ndsn = "{database.dsn}"\n[log]\npath = "log"\n[spark.conf]\n{listed}\n')
    return file


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_two_drivers_racing_on_a_jdbc_catalog_apply_each_change_once(config_file: Path) -> None:
    log = WrittenLog(config_file.parent / "log")
    changes = [insert(ORDERS, id=number, amount=0, body="large") for number in range(5)]
    ends = [log.commit(*changes)]
    for number in range(5):
        made = [update(ORDERS, unchanged=["body"], id=key, amount=number) for key in range(1, 5)]
        made += [insert(ORDERS, id=100 + number, amount=number), delete(ORDERS, id=99 + number)]
        changes += made
        ends.append(log.commit(*made))
    command = [sys.executable, "-c", DRIVER, str(config_file), json.dumps(ends)]
    drivers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for driver in drivers:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready\n"
        for driver in drivers:
            assert driver.stdin is not None
            driver.stdin.write("go\n")
            driver.stdin.flush()
        told = [driver.communicate(timeout=400) for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
    for driver, (out, errors) in zip(drivers, told, strict=True):
        assert driver.returncode == 0, errors
        found: dict[str, Any] = json.loads(out)
        assert {(row["id"],): row for row in found["rows"]} == model(ORDERS, changes)
        assert found["offset"] == ends[-1]
        assert found["changes"] == len(changes), "some change was counted twice or not at all"


@pytest.mark.timeout(600)
def test_loads_points_and_upkeep_work_on_a_jdbc_catalog(config_file: Path, database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT n, 'old' FROM generate_series(0, 999) n",
        "CREATE TABLE visits (page text)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "INSERT INTO visits SELECT 'page ' || n % 3 FROM generate_series(1, 50) n",
    )
    config_file.write_text(
        config_file.read_text().replace(
            "[log]", f'slot = "s_{database.name}"\ntables = ["public.orders", "public.visits"]\n[log]'
        )
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", WHOLE, str(config_file)],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["at the load"] == 1000, "a point shows what was there then"
    assert found["points"] > found["points kept"] >= 1
    assert found["different"] == []

"""Mirror tables in a JDBC catalog, here in a Postgres database: the compare-and-swap holds between processes,
and loads, points and upkeep work there as well."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from pgtide.config import load_config
from pgtide.errors import PgtideError
from pgtide.spark import Point, at
from pgtide.spark.at import points
from pgtide.spark.targets import target_of
from tests.database import Database
from tests.spark.logs import WrittenLog, delete, insert, model, table_shape, update
from tests.spark.shop import Shop
from tests.waiting import wait_for

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

# A session as pgtide opens it, with nothing but the configuration.
OPENED = """
import sys
from pathlib import Path
from pgtide.config import load_config
from pgtide.local.spark import build_session
config = load_config(Path(sys.argv[1]))
session = build_session(master="local[2]", conf=config.spark.conf, catalog=config.mirror.catalog)
session.sql("CREATE NAMESPACE lake.made_by_the_session")
session.stop()
"""


def settings(catalog: str, database: Database, folder: Path) -> dict[str, str]:
    """The catalog's tables are in the test's own database; the lake's files in a folder."""
    found = psycopg.conninfo.conninfo_to_dict(database.dsn)
    prefix = f"spark.sql.catalog.{catalog}"
    return {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        f"{prefix}.type": "jdbc",
        f"{prefix}.uri": f"jdbc:postgresql://{found['host']}:{found['port']}/{found['dbname']}",
        f"{prefix}.jdbc.user": str(found["user"]),
        f"{prefix}.jdbc.password": str(found.get("password", "")),
        f"{prefix}.warehouse": str(folder / "lake"),
    }


@pytest.fixture
def config_file(database: Database, tmp_path: Path) -> Path:
    """For a process of its own, which opens the catalog by this file."""
    conf = settings("lake", database, tmp_path)
    listed = "\n".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in conf.items())
    file = tmp_path / "pgtide.toml"
    file.write_text(f'[source]\ndsn = "{database.dsn}"\n[log]\npath = "log"\n[spark.conf]\n{listed}\n')
    return file


def test_session_gets_the_driver_of_the_catalogs_database(config_file: Path, database: Database) -> None:
    command = [sys.executable, "-c", OPENED, str(config_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("made_by_the_session",) in database.rows("SELECT namespace FROM iceberg_namespace_properties")


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


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Iterator[Shop]:
    """Mirrored into a catalog that is defined in the session that tests share, and has its driver."""
    catalog = f"jdbc_{database.name}"
    conf = settings(catalog, database, tmp_path) | {f"spark.sql.catalog.{catalog}.cache-enabled": "false"}
    for name, value in conf.items():
        spark.conf.set(name, value)
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT n, 'old' FROM generate_series(0, 999) n",
        "CREATE TABLE visits (page text)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "INSERT INTO visits SELECT 'page ' || n % 3 FROM generate_series(1, 50) n",
    )
    file = tmp_path / "pgtide.toml"
    file.write_text(
        f'[source]\ndsn = "{database.dsn}"\nslot = "s_{database.name}"\ntables = ["public.orders", "public.visits"]\n'
        f'[log]\npath = "log"\n[mirror]\ncatalog = "{catalog}"\ntrigger_seconds = 0.1\n'
    )
    yield Shop(database, spark, load_config(file))
    for name in conf:
        spark.conf.unset(name)


def is_gone(point: Point) -> bool:
    try:
        point.table("orders").count()
    except PgtideError:
        return True
    return False


def files_and_versions(shop: Shop) -> tuple[int, int]:
    orders = target_of(shop.config, "public.orders")
    shop.spark.sql(f"REFRESH TABLE {orders}")
    return shop.spark.table(f"{orders}.files").count(), shop.spark.table(f"{orders}.snapshots").count()


@pytest.mark.timeout(600)
def test_loads_points_and_upkeep_work_on_a_jdbc_catalog(shop: Shop) -> None:
    """A bulk load, changes, points; then upkeep that compacts and keeps only the newest point."""
    tables = ("public.orders", "public.visits")
    with shop.capturing():
        with shop.mirroring_from_here() as wait_until_equal:
            wait_until_equal(*tables)
            loaded = at(shop.spark, config=shop.config)
            for number in range(4):  # files enough to be worth a compaction
                shop.database.execute(
                    f"INSERT INTO orders VALUES ({5000 + number}, 'new')",
                    f"UPDATE orders SET note = 'changed' WHERE id = {number}",
                    "DELETE FROM visits WHERE ctid = (SELECT min(ctid) FROM visits)",
                )
                wait_until_equal(*tables)
        assert loaded.table("orders").where("note = 'old'").count() == 1000, "a point shows what was there then"
        published = points(shop.spark, shop.config, 100)
        files, versions = files_and_versions(shop)
        mirror = shop.config.mirror.model_copy(update={"compact_minutes": 1e-6, "keep_points_hours": 1e-7})
        shop.config = shop.config.model_copy(update={"mirror": mirror}).at(shop.config.file)
        with shop.mirroring_from_here() as wait_until_equal:
            wait_for(lambda: is_gone(loaded), limit_s=120, what="the version of an old point to be let go")
            wait_for(lambda: files_and_versions(shop)[0] < files, limit_s=120, what="orders to be compacted")
            wait_for(lambda: files_and_versions(shop)[1] < versions, limit_s=120, what="old versions to go")
            shop.database.execute("DELETE FROM orders WHERE id < 3")
            wait_until_equal(*tables)
        assert shop.differences(*tables) == []
        assert len(published) > len(points(shop.spark, shop.config, 100)) >= 1

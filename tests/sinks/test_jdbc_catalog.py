"""Mirror tables in a JDBC catalog, here in a Postgres database: the compare-and-swap holds between processes."""

from __future__ import annotations

import json
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

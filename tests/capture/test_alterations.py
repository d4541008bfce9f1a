"""What the stream does not say of tables is noted from the catalog: other shapes, and rows that were rewritten."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pgtide.capture.alterations import ALTERATION_NOTED, AlterationWatch
from pgtide.log.control import Alteration, alterations
from pgtide.lsn import parse_lsn
from pgtide.replication.catalog import Catalog
from tests.capture.running import CaptureProcess, configuration
from tests.database import Database
from tests.waiting import wait_for


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int, small smallint, ratio real, price numeric(6, 2), v varchar(9))",
        "INSERT INTO t SELECT i, i, i, i, i, i FROM generate_series(1, 50) i",
        "CREATE TABLE parted (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "INSERT INTO parted SELECT i, i FROM generate_series(1, 50) i",
        "CREATE DOMAIN seven AS int DEFAULT (random() * 7)::int",
        "CREATE PUBLICATION p FOR TABLE t, parted",
    )
    return database


def looked(shop: Database, folder: Path, *statements: str, table: str = "t") -> Alteration:
    """What is noted after the statements, each seen by a look of its own, and one more look."""
    now_s = itertools.count(1, 100)
    with shop.connect() as connection:
        connection.autocommit = True
        row = connection.execute("SELECT %s::regclass::oid::int8", [table]).fetchone()
        assert row is not None
        watch = AlterationWatch(str(folder / table), ["p"], [row[0]])
        watch.look(connection, next(now_s))
        for statement in statements:
            connection.execute(statement.encode())
            watch.look(connection, next(now_s))
        watch.look(connection, next(now_s))
    return alterations(str(folder / table))[row[0]]


KEEP_VALUES = [
    "VACUUM FULL t",
    "TRUNCATE t",
    "INSERT INTO t SELECT i, i, i, i, i, i FROM generate_series(1, 50) i",
    "CLUSTER t USING t_pkey",
    "ALTER TABLE t ALTER n TYPE bigint, ALTER small TYPE int, ALTER ratio TYPE float8, ALTER v SET NOT NULL",
    "ALTER TABLE t ALTER price TYPE numeric(9, 2), ALTER v TYPE text, ALTER n SET NOT NULL",
    "ALTER TABLE t RENAME n TO m",
    "ALTER TABLE t ADD nothing text, ALTER price TYPE numeric(12, 2)",
    "ALTER TABLE t ADD five int DEFAULT 5",
]
REWRITE = [
    ("t", "ALTER TABLE t ALTER n TYPE int USING n + 1"),
    ("t", "ALTER TABLE t ALTER v TYPE text USING upper(v)"),
    ("t", "ALTER TABLE t ALTER small TYPE text"),
    ("t", "ALTER TABLE t ADD at timestamptz DEFAULT clock_timestamp()"),
    ("t", "ALTER TABLE t ADD number int GENERATED ALWAYS AS IDENTITY"),
    ("t", "ALTER TABLE t ADD counted serial"),
    ("t", "ALTER TABLE t ADD lucky seven"),
    ("parted", "ALTER TABLE parted ALTER n TYPE int USING n + 1"),
]


def test_what_leaves_values_as_they_are_is_no_rewrite(shop: Database, tmp_path: Path) -> None:
    for statement in KEEP_VALUES:
        assert looked(shop, tmp_path, statement).rewritten_lsn == 0, statement


def test_rows_that_got_other_values_are_noted(shop: Database, tmp_path: Path) -> None:
    for table, statement in REWRITE:
        before = looked(shop, tmp_path, table=table).rewritten_lsn
        end_lsn = parse_lsn(shop.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        found = looked(shop, tmp_path, statement, table=table)
        assert before < end_lsn < found.rewritten_lsn == found.seen_lsn, statement
        assert looked(shop, tmp_path, "TRUNCATE t", table=table).rewritten_lsn == found.rewritten_lsn, "it stays noted"
        shop.execute("INSERT INTO t (id) VALUES (1)")


def test_shape_is_noted_once_it_is_sure_from_where_on_it_holds(shop: Database, tmp_path: Path) -> None:
    assert looked(shop, tmp_path).shape is None
    found = looked(shop, tmp_path, "ALTER TABLE t ADD five int DEFAULT 5")
    assert found.shape is not None
    with shop.connect() as connection:
        assert found.shape == Catalog(connection).shape(found.shape.relation_oid, ["p"])
    assert [column.missing for column in found.shape.columns if column.name == "five"] == ["5"]
    end = shop.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0]
    assert 0 < found.seen_lsn <= parse_lsn(end)
    shop.execute("ALTER TABLE t ADD six int")
    oid = found.shape.relation_oid
    with shop.connect() as connection:
        connection.autocommit = True
        AlterationWatch(str(tmp_path / "t"), ["p"], [oid]).look(connection, 1)
    assert alterations(str(tmp_path / "t"))[oid].shape is None, "another process has seen it once, and not twice"


def test_killed_after_a_note_it_goes_on_from_there(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path)
    oid = shop.rows("SELECT 't'::regclass::oid::int8")[0][0]
    CaptureProcess(config, f"{ALTERATION_NOTED}=kill").wait_for_death()
    first = alterations(config.log_location)[oid]
    assert (first.seen_lsn, first.shape) == (0, None)
    shop.execute("ALTER TABLE t ADD five int DEFAULT 5")
    CaptureProcess(config, f"{ALTERATION_NOTED}=kill").wait_for_death()
    assert alterations(config.log_location)[oid].seen_lsn > 0
    process = CaptureProcess(config)
    try:
        wait_for(lambda: alterations(config.log_location)[oid].shape, what="the shape to be noted")
    finally:
        process.stop()

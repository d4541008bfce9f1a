"""Rows by key under a snapshot, with keys of many types: each key is answered once, by its row or by a deletion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from pgtide.replication.connect import connect
from pgtide.sinks.merge import DELETE
from pgtide.snapshot.copy_range import Rewritten
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.snapshot.table_ranges import cut, leaves
from pgtide.spark.keyed_rows import KeyedTable, key_types, read_keys
from pgtide.spark.source_rows import source_table
from tests.database import Database
from tests.snapshot.exported import exported_snapshot


def answered(
    database: Database,
    table: str,
    keys: Sequence[tuple[str, ...]],
    *meanwhile: str,
    ranges: list[CtidRange] | None = None,
) -> dict[tuple[Any, ...], dict[str, Any] | None]:
    """By key: the row as of a snapshot that was taken before `meanwhile`, or None where it is to be deleted."""
    with exported_snapshot(database, table) as (snapshot, oid), connect(database.dsn, timeout_s=10) as reader:
        source = source_table(reader, oid, snapshot, ())
        looked_in = cut(reader, source, 1 << 20) if ranges is None else ranges
        keyed = KeyedTable(source, key_types(reader, source.shape), tuple(leaves(reader, source)), tuple(looked_in))
        database.execute(*meanwhile)
        asked = pa.table({f"k{n}": pa.array(column, pa.string()) for n, column in enumerate(zip(*keys, strict=True))})
        rows = [row for batch in read_keys(reader, keyed, asked) for row in batch.to_pylist()]
    names = [column.name for column in source.shape.key_columns]
    found: dict[tuple[Any, ...], dict[str, Any] | None] = {}
    for row in rows:
        key = tuple(repr(row[name]) if isinstance(row[name], list | dict) else row[name] for name in names)
        assert key not in found, "answered twice"
        deleted = row.pop(DELETE)
        found[key] = None if deleted else row
    return found


@pytest.mark.parametrize(
    ("type_name", "there", "absent"),
    [
        ("int8", "-5", "7"),
        ("text", "quoted \"\\{,} 'text'", ""),
        ("varchar(20)", "a", "b"),
        ("char(4)", "ab", "cd"),
        ("uuid", "11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-555555555556"),
        ("numeric", "1.0", "1.00"),
        ("numeric(10,2)", "1.50", "1.51"),
        ("date", "2024-02-29", "2024-03-01"),
        ("timestamptz", "2024-02-29 12:00:00.123456+00", "2024-02-29 12:00:00.123457+00"),
        ("varbit", "101", "10"),
        ("bytea", "\\x00ff", "\\x00fe"),
        ("boolean", "t", "f"),
        ("mood", "sad", "happy"),
        ("positive", "3", "4"),
        ("inet", "10.0.0.1", "10.0.0.2"),
        ("int4[]", "{1,2}", "{1,3}"),
        ("int4range", "[1,)", "[1,3)"),
        ("tstzrange", '["2024-02-29 12:00:00+00",)', "empty"),
        ("place", "(here,2024-02-29)", "(here,)"),
    ],
)
def test_keys_of_any_type_are_found(database: Database, type_name: str, there: str, absent: str) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'happy')",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        "CREATE TYPE place AS (town text, since date)",
        f"CREATE TABLE t (k {type_name} PRIMARY KEY, v text)",
    )
    with database.connect() as connection:
        connection.execute(f"INSERT INTO t VALUES (%s::text::{type_name}, 'value')".encode(), [there])
    found = answered(database, "t", [(there,), (absent,)])
    assert sorted((row or {}).get("v") or "" for row in found.values()) == ["", "value"]
    assert len(found) == 2


def test_composite_key_is_compared_as_a_whole(database: Database) -> None:
    database.execute(
        'CREATE TABLE t (v int, "B" text COLLATE "C", a int, PRIMARY KEY (a, "B"))',
        "INSERT INTO t VALUES (1, 'x', 1), (2, 'y', 1), (3, 'x', 2)",
    )
    found = answered(database, "t", [("y", "1"), ("y", "2"), ("x", "2")])
    assert found == {
        ("y", 1): {"v": 2, "B": "y", "a": 1},
        ("y", 2): None,
        ("x", 2): {"v": 3, "B": "x", "a": 2},
    }


def test_rows_are_those_of_the_snapshot_and_of_the_ranges(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (k int PRIMARY KEY, v text)", "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 1000) n"
    )
    [(oid, file)] = database.rows("SELECT oid::int8, relfilenode::int8 FROM pg_class WHERE relname = 't'")
    [(block,)] = database.rows("SELECT (ctid::text::point)[0]::int FROM t WHERE k = 900")
    some = [CtidRange(oid, file, 0, block)]
    statements = "UPDATE t SET v = 'new'", "DELETE FROM t WHERE k = 5"
    found = answered(database, "t", [("5",), ("900",), ("2000",)], *statements, ranges=some)
    assert found == {(5,): {"k": 5, "v": "old"}, (900,): None, (2000,): None}


def test_partitions_are_searched_together(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (k int PRIMARY KEY, v text) PARTITION BY RANGE (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
        "INSERT INTO t VALUES (1, 'one'), (11, 'eleven')",
    )
    keys = [("1",), ("11",), ("12",)]
    assert answered(database, "t", keys) == {(1,): {"k": 1, "v": "one"}, (11,): {"k": 11, "v": "eleven"}, (12,): None}
    [(oid, file)] = database.rows("SELECT oid::int8, relfilenode::int8 FROM pg_class WHERE relname = 't2'")
    only_second = [CtidRange(oid, file, 0, None)]
    assert answered(database, "t", keys, ranges=only_second)[1,] is None


def test_truncated_table_is_not_mistaken_for_one_without_these_keys(database: Database) -> None:
    database.execute("CREATE TABLE t (k int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    with pytest.raises(Rewritten):
        answered(database, "t", [("1",)], "TRUNCATE t")

"""A partition that is dropped between two looks at its table: the table is read anew, and not taken to be gone."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from pgtide.config import Config, Source
from pgtide.errors import TableError
from pgtide.replication.connect import Connection, connect
from pgtide.snapshot.copy_range import Dropped, Rewritten, TableAsOf, stored_rows
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.snapshot.table_ranges import cut, leaves
from pgtide.spark.keyed_rows import KeyedTable, key_types, read_keys
from pgtide.spark.new_pair import KeyReader
from pgtide.spark.source_rows import source_table
from pgtide.spark.source_table import SourceTable
from tests.database import Database
from tests.snapshot.exported import exported_snapshot


def _cut(connection: Connection, table: SourceTable) -> None:
    cut(connection, table, 1 << 20)


def _rows(connection: Connection, table: SourceTable) -> None:
    for leaf in leaves(connection, table):
        list(stored_rows(connection, table, CtidRange(leaf, 0, 0, None)))


def _place_of_keys(connection: Connection, table: SourceTable) -> None:
    KeyReader(None, Config(source=Source(dsn="")), table, [], 1).table(connection)  # type: ignore[arg-type]


def _keys(connection: Connection, table: SourceTable) -> None:
    types = key_types(connection, table.shape)
    keyed = KeyedTable(table, types, tuple(leaves(connection, table)), ())
    list(read_keys(connection, keyed, pa.table({"k0": ["1"]})))


@pytest.mark.parametrize("reading", [_cut, _rows, _place_of_keys, _keys])
@pytest.mark.parametrize(("statement", "error"), [("DROP TABLE events_1", Rewritten), ("DROP TABLE events", Dropped)])
def test_dropped_partition_has_its_table_read_anew_and_a_dropped_table_is_told_by_name(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    reading: Callable[[Connection, SourceTable], None],
    statement: str,
    error: type[TableError],
) -> None:
    database.execute(
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM (10) TO (20)",
    )

    def then_dropped(connection: Connection, table: TableAsOf) -> list[int]:
        found = leaves_before(connection, table)
        database.execute(statement)
        return found

    leaves_before = leaves
    with exported_snapshot(database, "events") as (snapshot, oid), connect(database.dsn, timeout_s=10) as reader:
        table = source_table(reader, oid, snapshot, ())
        for module in ("pgtide.snapshot.table_ranges", "pgtide.spark.new_pair", __name__):
            monkeypatch.setattr(f"{module}.leaves", then_dropped)
        with pytest.raises(TableError) as caught:
            reading(reader, table)
    assert type(caught.value) is error
    assert "public.events" in caught.value.what

"""Which tables have the rows of a table that is to be read."""

from __future__ import annotations

import pytest

from pgtide.errors import TableError
from pgtide.replication.catalog import Catalog
from pgtide.replication.connect import connect
from pgtide.replication.slot import Snapshot
from pgtide.snapshot.copy_range import TableAsOf
from pgtide.snapshot.table_ranges import leaves, partition_files
from tests.database import Database


def test_a_foreign_partition_that_came_after_the_start_parks_the_table_with_what_to_do(database: Database) -> None:
    database.execute(
        "CREATE FOREIGN DATA WRAPPER elsewhere",
        "CREATE SERVER archive FOREIGN DATA WRAPPER elsewhere",
        "CREATE TABLE events (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (0) TO (10)",
    )
    with connect(database.dsn, timeout_s=10) as connection:
        catalog = Catalog(connection)
        (info,) = catalog.tables(["public.events"])
        table = TableAsOf(catalog.shape(info.oid), Snapshot("", "", ""))
        assert leaves(connection, table) == [database.rows("SELECT 'events_1'::regclass::oid::int8")[0][0]]

        database.execute(
            "CREATE FOREIGN TABLE events_2 PARTITION OF events FOR VALUES FROM (10) TO (20) SERVER archive"
        )
        with pytest.raises(TableError) as caught:
            leaves(connection, table)
    assert "public.events: its partition public.events_2 is a foreign table" in caught.value.what
    assert '"!public.events"' in caught.value.remedy


def test_partition_that_somebody_has_locked_is_found_without_waiting(database: Database) -> None:
    database.execute(
        "CREATE TABLE events (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE plain (id int)",
    )
    [(leaf, file, plain)] = database.rows(
        "SELECT 'events_1'::regclass::oid::int8, pg_relation_filenode('events_1')::int8, 'plain'::regclass::oid::int8"
    )
    with database.connect() as other, connect(database.dsn, timeout_s=10) as connection:
        catalog = Catalog(connection)
        table, unparted = (
            TableAsOf(catalog.shape(info.oid), Snapshot("", "", ""))
            for info in catalog.tables(["public.events", "public.plain"])
        )
        other.execute("BEGIN")
        other.execute("LOCK TABLE events_1, plain IN ACCESS EXCLUSIVE MODE")
        connection.execute("SET lock_timeout = 1")
        assert leaves(connection, table) == [leaf]
        assert partition_files(connection, table) == {(leaf, file)}
        assert leaves(connection, unparted) == [plain]
        assert partition_files(connection, unparted) == set()

"""Reading a range with regard for others: time is limited, and who waits for our lock gets it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pgtide.replication.connect import Connection, connect
from pgtide.replication.server import reached
from pgtide.snapshot.copy_range import Cancelled, ReadLimits
from pgtide.snapshot.lock_watch import LockWatch
from pgtide.snapshot.table_ranges import cut
from pgtide.spark.source_rows import source_table
from pgtide.spark.source_table import SourceTable, read_range
from tests.database import Database
from tests.snapshot.exported import exported_snapshot
from tests.waiting import wait_for


@contextmanager
def slow_table(database: Database) -> Iterator[tuple[Connection, SourceTable]]:
    """A table whose rows take a tenth of a second each, through a row filter that waits."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 1000)")
    with exported_snapshot(database, "t") as (snapshot, oid), connect(database.dsn, timeout_s=10) as reader:
        source = source_table(reader, oid, snapshot, ())
        yield reader, replace(source, row_filter="pg_sleep(0.1) IS NOT NULL")


def test_statement_that_takes_too_long_is_cancelled(database: Database) -> None:
    with slow_table(database) as (reader, source):
        source = replace(source, limits=ReadLimits(statement_timeout_s=0.3))
        with pytest.raises(Cancelled):
            list(read_range(reader, source, cut(reader, source, 1 << 20)[0]))


def test_migration_is_let_through_and_the_reader_told(database: Database) -> None:
    with slow_table(database) as (reader, source):
        oid = source.shape.relation_oid
        with LockWatch(reached(database.dsn, reader), 10) as watch:
            source = replace(source, limits=ReadLimits(reader_name=watch.reader_name(oid)))
            failed: list[Exception] = []

            def read() -> None:
                try:
                    list(read_range(reader, source, cut(reader, source, 1 << 20)[0]))
                except Cancelled as error:
                    failed.append(error)

            thread = threading.Thread(target=read)
            thread.start()
            reading = f"SELECT 1 FROM pg_stat_activity WHERE application_name = '{watch.reader_name(oid)}'"
            wait_for(lambda: database.rows(reading), what="the range to be read")
            database.execute("ALTER TABLE t ADD COLUMN more int")
            thread.join(30)
            assert failed
            assert watch.let_through(oid) == 1


def test_reader_that_nobody_waits_for_is_left_alone(database: Database) -> None:
    with slow_table(database) as (reader, source):
        source = replace(source, row_filter="id > 15 OR pg_sleep(0.2) IS NOT NULL")
        oid = source.shape.relation_oid
        with LockWatch(reached(database.dsn, reader), 10) as watch:
            source = replace(source, limits=ReadLimits(reader_name=watch.reader_name(oid)))
            rows = sum(batch.num_rows for batch in read_range(reader, source, cut(reader, source, 1 << 20)[0]))
        assert (rows, watch.let_through(oid)) == (1000, 0)

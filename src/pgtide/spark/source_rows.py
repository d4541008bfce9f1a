"""A source table's rows as of a snapshot, as Spark sees them: how the first load and verify read Postgres.

A table is cut into ctid ranges of about one output file each; its leaf partitions are cut as tables of their own.  Few
rows are read in the driver; many by executors, each range over a connection of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

from pgtide.config import Config
from pgtide.errors import TableError, TransientError
from pgtide.replication.catalog import Catalog
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.published import published_tables
from pgtide.replication.server import OtherServerError
from pgtide.spark.copy_range import (
    Altered,
    Cancelled,
    Rewritten,
    SnapshotGone,
    SourceReference,
    SourceTable,
    StartAgain,
    dropped,
    read_range,
    under_snapshot,
)
from pgtide.spark.ctid_ranges import CtidRange
from pgtide.spark.rows import arrow_schema, table_schema

_RANGE_BYTES = 64 << 20
_DRIVER_BYTES = 16 << 20
_BLOCK_BYTES = 8192  # as nearly every server has it; only to guess


def source_table(
    connection: Connection, relation_oid: int, snapshot: str, server_started: str, publications: Sequence[str]
) -> SourceTable:
    """The table as of the snapshot: the columns and rows that the stream carries from there on."""
    with under_snapshot(connection, [relation_oid], snapshot):
        shape = Catalog(connection).shapes([relation_oid], publications).get(relation_oid)
        published = published_tables(connection, publications, [relation_oid]).get(relation_oid)
    if shape is None:
        raise dropped(f"the table with oid {relation_oid}")
    row_filter = published.row_filter if published else None
    return SourceTable(shape, table_schema(shape), snapshot, server_started, row_filter)


def leaves(connection: Connection, table: SourceTable) -> list[int]:
    """The tables that have the rows: the table itself, or its leaf partitions."""
    oid = table.shape.relation_oid
    with postgres_errors(f"reading {table.shape.qualified_name}"):
        found = connection.execute(
            "SELECT c.oid::int8, c.relkind::text, t.relid::regclass::text "
            "FROM pg_catalog.pg_partition_tree(%s) t JOIN pg_catalog.pg_class c ON c.oid = t.relid "
            "WHERE t.isleaf ORDER BY 1",
            [oid],
        ).fetchall()
    for _, relkind, name in found:
        if relkind == "f":
            raise TableError(
                f"{table.shape.qualified_name}: its partition {name} is a foreign table, whose changes nobody sends.",
                remedy=f'Detach it, or leave the table out: source.tables = [..., "!{table.shape.qualified_name}"]',
            )
    return [row[0] for row in found] or [oid]


def cut(connection: Connection, table: SourceTable) -> list[CtidRange]:
    """All ranges of the table, each of about one output file; the last one of each leaf is open at its end."""
    ranges = []
    for leaf in leaves(connection, table):
        # The size is read after the snapshot is taken: the other way round rows could lie beyond it.
        with under_snapshot(connection, [leaf], table.snapshot):
            size = connection.execute(
                "SELECT c.relfilenode::int8, pg_relation_size(c.oid) / current_setting('block_size')::int8, "
                "       pg_relation_size(c.oid) + coalesce(pg_relation_size(nullif(c.reltoastrelid, 0)), 0) "
                "FROM pg_catalog.pg_class c WHERE c.oid = %s",
                [leaf],
            ).fetchone()
        if size is None:
            continue  # attached after the snapshot was taken
        file, blocks, length_bytes = size
        step = max(1, _RANGE_BYTES * blocks // max(length_bytes, 1))
        starts = list(range(0, max(blocks, 1), step))
        ranges += [CtidRange(leaf, file, start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return ranges


def file_blocks(connection: Connection, relation_oid: int) -> int:
    """How many blocks the table or leaf has now."""
    with postgres_errors("reading the source"):
        row = connection.execute(
            "SELECT pg_relation_size(%s::oid) / current_setting('block_size')::int8", [relation_oid]
        ).fetchone()
    return int(row[0] or 0) if row else 0


def table_bytes(connection: Connection, table: SourceTable) -> int:
    """What the table takes in the source, large values included."""
    with postgres_errors(f"reading {table.shape.qualified_name}"):
        row = connection.execute(
            "SELECT sum(pg_table_size(leaf::oid::regclass))::int8 FROM unnest(%s::int8[]) leaf",
            [leaves(connection, table)],
        ).fetchone()
    return int(row[0] or 0) if row else 0


def rows_here(connection: Connection, table: SourceTable, ranges: Sequence[CtidRange]) -> pa.Table | None:
    """The rows, if they are one range alone and few; None if executors have to read them."""
    if len(ranges) > 1 or not _may_be_small(ranges[0]):
        return None
    batches: list[pa.RecordBatch] = []
    length_bytes = 0
    for batch in read_range(connection, table, ranges[0]):
        batches.append(batch)
        length_bytes += batch.nbytes
        if length_bytes > _DRIVER_BYTES:
            return None
    return pa.Table.from_batches(batches, arrow_schema(table.columns))


def _may_be_small(part: CtidRange) -> bool:
    """Whether it is worth a try: a table's beginning may be all of it."""
    if part.end_block is None:
        return part.first_block == 0
    return part.first_block == 0 or (part.end_block - part.first_block) * _BLOCK_BYTES <= _DRIVER_BYTES


def rows_by_executors(
    spark: SparkSession, config: Config, table: SourceTable, ranges: Sequence[CtidRange], connections: int | None = None
) -> DataFrame:
    """The rows, read anew by every action on the frame, over so many connections at once (`snapshot.connections`)."""
    source = SourceReference(
        str(config.file), config.source.connect_timeout_seconds, table.server_started, table.standby
    )
    parts = tuple(ranges)

    def read(batches: object) -> object:
        for numbers in batches:  # type: ignore[attr-defined]
            for number in numbers.column(0).to_pylist():
                with source.open() as own:
                    yield from read_range(own, table, parts[number])

    tasks = min(len(parts), connections or config.snapshot.connections)
    return spark.range(0, len(parts), 1, tasks).mapInArrow(read, table.columns)  # type: ignore[arg-type]


_OF_WORKERS = {
    known.__name__: known
    for known in (SnapshotGone, Rewritten, Altered, Cancelled, StartAgain, TableError, TransientError)
}
_OF_WORKERS[OtherServerError.__name__] = SnapshotGone  # nobody else has it
_LAST_LINE = re.compile(rf"^(?:\w+\.)*({'|'.join(_OF_WORKERS)}): (.*)$", re.MULTILINE)


@contextmanager
def errors_of_workers(table_name: str) -> Iterator[None]:
    """Spark brings the errors of its workers as text: ours become themselves again."""
    try:
        yield
    except PythonException as error:
        found = _LAST_LINE.findall(str(error))
        if found:
            name, what = found[-1]
            raise _OF_WORKERS[name](f"{table_name}: {what}") from error
        raise

"""A source table's rows as of a snapshot, as Spark sees them: how the first load and verify read Postgres.

Few rows are read in the driver; many by executors, each range over a connection of its own.
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
from pgtide.replication.connect import Connection
from pgtide.replication.server import OtherServerError
from pgtide.replication.slot import Snapshot
from pgtide.snapshot.copy_range import Altered, Cancelled, Dropped, Locked, Rewritten, SnapshotGone, StartAgain
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.snapshot.table_ranges import table_as_of
from pgtide.spark.keys import UnusableKey
from pgtide.spark.rows import arrow_schema, table_schema
from pgtide.spark.source_table import SourceReference, SourceTable, read_range

_DRIVER_BYTES = 16 << 20
_BLOCK_BYTES = 8192  # as nearly every server has it; only to guess


def source_table(
    connection: Connection, relation_oid: int, snapshot: Snapshot, publications: Sequence[str]
) -> SourceTable:
    """The table as of the snapshot: the columns and rows that the stream carries from there on."""
    found = table_as_of(connection, relation_oid, snapshot, publications)
    columns = table_schema(found.shape)
    return SourceTable(found.shape, snapshot, found.row_filter, columns=columns)


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
        str(config.file), config.source.connect_timeout_seconds, table.snapshot.server_started, table.standby
    )
    parts = tuple(ranges)

    def read(batches: object) -> object:
        for numbers in batches:  # type: ignore[attr-defined]
            for number in numbers.column(0).to_pylist():
                with source.open() as own:
                    yield from read_range(own, table, parts[number])

    tasks = min(len(parts), connections or config.snapshot.connections, spark.sparkContext.defaultParallelism)
    return spark.range(0, len(parts), 1, tasks).mapInArrow(read, table.columns)  # type: ignore[arg-type]


_OF_WORKERS = {
    known.__name__: known
    for known in (
        SnapshotGone,
        Rewritten,
        Altered,
        Dropped,
        Cancelled,
        Locked,
        StartAgain,
        UnusableKey,
        TableError,
        TransientError,
    )
}
_OF_WORKERS[OtherServerError.__name__] = SnapshotGone  # nobody else has it
_LAST_LINES = re.compile(rf"^(?:\w+\.)*({'|'.join(_OF_WORKERS)}): (.*)(?:\n(\S.*))?$", re.MULTILINE)  # with the remedy


@contextmanager
def errors_of_workers(table_name: str) -> Iterator[None]:
    """Spark brings the errors of its workers as text: ours become themselves again."""
    try:
        yield
    except PythonException as error:
        found = _LAST_LINES.findall(str(error))
        if found:
            name, what, remedy = found[-1]
            told = what if what.startswith(table_name) else f"{table_name}: {what}"
            raise _OF_WORKERS[name](told, remedy=remedy) from error
        raise

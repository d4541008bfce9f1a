"""A source table's rows as of a snapshot, as Spark sees them: how the first load and verify read Postgres.

A table is cut into ctid ranges of about one output file each; its leaf partitions are cut as tables of their own.  Few
rows are read in the driver; many by executors, each range over a connection of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession

from pgtide.config import Config
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.spark.copy_range import (
    CtidRange,
    Rewritten,
    SnapshotGone,
    SourceReference,
    SourceTable,
    read_range,
    reading,
)
from pgtide.spark.rows import arrow_schema

_RANGE_BYTES = 128 << 20
_DRIVER_BYTES = 16 << 20


def cut(connection: Connection, table: SourceTable) -> list[CtidRange]:
    """All ranges of the table; the last one of each leaf is open at its end."""
    oid = table.shape.relation_oid
    with postgres_errors(f"reading {table.shape.qualified_name}"):
        found = connection.execute(
            "SELECT relid::oid::int8 FROM pg_catalog.pg_partition_tree(%s) WHERE isleaf", [oid]
        ).fetchall()
    ranges = []
    for leaf in [row[0] for row in found] or [oid]:
        # The size is read after the snapshot is taken: the other way round rows could lie beyond it.
        with reading(connection, leaf, table.snapshot):
            size = connection.execute(
                "SELECT pg_catalog.pg_relation_size(%s) / current_setting('block_size')::int8, "
                "current_setting('block_size')::int8",
                [leaf],
            ).fetchone()
        assert size is not None
        starts = list(range(0, max(size[0], 1), _RANGE_BYTES // size[1]))
        ranges += [CtidRange(leaf, start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return ranges


def rows_here(connection: Connection, table: SourceTable, ranges: Sequence[CtidRange]) -> pa.Table | None:
    """The rows, if they are a table's first range alone and few; None if executors have to read them."""
    if len(ranges) > 1 or ranges[0].first_block > 0:
        return None
    batches: list[pa.RecordBatch] = []
    length_bytes = 0
    for batch in read_range(connection, table, ranges[0]):
        batches.append(batch)
        length_bytes += batch.nbytes
        if length_bytes > _DRIVER_BYTES:
            return None
    return pa.Table.from_batches(batches, arrow_schema(table.columns))


def rows_by_executors(
    spark: SparkSession, config: Config, table: SourceTable, ranges: Sequence[CtidRange]
) -> DataFrame:
    """The rows, read anew by every action on the frame, over at most `snapshot.connections` connections at once."""
    source = SourceReference(str(config.file), config.source.connect_timeout_seconds, table.server_started)
    parts = tuple(ranges)

    def read(batches: object) -> object:
        for numbers in batches:  # type: ignore[attr-defined]
            for number in numbers.column(0).to_pylist():
                with source.open() as own:
                    yield from read_range(own, table, parts[number])

    tasks = min(len(parts), config.snapshot.connections)
    return spark.range(0, len(parts), 1, tasks).mapInArrow(read, table.columns)  # type: ignore[arg-type]


@contextmanager
def errors_of_workers(table_name: str) -> Iterator[None]:
    """Spark brings the errors of its workers as text: those that a new snapshot mends become themselves again."""
    try:
        yield
    except PythonException as error:
        for known in (SnapshotGone, Rewritten):
            if known.__name__ in str(error):
                raise known(f"{table_name}: the snapshot is gone, or the table was rewritten.") from error
        raise

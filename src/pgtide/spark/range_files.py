"""Ranges of a source table as Parquet files, written by executors where the lake table wants its data files."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.sinks import FileLayout
from pgtide.sinks.parquet_file import write_file
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.spark.source_table import SourceReference, SourceTable, read_range
from pgtide.spark.worker_process import ready_for_more


def files_by_executors(
    spark: SparkSession,
    config: Config,
    table: SourceTable,
    ranges: Sequence[CtidRange],
    layout: FileLayout,
    connections: int,
) -> list[str]:
    """The paths of the files; a range without rows has none.  At most `connections` are read at once.

    There are no more tasks than run at once: each costs 0.2 s of a worker's time before and after its rows.
    """
    timeout_s = config.source.connect_timeout_seconds
    source = SourceReference(str(config.file), timeout_s, table.snapshot.server_started, table.standby)
    parts = tuple(ranges)

    def write(batches: object) -> object:
        with source.open() as own:
            for numbers in batches:  # type: ignore[attr-defined]
                for number in numbers.column(0).to_pylist():
                    path = write_file(read_range(own, table, parts[number]), layout)
                    yield pa.RecordBatch.from_pydict({"path": pa.array([path], pa.string())})
        ready_for_more()

    tasks = min(len(parts), connections, spark.sparkContext.defaultParallelism)
    written = spark.range(0, len(parts), 1, tasks).mapInArrow(write, "path string")  # type: ignore[arg-type]
    return [row[0] for row in written.collect() if row[0] is not None]

"""Ranges of a source table as Parquet files, written by executors where the lake table wants its data files.

Nothing is the table's before its commit names the files: what a killed or repeated task has written is left behind, as
Spark's own writers leave it, and Iceberg's `remove_orphan_files` finds it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.sinks import FileLayout
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.spark.source_table import SourceReference, SourceTable, read_range
from pgtide.spark.worker_process import ready_for_more

_ROW_GROUP_BYTES = 64 << 20
_REPEATED = 0.5  # a dictionary pays when a column has less than half as many values as rows
_SAMPLE_ROWS = 5_000  # to tell; counting the values of a whole batch would be a tenth of all work


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


def write_file(batches: Iterable[pa.RecordBatch], layout: FileLayout) -> str | None:
    """One file of all the rows; None if there are none."""
    path = Path(layout.folder) / f"pgtide-{uuid.uuid4().hex}.parquet"
    writer: pq.ParquetWriter | None = None
    try:
        for rows in _row_groups(batches, layout.schema):
            if writer is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = _writer(path, rows)
            writer.write_table(rows, row_group_size=rows.num_rows)
    except BaseException:
        if writer is not None:
            writer.close()
        path.unlink(missing_ok=True)
        raise
    if writer is None:
        return None
    writer.close()
    return str(path)


def _writer(path: Path, first: pa.Table) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        first.schema,
        compression="zstd",
        use_dictionary=[field.name for field in first.schema if _repeats(first.column(field.name).chunk(0))],
        store_decimal_as_integer=True,
    )


def _repeats(column: pa.Array) -> bool:
    if pa.types.is_nested(column.type):
        return False
    sample = column.slice(0, _SAMPLE_ROWS)
    return bool(pc.count_distinct(sample).as_py() < _REPEATED * len(sample))


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    length_bytes = 0
    for batch in batches:
        held.append(_conformed(batch, schema))
        length_bytes += batch.nbytes
        if length_bytes >= _ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held, length_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns in the order and with the types of the file."""
    arrays = [
        pa.nulls(batch.num_rows, field.type)
        if field.name not in batch.schema.names
        else batch.column(field.name).cast(field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)

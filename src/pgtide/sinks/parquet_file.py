"""Rows as a Parquet file that becomes a part of a lake table: it lies where the table wants its data files.

Nothing is the table's before a commit names the file: what a killed or repeated writer has written is left behind, as
Spark's own writers leave it, and Iceberg's `remove_orphan_files` finds it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgtide.sinks import FileLayout

_ROW_GROUP_BYTES = 64 << 20
_REPEATED = 0.5  # a dictionary pays when a column has less than half as many values as rows
_SAMPLE_ROWS = 5_000  # to tell; counting the values of a whole batch would be a tenth of all work


def write_file(batches: Iterable[pa.RecordBatch], layout: FileLayout) -> str | None:
    """One file of all the rows, as the table will name it; None if there are none."""
    name = f"pgtide-{uuid.uuid4().hex}.parquet"
    path = Path(layout.folder) / name
    writer: pq.ParquetWriter | None = None
    try:
        for rows in _row_groups(batches, layout.schema):
            if writer is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = _writer(path, rows)
            writer.write_table(rows, row_group_size=rows.num_rows)
        if writer is not None:
            writer.close()
    except BaseException:
        if writer is not None:
            with suppress(Exception):  # the first error is the one to tell
                writer.close()
        path.unlink(missing_ok=True)
        raise
    return None if writer is None else f"{layout.location}/{name}"


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
    """The columns in the order and with the types of the file; those that rows do not have are null."""
    unknown = set(batch.schema.names) - set(schema.names)
    if unknown:
        raise ValueError(f"the file has no column {', '.join(sorted(unknown))}")
    arrays = [
        pa.nulls(batch.num_rows, field.type)
        if field.name not in batch.schema.names
        else batch.column(field.name).cast(field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)

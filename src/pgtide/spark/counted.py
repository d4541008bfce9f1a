"""Changes of a table without a key as rows that come (1) and go (-1): under REPLICA IDENTITY FULL an update says both.

Order does not matter between two TRUNCATEs: what is left is what was there plus what came minus what went.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql.types import IntegerType, StructField, StructType

from pgtide.change import OldImage, Op
from pgtide.errors import TableError
from pgtide.log.reader import LogRows
from pgtide.schema import TableShape
from pgtide.sinks.merge import PREFIX
from pgtide.sinks.multiset import SIGN
from pgtide.spark.images import Image, new_rows, old_rows
from pgtide.spark.missing import lake_missing
from pgtide.spark.rows import arrow_schema
from pgtide.types import TypePolicy


def counted_schema(columns: StructType) -> StructType:
    return StructType([*columns, StructField(SIGN, IntegerType())])


def has_rows_that_go(found: LogRows) -> bool:
    return bool(np.isin(found.rows.column("_op").to_numpy(), (Op.UPDATE, Op.DELETE)).any())


def last_truncate(pieces: Iterable[LogRows]) -> int | None:
    """The offset of the last TRUNCATE, before which nothing counts."""
    last = None
    for found in pieces:
        truncates = np.flatnonzero(found.rows.column("_op").to_numpy() == Op.TRUNCATE)
        if len(truncates):
            last = found.rows.column("_offset")[int(truncates[-1])].as_py()
    return last


def counted_rows(
    shape: TableShape, found: LogRows, columns: StructType, policy: TypePolicy, after: int | None
) -> pa.Table:
    """The rows behind offset `after` (None: all), as they come and go."""
    rows = found.rows
    if after is not None:
        rows = rows.filter(pa.array(rows.column("_offset").to_numpy() > after))
    part = LogRows(found.shape, rows)
    _check_whole_rows(shape, part)
    names = {column.attnum: column.name for column in shape.columns}
    captured = [names.get(column.attnum, f"{PREFIX}{column.storage_name}") for column in found.shape.columns]
    later = {column.name: lake_missing(column, 1, policy) for column in shape.columns if column.name not in captured}
    come, go = new_rows(part, policy), old_rows(part, policy)
    return pa.concat_tables([_signed(captured, come, columns, later, 1), _signed(captured, go, columns, later, -1)])


def _check_whole_rows(shape: TableShape, found: LogRows) -> None:
    rows = found.rows
    lost = np.isin(rows.column("_op").to_numpy(), (Op.UPDATE, Op.DELETE))
    if "_old" in rows.schema.names:
        lost &= rows.column("_old").to_numpy() != OldImage.FULL
    if lost.any():
        raise TableError(
            f"{shape.qualified_name} has no key, and a row of it was updated or deleted without saying which.",
            remedy=f"ALTER TABLE {shape.qualified_name} REPLICA IDENTITY FULL (or ADD PRIMARY KEY), "
            "then drop its mirror table to load it anew.",
        )


def _signed(names: Sequence[str], image: Image, columns: StructType, later: dict[str, pa.Array], sign: int) -> pa.Table:
    """`later`: what these rows have in columns that came after them."""
    wanted = arrow_schema(counted_schema(columns))
    here = pa.array(np.flatnonzero(image.present))
    arrays = dict(zip(names, image.columns, strict=True))
    ordered = []
    for field in wanted:
        if field.name == SIGN:
            ordered.append(pa.array(np.full(len(here), sign, np.int32)))
        elif field.name in arrays:
            taken = arrays[field.name].take(here)
            ordered.append(taken if taken.type == field.type else taken.cast(field.type))
        else:
            value = later.get(field.name, pa.nulls(1, field.type)).cast(field.type)
            ordered.append(value.take(pa.array(np.zeros(len(here), np.int64))))
    return pa.Table.from_arrays(ordered, schema=wanted)

"""Old and new row of each change, as columns: what was sent of them, mapped to what Spark sees.

An insert has a new row, a delete an old one, an update both if REPLICA IDENTITY sent the old one.  Of an old row
perhaps only the key was sent, of a new one everything but unchanged TOAST values: `absent` tells, per column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.change import OldImage, Op
from pgtide.log.reader import LogRows
from pgtide.schema import Column
from pgtide.spark.fold import unchanged_flags
from pgtide.spark.rows import lake_column
from pgtide.types import TypePolicy, lake_type

Bools = npt.NDArray[np.bool_]

_WITH_NEW_ROW = (Op.INSERT, Op.UPDATE, Op.READ, Op.MESSAGE, Op.NOTE)


@dataclass(frozen=True, slots=True)
class Image:
    """Rows of the captured shape: all its columns, in order."""

    columns: list[pa.Array]
    absent: list[Bools | None]  # rows in which the column was not sent
    present: Bools  # rows that have such an image


def new_rows(found: LogRows, policy: TypePolicy) -> Image:
    flags = unchanged_flags(found.shape, found.rows)
    columns = [lake_column(column, column, found.rows, policy) for column in found.shape.columns]
    absent = [flags.get(column.storage_name) for column in found.shape.columns]
    return Image(columns, absent, np.isin(_ops(found), _WITH_NEW_ROW))


def old_rows(found: LogRows, policy: TypePolicy) -> Image:
    ops, sent = _ops(found), _sent_images(found)
    deleted = ops == Op.DELETE
    only_key = sent == OldImage.KEY
    columns = [_old_column(column, found, deleted, policy) for column in found.shape.columns]
    absent = [None if column.key else only_key for column in found.shape.columns]
    return Image(columns, absent, deleted | ((ops == Op.UPDATE) & (sent != OldImage.NONE)))


def keys(found: LogRows, policy: TypePolicy) -> list[pa.Array]:
    """The key of the row that the change left behind or took away; a TOASTed part that did not change is the old."""
    flags = unchanged_flags(found.shape, found.rows)
    columns = []
    for column in found.shape.key_columns:
        values = lake_column(column, column, found.rows, policy)
        unchanged = flags.get(column.storage_name)
        if unchanged is not None and f"_old.{column.storage_name}" in found.rows.schema.names:
            old = lake_column(column, column, found.rows, policy, "_old.")
            values = _chosen(old, values, unchanged)
        columns.append(values)
    return columns


def _old_column(column: Column, found: LogRows, deleted: Bools, policy: TypePolicy) -> pa.Array:
    """Of a delete the row itself is the old one; of an update the old image."""
    gone = lake_column(column, column, found.rows, policy)
    if f"_old.{column.storage_name}" in found.rows.schema.names:
        old = lake_column(column, column, found.rows, policy, "_old.")
    else:
        old = pa.nulls(len(deleted), lake_type(column.type, policy))
    return gone if deleted.all() else old if not deleted.any() else _chosen(gone, old, deleted)


def _chosen(first: pa.Array, second: pa.Array, take_first: Bools) -> pa.Array:
    """Row by row the one or the other, whatever the type."""
    index = np.arange(len(take_first)) + np.where(take_first, 0, len(take_first))
    return pa.concat_arrays([first, second]).take(pa.array(index))


def _ops(found: LogRows) -> npt.NDArray[np.uint8]:
    ops: npt.NDArray[np.uint8] = found.rows.column("_op").to_numpy()
    return ops


def _sent_images(found: LogRows) -> npt.NDArray[np.uint8]:
    if "_old" not in found.rows.schema.names:
        return np.full(found.rows.num_rows, OldImage.NONE, np.uint8)
    sent: npt.NDArray[np.uint8] = found.rows.column("_old").to_numpy()
    return sent

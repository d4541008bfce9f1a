"""Inserts, updates and deletes of one relation, of all kinds together, as one batch in the order of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.change import OldImage, Op
from pgtide.decode.cells import I64, U8, Bools, Values, Views, primitive, scatter
from pgtide.decode.relation import DecodedColumn, Relation
from pgtide.decode.tuples import UNCHANGED, RawColumn, decode_column, fill_unchanged, walk_tuples
from pgtide.errors import DecodeError
from pgtide.schema import Column

_NEW, _OLD_KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")
_OP = np.zeros(256, np.uint8)
_OP[[ord("I"), ord("U"), ord("D")]] = [Op.INSERT, Op.UPDATE, Op.DELETE]
_OLD_IMAGE = np.full(256, 255, np.uint8)
_OLD_IMAGE[[_NEW, _OLD_KEY, _OLD_ROW]] = [OldImage.NONE, OldImage.KEY, OldImage.FULL]


@dataclass(frozen=True, slots=True)
class RowMessages:
    """Insert, Update and Delete messages of one relation."""

    kind: U8
    tag: I64  # place of the byte that tells which tuple follows: N new, K old key, O old row
    end: I64
    change: I64
    subxid: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Truncates:
    """Truncates of one relation: rows of their own, without values."""

    change: Sequence[int]
    subxid: Sequence[int]


@dataclass(frozen=True, slots=True)
class _OldTuples:
    """Old images of updates."""

    rows: I64  # which messages have one
    raw: list[RawColumn]
    columns: tuple[DecodedColumn, ...]  # what of it counts: all, or the key


def decode_rows(relation: Relation, views: Views, messages: RowMessages) -> pa.RecordBatch:
    op, first_tag = _OP[messages.kind], views.u1[messages.tag]
    old_image = _OLD_IMAGE[first_tag]
    if ((old_image == 255) | (op == Op.INSERT) & (old_image != 0) | (op == Op.DELETE) & (old_image == 0)).any():
        raise DecodeError(f"{relation.shape.qualified_name}: a change carries a tuple that it cannot have")
    tag, old = messages.tag, None
    updated = (op == Op.UPDATE) & (old_image != 0)
    if updated.any():
        old, tag = _walk_old(relation, views, messages, np.flatnonzero(updated), old_image)
    raw, end = walk_tuples(views, tag + 1, messages.end, relation.width)
    if (end != messages.end).any():
        raise DecodeError(f"{relation.shape.qualified_name}: a message goes on behind its last tuple")
    if old is not None:
        for column in relation.columns:
            raw[column.place] = fill_unchanged(raw[column.place], old.raw[column.place], old.rows)
    unchanged = _unchanged(relation, raw, len(tag))
    new = [_decode(relation, views, column, raw[column.place]) for column in relation.columns]
    arrays = [
        primitive(pa.uint8(), op, None),
        primitive(pa.int64(), messages.change, None),
        primitive(pa.uint32(), messages.subxid, None),
    ]
    if unchanged is not None:
        arrays.append(unchanged)
    has_old = bool(old_image.any())
    if has_old:
        arrays.append(primitive(pa.uint8(), old_image, None))
    return _assemble(relation, views, arrays, unchanged is not None, has_old, new, old)


def _assemble(
    relation: Relation,
    views: Views,
    arrays: list[pa.Array],
    has_unchanged: bool,
    has_old: bool,
    new: list[Values],
    old: _OldTuples | None,
) -> pa.RecordBatch:
    count = len(arrays[0])
    olds: list[Values] = []
    old_columns: tuple[Column, ...] | None = () if has_old else None
    if old is not None:
        old_columns = tuple(decoded.column for decoded in old.columns)
        for column in old.columns:
            values = _decode(relation, views, column, old.raw[column.place])
            text = None if values.text is None else scatter(count, [(old.rows, values.text)], pa.string())
            olds.append(Values(scatter(count, [(old.rows, values.array)], column.codec.type), text))
    arrays += [values.array for values in new]
    arrays += [values.array for values in olds]
    arrays += [values.text for values in new if values.text is not None]
    arrays += [values.text for values in olds if values.text is not None]
    text = tuple(c.column for c, values in zip(relation.columns, new, strict=True) if values.text is not None)
    old_text = tuple(c for c, values in zip(old_columns or (), olds, strict=True) if values.text is not None)
    return pa.RecordBatch.from_arrays(arrays, schema=relation.schema(has_unchanged, old_columns, text, old_text))


def _walk_old(
    relation: Relation, views: Views, messages: RowMessages, rows: I64, old_image: U8
) -> tuple[_OldTuples, I64]:
    """The old images of those rows, and where the new tuples of all rows begin."""
    end = messages.end[rows]
    raw, after = walk_tuples(views, messages.tag[rows] + 1, end, relation.width)
    if (after >= end).any() or (views.u1[after] != _NEW).any():
        raise DecodeError(f"{relation.shape.qualified_name}: an update has no new tuple behind its old one")
    tag = messages.tag.copy()
    tag[rows] = after
    full = bool((old_image[rows] == OldImage.FULL).any())
    columns = relation.columns if full else tuple(column for column in relation.columns if column.in_key_image)
    return _OldTuples(rows, raw, columns), tag


def _unchanged(relation: Relation, raw: list[RawColumn], count: int) -> pa.Array | None:
    """Which values are still unknown because they were sent as unchanged: a bit per column; None if there are none."""
    flags: npt.NDArray[np.bool_] | None = None
    for bit, column in enumerate(relation.columns):
        rows: Bools | None = raw[column.place].where(UNCHANGED)
        if rows is not None:
            if flags is None:
                flags = np.zeros((count, len(relation.columns)), np.bool_)
            flags[:, bit] = rows
    if flags is None:
        return None
    packed = np.packbits(flags, axis=1, bitorder="little")
    width = relation.shape.unchanged_width_bytes
    return pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(packed)])


def _decode(relation: Relation, views: Views, column: DecodedColumn, raw: RawColumn) -> Values:
    named = column.column
    return decode_column(relation.shape.qualified_name, named.name, named.type, column.codec, views, raw)


def with_truncates(relation: Relation, rows: pa.RecordBatch | None, truncates: Truncates) -> pa.RecordBatch:
    """The truncates of a table at their places among its rows; all their columns are null."""
    schema = rows.schema if rows is not None else relation.schema(False, None, (), ())
    count = len(truncates.change)
    known = {
        "_op": pa.array([Op.TRUNCATE] * count, pa.uint8()),
        "_change": pa.array(truncates.change, pa.int64()),
        "_subxid": pa.array(truncates.subxid, pa.uint32()),
        "_unchanged": pa.array(
            [bytes(relation.shape.unchanged_width_bytes)] * count, pa.binary(relation.shape.unchanged_width_bytes)
        ),
        "_old": pa.array([OldImage.NONE] * count, pa.uint8()),
    }
    arrays = [known[field.name] if field.name in known else pa.nulls(count, field.type) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    if rows is None:
        return batch
    both = pa.concat_batches([rows, batch])
    return both.take(pc.sort_indices(both, sort_keys=[("_change", "ascending")]))

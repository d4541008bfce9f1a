"""Tuples of COPY … (FORMAT binary) → Arrow columns, with the same column decoders as the stream."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pgtide.decode.cells import Views
from pgtide.decode.codecs import codec_of, needs_text
from pgtide.decode.frames import PAD, Frames
from pgtide.decode.tuples import NULL, TEXT, RawColumn, decode_column, walk_copied
from pgtide.errors import DecodeError
from pgtide.schema import TableShape
from pgtide.types import PgType


def copied_as_text(pg_type: PgType) -> bool:
    """Whether a COPY must cast a column of this type to text: it has no binary form, or none that is known."""
    return needs_text(pg_type, inside=True)


def decode_copy(shape: TableShape, frames: Frames) -> pa.RecordBatch:
    """Rows as `c<n>` columns in the order of the shape, and `_text.c<n>` where a value needed it.

    Each frame is one tuple; the file header (19 bytes or more, before the first) has been taken off.  The
    trailer behind the last tuple is ignored.  Columns that are `copied_as_text` have been cast to text.
    """
    views, at, ends = Views(frames.buffer), frames.starts, frames.ends
    if len(ends) and int(ends[-1]) + PAD > len(frames.buffer):
        raise ValueError(f"the buffer must go on for {PAD} bytes behind the last tuple")
    if len(ends) and ends[-1] - at[-1] == 2 and views.i2[at[-1]] == -1:
        at, ends = at[:-1], ends[:-1]
    raw, after = walk_copied(views, at, ends, len(shape.columns))
    if (after != ends).any():
        raise DecodeError(f"{shape.qualified_name}: a copied tuple goes on behind its last column")
    arrays, names = [], []
    texts: list[tuple[str, pa.Array]] = []
    for column, one in zip(shape.columns, raw, strict=True):
        if copied_as_text(column.type):
            one = _as_text(one)
        values = decode_column(shape.qualified_name, column.name, column.type, codec_of(column.type), views, one)
        arrays.append(values.array)
        names.append(column.storage_name)
        if values.text is not None:
            texts.append((f"_text.{column.storage_name}", values.text))
    return pa.RecordBatch.from_arrays([*arrays, *(text for _, text in texts)], [*names, *(name for name, _ in texts)])


def _as_text(raw: RawColumn) -> RawColumn:
    kind = np.full(len(raw.start), TEXT, np.uint8)
    if raw.kind is not None:
        kind[raw.kind == NULL] = NULL
    return RawColumn(kind, raw.start, raw.length)

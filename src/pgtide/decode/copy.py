"""Tuples of COPY … (FORMAT binary) → Arrow columns, with the same column decoders as the stream."""

from __future__ import annotations

import pyarrow as pa

from pgtide.decode.cells import Views
from pgtide.decode.codecs import codec_of
from pgtide.decode.frames import PAD, Frames
from pgtide.decode.tuples import decode_column, walk_copied
from pgtide.errors import DecodeError
from pgtide.schema import TableShape


def decode_copy(shape: TableShape, frames: Frames) -> pa.RecordBatch:
    """Rows as `c<n>` columns in the order of the shape, and `_text.c<n>` where a value needed it.

    Each frame is one tuple; the file header (19 bytes or more, before the first) has been taken off.  The
    trailer behind the last tuple is ignored.
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
        values = decode_column(shape.qualified_name, column.name, column.type, codec_of(column.type), views, one)
        arrays.append(values.array)
        names.append(column.storage_name)
        if values.text is not None:
            texts.append((f"_text.{column.storage_name}", values.text))
    return pa.RecordBatch.from_arrays([*arrays, *(text for _, text in texts)], [*names, *(name for name, _ in texts)])

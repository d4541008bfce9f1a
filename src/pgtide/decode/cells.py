"""Columns of raw values inside the receive buffer, and how they leave it.

Two tricks carry the decoder's speed, with nothing compiled:

 - a numpy array of dtype `>i8`, `>u4`, `V16` … with `strides=(1,)` over the buffer has an element at *every*
   byte offset, so that indexing it with the offsets of a column gathers that column: 4 ns a row;
 - a column of variable length is an Arrow array laid over the buffer itself with the offsets start0, end0,
   start1, end1 …; `take` of every other element copies just the values: 9 ns a row.

Values that are null are gathered like all others (whatever lies there) and masked: cheaper than
compressing the index first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.decode.frames import PAD
from pgtide.errors import DecodeError

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

MAX_BUFFER_BYTES = 2**31 - 1  # Arrow's offsets are 32 bits wide; Postgres's own limit of a message is 1 GB


class Views:
    """Unaligned big-endian views of one buffer: `view[offsets]` gathers from any byte offsets."""

    __slots__ = ("arrow", "buffer", "f4", "f8", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "v16")

    def __init__(self, buffer: bytearray | bytes) -> None:
        size = len(buffer)
        if size > MAX_BUFFER_BYTES:
            raise DecodeError(f"a feed of {size} bytes is too large", remedy="Feed less than 2 GiB at once.")
        if size < PAD:
            raise ValueError(f"a buffer has at least {PAD} bytes of padding behind its data")
        count = size - PAD // 2  # the widest element has 16 bytes: the last one still ends inside the buffer

        def at_any_offset(dtype: str) -> npt.NDArray[Any]:
            return np.ndarray((count,), dtype=dtype, buffer=buffer, strides=(1,))

        self.buffer = buffer
        self.arrow = pa.py_buffer(buffer)
        self.u1 = at_any_offset("u1")
        self.i2, self.u2 = at_any_offset(">i2"), at_any_offset(">u2")
        self.i4, self.u4, self.f4 = at_any_offset(">i4"), at_any_offset(">u4"), at_any_offset(">f4")
        self.i8, self.u8, self.f8 = at_any_offset(">i8"), at_any_offset(">u8"), at_any_offset(">f8")
        self.v16 = at_any_offset("V16")


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of one column, still as bytes: `buffer[start:start + length]` for each row.

    Whoever makes cells has checked that they lie inside their message.  A row that is not valid has a start
    inside the buffer and the length 0.
    """

    views: Views
    start: I64
    length: I64
    valid: Bools | None  # None: all of them

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: I64 | Bools) -> Cells:
        valid = None if self.valid is None else self.valid[rows]
        return Cells(self.views, self.start[rows], self.length[rows], valid)

    def with_valid(self, valid: Bools) -> Cells:
        """Only those rows are left that are valid here and there."""
        if self.valid is not None:
            valid = valid & self.valid
        return Cells(self.views, self.start, self.length * valid, valid)

    def require(self, good: Bools, what: str) -> None:
        """Refuse the column if a valid value is not `good`."""
        if not good.all() and not (good if self.valid is None else good | ~self.valid).all():
            raise DecodeError(what)

    def require_width(self, width: int) -> None:
        self.require(self.length == width, f"a value of {width} bytes came with another length")

    def require_at_least(self, width: int) -> None:
        self.require(self.length >= width, f"a value is shorter than {width} bytes")

    def bytes_of(self, row: int) -> bytes:
        start = int(self.start[row])
        return bytes(self.views.buffer[start : start + int(self.length[row])])

    def valid_rows(self) -> list[int]:
        rows: list[int] = (np.arange(len(self)) if self.valid is None else np.flatnonzero(self.valid)).tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Values:
    """A decoded column: `array` in its storage type, `text` with Postgres's text where that cannot hold the value."""

    array: pa.Array
    text: pa.Array | None = None  # null where `array` has the value, or where the value is null


def bitmap(flags: Bools | None) -> pa.Buffer | None:
    return None if flags is None else pa.py_buffer(np.packbits(flags, bitorder="little"))


def primitive(data_type: pa.DataType, data: npt.NDArray[Any], valid: Bools | None) -> pa.Array:
    """An Arrow array over numpy's memory: no copy."""
    return pa.Array.from_buffers(data_type, len(data), [bitmap(valid), pa.py_buffer(data)])


_even = pa.array(np.arange(0, 2 * 4096, 2, dtype=np.int32))


def _even_numbers(count: int) -> pa.Array:
    global _even  # grows to the longest column seen; making it anew would be a tenth of the cost of `varlen`
    if len(_even) < count:
        _even = pa.array(np.arange(0, 4 * count, 2, dtype=np.int64))
    return _even.slice(0, count)


def varlen(data_type: pa.DataType, cells: Cells, skip: int = 0) -> pa.Array:
    """Cells as strings or binaries; `skip` leaves out a header of that many bytes."""
    count = len(cells)
    if count == 0:
        return pa.array([], data_type)
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = cells.start
    offsets[1::2] = cells.start + cells.length
    if skip:
        offsets[0::2] = np.minimum(offsets[0::2] + skip, offsets[1::2])
    gappy = pa.Array.from_buffers(data_type, 2 * count - 1, [None, pa.py_buffer(offsets), cells.views.arrow])
    taken = pc.take(gappy, _even_numbers(count), boundscheck=False)
    if cells.valid is not None:
        taken = pa.Array.from_buffers(data_type, count, [bitmap(cells.valid), *taken.buffers()[1:]])
    if data_type == pa.string():
        require_utf8(taken)
    return taken


def require_utf8(strings: pa.Array) -> None:
    try:
        strings.validate(full=True)  # 4 ns a row; a database in SQL_ASCII may hold anything
    except pa.ArrowInvalid as error:
        raise DecodeError(
            f"a text value is not valid UTF-8 ({error})",
            remedy="The database's encoding is probably SQL_ASCII: repair the value, or exclude the column.",
        ) from None


def scatter(count: int, parts: list[tuple[I64, pa.Array]], data_type: pa.DataType) -> pa.Array:
    """One array of `count` rows from parts that each fill some of them; the rest is null."""
    if len(parts) == 1 and len(parts[0][0]) == count:
        return parts[0][1]
    source = np.full(count, -1, np.int64)
    base = 0
    for rows, array in parts:
        source[rows] = base + np.arange(len(rows))
        base += len(array)
    index = pa.array(source, mask=source < 0)
    return pc.take(pa.concat_arrays([array for _, array in parts] or [pa.nulls(0, data_type)]), index)

"""What a column decoder is, and the decoders of types whose values all have the same width.

pgoutput sends a value in binary (`b`) or text form (`t`); COPY in binary only.  A codec turns a whole column
of either into its storage type.  Dates and timestamps outside of the years 1 to 9999 (±infinity, BC, …) are
null with Postgres's text beside them: no reader agrees on what lies beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.decode import output
from pgtide.decode.cells import Bools, Cells, Values, bitmap, primitive, varlen
from pgtide.errors import DecodeError


class Codec(Protocol):
    """Decodes the columns of one type."""

    @property
    def type(self) -> pa.DataType: ...  # of the array that it makes

    def binary(self, cells: Cells) -> Values: ...

    def text(self, cells: Cells) -> Values: ...


def cast(strings: pa.Array, data_type: pa.DataType) -> pa.Array:
    try:
        return pc.cast(strings, data_type)
    except pa.ArrowInvalid as error:
        raise DecodeError(
            f"a value in text form is not what Postgres prints ({error})",
            remedy="The connection must set DateStyle = ISO, bytea_output = hex and extra_float_digits ≥ 1.",
        ) from None


def text_where(rows: Bools, printed: Callable[[int], str]) -> pa.Array:
    """Strings for those rows only, null elsewhere."""
    texts: list[str | None] = [None] * len(rows)
    for row in np.flatnonzero(rows).tolist():
        texts[row] = printed(row)
    return pa.array(texts, pa.string())


class Number:
    """Integers and floats."""

    def __init__(self, data_type: pa.DataType, wire: str) -> None:
        self.type = data_type
        self._view, self._width = wire, int(wire[1])
        self._native = np.dtype(data_type.to_pandas_dtype())

    def binary(self, cells: Cells) -> Values:
        cells.require_width(self._width)
        data = getattr(cells.views, self._view)[cells.start].astype(self._native)
        if cells.valid is not None:
            data[~cells.valid] = 0  # the same rows give the same bytes, and they compress
        return Values(primitive(self.type, data, cells.valid))

    def text(self, cells: Cells) -> Values:
        return Values(cast(varlen(pa.string(), cells), self.type))


class Boolean:
    type = pa.bool_()

    def binary(self, cells: Cells) -> Values:
        cells.require_width(1)
        return self._where(cells, cells.views.u1[cells.start] != 0)

    def text(self, cells: Cells) -> Values:
        cells.require_width(1)
        return self._where(cells, cells.views.u1[cells.start] == ord("t"))

    def _where(self, cells: Cells, true: Bools) -> Values:
        if cells.valid is not None:
            true = true & cells.valid
        return Values(pa.Array.from_buffers(self.type, len(cells), [bitmap(cells.valid), bitmap(true)]))


_NIBBLE = np.full(256, 255, np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_NIBBLE[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_UUID_DIGITS = np.flatnonzero(np.frombuffer(b"xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", np.uint8) == ord("x"))


class Uuid:
    type = pa.binary(16)

    def binary(self, cells: Cells) -> Values:
        cells.require_width(16)
        data = cells.views.v16[cells.start]
        if cells.valid is not None:
            data[~cells.valid] = bytes(16)
        return Values(primitive(self.type, data, cells.valid))

    def text(self, cells: Cells) -> Values:
        cells.require_width(36)
        start = cells.start if cells.valid is None else np.where(cells.valid, cells.start, 0)
        within = np.minimum(start[:, None] + _UUID_DIGITS, len(cells.views.u1) - 1)
        nibbles = _NIBBLE[cells.views.u1[within]]
        cells.require(nibbles.max(axis=1, initial=0) < 16, "a uuid has a character that is not hexadecimal")
        if cells.valid is not None:
            nibbles[~cells.valid] = 0
        data = np.ascontiguousarray(nibbles[:, 0::2] << 4 | nibbles[:, 1::2]).view("V16").reshape(-1)
        return Values(primitive(self.type, data, cells.valid))


class Calendar:
    """date, timestamp, timestamptz: a number of days or microseconds since 2000-01-01."""

    def __init__(self, data_type: pa.DataType, printed: Callable[[int], str]) -> None:
        self.type = data_type
        self._printed = printed  # the wire's number as Postgres prints it
        days = pa.types.is_date32(data_type)
        self._wire, self._width = ("i4", 4) if days else ("i8", 8)
        per_day = 1 if days else output.DAY_US
        self._epoch = output.EPOCH_DAYS * per_day
        self._least = output.FIRST_DAY * per_day
        self._greatest = (output.LAST_DAY + 1) * per_day - 1

    def binary(self, cells: Cells) -> Values:
        cells.require_width(self._width)
        raw = getattr(cells.views, self._wire)[cells.start].astype(np.int64)
        if cells.valid is not None:
            raw[~cells.valid] = 0
        least, greatest = self._least - self._epoch, self._greatest - self._epoch
        if len(raw) == 0 or (raw.min() >= least and raw.max() <= greatest):
            return Values(self._array(raw + self._epoch, cells.valid))
        beyond = (raw < least) | (raw > greatest)
        valid = ~beyond if cells.valid is None else cells.valid & ~beyond
        array = self._array(np.where(beyond, 0, raw) + self._epoch, valid)
        return Values(array, text_where(beyond, lambda row: self._printed(int(raw[row]))))

    def text(self, cells: Cells) -> Values:
        cells.require_at_least(8)
        u1, last = cells.views.u1, cells.start + np.maximum(cells.length, 1) - 1
        four_digit_year = (
            (u1[cells.start] <= ord("9")) & (u1[cells.start] >= ord("0")) & (u1[cells.start + 4] == ord("-"))
        )
        plain = four_digit_year & (u1[last] != ord("C"))  # not "infinity", "10000-01-01", "0044-03-15 BC"
        if cells.valid is not None:
            plain &= cells.valid
        strings = varlen(pa.string(), cells)
        array = self._parse(strings if plain.all() else pc.if_else(pa.array(plain), strings, None))
        numbers = np.frombuffer(array.buffers()[1], f"i{self._width}", len(array), array.offset * self._width)
        if numbers.min(initial=0) < self._least or numbers.max(initial=0) > self._greatest:  # after the zone's shift
            array = pc.if_else(pa.array((numbers < self._least) | (numbers > self._greatest)), None, array)
        text = pc.if_else(pc.is_null(array), strings, None) if array.null_count > strings.null_count else None
        return Values(array, text)

    def _parse(self, strings: pa.Array) -> pa.Array:
        if pa.types.is_date32(self.type) or self.type.tz is None:
            return cast(strings, self.type)
        try:
            return pc.cast(strings, self.type)
        except pa.ArrowInvalid:  # a zone with seconds, as local mean time had: Arrow does not read these
            return pa.array([None if s is None else _instant_us(s) for s in strings.to_pylist()], pa.int64()).view(
                self.type
            )

    def _array(self, data: object, valid: Bools | None) -> pa.Array:
        numbers = np.asarray(data, dtype=np.int32 if self._width == 4 else np.int64)
        if valid is not None:
            numbers[~valid] = 0
        return primitive(self.type, numbers, valid)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _instant_us(text: str) -> int:
    try:
        since = datetime.fromisoformat(text) - _EPOCH
    except ValueError:
        raise DecodeError(
            f"not a timestamp with time zone as Postgres prints it: {text!r}",
            remedy="The connection must set DateStyle = ISO.",
        ) from None
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


class Text:
    """Types whose text is what they are; `header` bytes come before it in binary form (jsonb's version)."""

    type = pa.string()

    def __init__(self, header: int = 0) -> None:
        self.same_in_both_forms = header == 0
        self._header = header

    def binary(self, cells: Cells) -> Values:
        if self._header:
            cells.require_at_least(self._header)
            cells.require(cells.views.u1[cells.start] == 1, "a binary value has an unknown version")
        return Values(varlen(self.type, cells, self._header))

    def text(self, cells: Cells) -> Values:
        return Values(varlen(self.type, cells))


class Bytes:
    """bytea, and types whose text form is plain hexadecimal (PostGIS geometry: EWKB)."""

    type = pa.binary()

    def __init__(self, prefix: bytes = b"\\x") -> None:
        self._prefix = prefix

    def binary(self, cells: Cells) -> Values:
        return Values(varlen(self.type, cells))

    def text(self, cells: Cells) -> Values:
        skip = len(self._prefix)
        cells.require_at_least(skip)
        for place, byte in enumerate(self._prefix):
            cells.require(
                cells.views.u1[cells.start + place] == byte, "a bytea is not in hex form (bytea_output = hex)"
            )
        cells.require((cells.length - skip) % 2 == 0, "a hexadecimal value has an odd number of digits")
        digits = varlen(self.type, cells, skip)
        if len(digits) == 0:
            return Values(digits)
        _, offsets, data = digits.buffers()
        ends = np.frombuffer(offsets, np.int32, len(digits) + 1)
        nibbles = _NIBBLE[np.frombuffer(data or b"", np.uint8)[: ends[-1]]]
        if len(nibbles) and nibbles.max() > 15:
            raise DecodeError("a hexadecimal value has a character that is not a digit")
        packed = nibbles[0::2] << 4 | nibbles[1::2]
        halves = pa.py_buffer((ends // 2).astype(np.int32))
        return Values(
            pa.Array.from_buffers(self.type, len(digits), [bitmap(cells.valid), halves, pa.py_buffer(packed)])
        )

"""numeric: decimals of up to 38 digits, and exact text for all others.

On the wire: number of digits, weight, sign, scale, then digits in base 10,000, where digit k is worth
10000 ** (weight - k).  Looping over the few *powers* that a numeric(p, s) can hold makes every multiplier a
scalar and every step one gather over all rows.  Values without a fixed scale are handled in groups of
equal scale; only very long ones are printed one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.decode import output
from pgtide.decode.cells import I64, Bools, Cells, Values, primitive, scatter, varlen
from pgtide.decode.codec import cast, text_where
from pgtide.errors import DecodeError

_U64 = npt.NDArray[np.uint64]
_HEADER = np.dtype([("digits", ">u2"), ("weight", ">i2"), ("sign", ">u2"), ("scale", ">u2")])
_HALF_DIGITS = 19  # 10**19 is the greatest power of ten in 64 bits: two such halves make 38 digits


class _Headers:
    """The first eight bytes of every value, checked."""

    def __init__(self, cells: Cells) -> None:
        cells.require_at_least(8)
        fields = cells.views.u8[cells.start].view(_HEADER)  # one gather for all four
        self.digits = fields["digits"].astype(np.int64)
        self.weight = fields["weight"].astype(np.int64)
        self.sign = fields["sign"].astype(np.int64)
        self.scale = fields["scale"].astype(np.int64)
        if cells.valid is not None:
            for field in (self.digits, self.weight, self.sign, self.scale):
                field[~cells.valid] = 0
        self.lowest = self.weight - self.digits + 1  # power of the last digit
        cells.require(cells.length == 8 + 2 * self.digits, "a numeric has another length than its header says")
        self.finite: Bools = (self.sign == output.NUMERIC_POSITIVE) | (self.sign == output.NUMERIC_NEGATIVE)

    def powers(self, precision: int, scale: int) -> list[int]:
        """Those powers of 10,000 of a decimal(precision, scale) in which one of the values has a digit."""
        least, greatest = int(self.lowest.min(initial=0)), int(self.weight.max(initial=0))
        return [power for power in _powers(precision, scale) if least <= power <= greatest]


def _unscaled_64(cells: Cells, headers: _Headers, precision: int, scale: int) -> I64:
    """Value × 10**scale where precision ≤ 18; all digits must lie within it."""
    total = np.zeros(len(cells), np.int64)
    first = cells.start + 8
    for power in headers.powers(precision, scale):
        place = headers.weight - power
        inside = (place >= 0) & (place < headers.digits)
        digit = cells.views.u2[first + 2 * (place * inside)] * inside.astype(np.int64)
        _require_digits(digit)
        exponent = 4 * power + scale
        total += digit * 10**exponent if exponent >= 0 else digit // 10**-exponent
    return total


def _unscaled_128(cells: Cells, headers: _Headers, precision: int, scale: int) -> tuple[_U64, _U64]:
    """Value × 10**scale for up to 38 digits, as high and low 64 bits of its magnitude."""
    high, low = np.zeros(len(cells), np.uint64), np.zeros(len(cells), np.uint64)
    first = cells.start + 8
    for power in headers.powers(precision, scale):
        place = headers.weight - power
        inside = (place >= 0) & (place < headers.digits)
        digit = cells.views.u2[first + 2 * (place * inside)].astype(np.uint64) * inside
        _require_digits(digit)
        exponent = 4 * power + scale
        if exponent < 0:
            digit, exponent = digit // np.uint64(10**-exponent), 0
        if exponent >= _HALF_DIGITS:
            high += digit * np.uint64(10 ** (exponent - _HALF_DIGITS))
        elif exponent + 4 <= _HALF_DIGITS:
            low += digit * np.uint64(10**exponent)
        else:  # the digit lies across the two halves
            split = np.uint64(10 ** (_HALF_DIGITS - exponent))
            high += digit // split
            low += digit % split * np.uint64(10**exponent)
    return _multiply_add(high, 10**_HALF_DIGITS, low)


def _require_digits(digit: npt.NDArray[Any]) -> None:
    if digit.max(initial=0) > 9_999:
        raise DecodeError("a numeric has a digit beyond its base")


def _multiply_add(factor: _U64, by: int, plus: _U64) -> tuple[_U64, _U64]:
    """factor × by + plus in 128 bits, by halves of 32 bits, as on paper."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    f0, f1 = factor & mask, factor >> shift
    b0, b1 = np.uint64(by & 0xFFFFFFFF), np.uint64(by >> 32)
    lowest = f0 * b0
    middle = f1 * b0 + (lowest >> shift)
    upper = f0 * b1 + (middle & mask)
    low = upper << shift | lowest & mask
    high = f1 * b1 + (middle >> shift) + (upper >> shift)
    summed = low + plus
    return high + (summed < low), summed


def _powers(precision: int, scale: int) -> range:
    """Powers of 10,000 in which a decimal(precision, scale) can have a digit, greatest first."""
    return range(-(-(precision - scale) // 4) - 1, -scale // 4 - 1, -1)


def decimals(cells: Cells, headers: _Headers, precision: int, scale: int, valid: Bools | None) -> pa.Array:
    """decimal128 of all rows; those that are not valid become null."""
    negative = headers.sign == output.NUMERIC_NEGATIVE
    words = np.empty((len(cells), 2), np.int64)
    if precision <= 18:
        total = _unscaled_64(cells, headers, precision, scale)
        np.negative(total, out=total, where=negative)
        words[:, 0], words[:, 1] = total, total >> 63
    else:
        high, low = _unscaled_128(cells, headers, precision, scale)
        low = np.where(negative, ~low + np.uint64(1), low)
        high = np.where(negative, ~high + (low == 0), high)
        words[:, 0], words[:, 1] = low.view(np.int64), high.view(np.int64)
    if valid is not None:
        words[~valid] = 0
    return primitive(pa.decimal128(precision, scale), words, valid)


class Decimal:
    """numeric(p, s) that fits a decimal of 38 digits; NaN is null with its text."""

    def __init__(self, precision: int, scale: int) -> None:
        self.type = pa.decimal128(precision, scale)
        self._precision, self._scale = precision, scale
        self._greatest, self._least = _powers(precision, scale)[0], _powers(precision, scale)[-1]
        self._first_below = 10 ** (precision - scale - 4 * self._greatest)  # bound of a digit at the greatest power

    def binary(self, cells: Cells) -> Values:
        headers = _Headers(cells)
        inside = (headers.weight <= self._greatest) & (headers.lowest >= self._least) | (headers.digits == 0)
        fits = inside & headers.finite & (headers.scale <= self._scale)
        if self._first_below < 10_000:
            fits &= (
                (headers.weight < self._greatest)
                | (cells.views.u2[cells.start + 8] < self._first_below)
                | (headers.digits == 0)
            )
        if fits.all():
            return Values(decimals(cells, headers, self._precision, self._scale, cells.valid))
        valid = fits if cells.valid is None else cells.valid & fits
        array = decimals(cells, headers, self._precision, self._scale, valid)
        return Values(array, text_where(~fits, lambda row: output.numeric(cells.bytes_of(row))))

    def text(self, cells: Cells) -> Values:
        strings = varlen(pa.string(), cells)
        special = cells.views.u1[cells.start] > ord("9")  # NaN
        if cells.valid is not None:
            special &= cells.valid
        if not special.any():
            return Values(cast(strings, self.type))
        special = pa.array(special)
        return Values(cast(pc.if_else(special, None, strings), self.type), pc.if_else(special, strings, None))


class NumericText:
    """numeric without a fixed scale, or with more than 38 digits: its exact text."""

    type = pa.string()

    def text(self, cells: Cells) -> Values:
        return Values(varlen(self.type, cells))

    def binary(self, cells: Cells) -> Values:
        headers = _Headers(cells)
        if (headers.scale > 0x3FFF).any():
            raise DecodeError("a numeric has an impossible scale")
        valid = np.ones(len(cells), np.bool_) if cells.valid is None else cells.valid
        # Arrow prints a decimal in scientific form when its first digit lies more than six places behind the point.
        zero = (headers.digits == 0) & (headers.scale <= 6)
        short = (
            (headers.weight <= 3)
            & (headers.weight >= -1)
            & (-4 * headers.lowest - headers.scale < 4)
            & (headers.digits > 0)
        )
        short = (short | zero) & headers.finite & (headers.scale <= 18) & valid
        parts: list[tuple[I64, pa.Array]] = []
        for scale in np.unique(headers.scale[short]).tolist():
            rows = np.flatnonzero(short & (headers.scale == scale))
            some = cells.select(rows)
            values = decimals(some, _Headers(some), 16 + max(scale, 1), scale, None)
            parts.append((rows, pc.cast(values, self.type)))
        long = np.flatnonzero(valid & ~short)
        if len(long):
            printed = [output.numeric(cells.bytes_of(row)) for row in long.tolist()]
            parts.append((long, pa.array(printed, self.type)))
        return Values(scatter(len(cells), parts, self.type))

"""Types that are stored as text or as numbers of their own making: codecs beside the common ones."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.decode.cells import Cells, Values, primitive, scatter, varlen
from pgtide.decode.codec import Number, cast
from pgtide.decode.output import iso_interval
from pgtide.errors import DecodeError

_POSTGRES_INTERVAL = re.compile(
    r"(?:([+-]?\d+) years? ?)?(?:([+-]?\d+) mons? ?)?(?:([+-]?\d+) days? ?)?"
    r"(?:([+-]?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
)
_MONEY = re.compile(r"(.*?)(\d{2})(\D*)")


class Printed:
    """Stored as text: in binary form each value is printed as Postgres would."""

    type = pa.string()

    def __init__(self, printed: Callable[[bytes], str], normalized: Callable[[str], str] | None = None) -> None:
        self._printed, self._normalized = printed, normalized

    def binary(self, cells: Cells) -> Values:
        rows = cells.valid_rows()
        texts = pa.array([self._printed(cells.bytes_of(row)) for row in rows], self.type)
        return Values(scatter(len(cells), [(np.array(rows, np.int64), texts)], self.type))

    def text(self, cells: Cells) -> Values:
        strings = varlen(self.type, cells)
        if self._normalized is None:
            return Values(strings)
        return Values(pa.array([None if s is None else self._normalized(s) for s in strings.to_pylist()], self.type))


def iso_interval_text(text: str) -> str:
    """IntervalStyle iso_8601, also from what IntervalStyle postgres prints."""
    if text[:1] == "P" or text.endswith("infinity"):
        return text
    match = _POSTGRES_INTERVAL.fullmatch(text)
    if match is None or not text:
        raise DecodeError(
            f"not an interval as Postgres prints it: {text!r}",
            remedy="The connection must set IntervalStyle = iso_8601.",
        )
    years, months, days, hours, minutes, seconds = (int(match[group] or 0) for group in (1, 2, 3, 5, 6, 7))
    micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + int((match[8] or "").ljust(6, "0"))
    return iso_interval(12 * years + months, days, -micros if match[4] == "-" else micros)


class UnsignedText:
    """xid, cid, xid8: numbers that are stored as text, because they mean nothing as numbers."""

    type = pa.string()

    def __init__(self, data_type: pa.DataType, wire: str) -> None:
        self._number = Number(data_type, wire)

    def binary(self, cells: Cells) -> Values:
        return Values(pc.cast(self._number.binary(cells).array, self.type))

    def text(self, cells: Cells) -> Values:
        return Values(varlen(self.type, cells))


class ObjectIdentifier:
    """oid, and the types that print an oid as a name (regclass …): the number; a name keeps its text beside a null."""

    type = pa.int64()

    def __init__(self) -> None:
        self._number = Number(self.type, "u4")

    def binary(self, cells: Cells) -> Values:
        return self._number.binary(cells)

    def text(self, cells: Cells) -> Values:
        strings = varlen(pa.string(), cells)
        strings = pc.if_else(pc.equal(strings, "-"), "0", strings)  # how these print 0
        numeric = pc.match_substring_regex(strings, "^[0-9]+$")
        array = cast(pc.if_else(numeric, strings, None), self.type)
        named = array.null_count > strings.null_count
        return Values(array, pc.if_else(pc.invert(numeric), strings, None) if named else None)


_DAY_US = 86_400_000_000


class TimeOfDay:
    """time: microseconds since midnight.  Arrow's own type for times lacks 24:00:00, which Postgres has."""

    type = pa.int64()

    def __init__(self) -> None:
        self._number = Number(self.type, "i8")

    def binary(self, cells: Cells) -> Values:
        return self._number.binary(cells)

    def text(self, cells: Cells) -> Values:
        strings = varlen(pa.string(), cells)
        end_of_day = pc.equal(strings, "24:00:00")
        times = pc.if_else(end_of_day, "00:00:00", strings)
        first_day = pc.binary_join_element_wise("1970-01-01", times, " ")  # Arrow parses timestamps, not times
        array = cast(first_day, pa.timestamp("us")).view(self.type)
        return Values(pc.if_else(end_of_day, _DAY_US, array))


class Money:
    """money: hundredths.  (lc_monetary may give it other decimals; the mapping has two.)"""

    type = pa.decimal128(19, 2)

    def __init__(self) -> None:
        self._number = Number(pa.int64(), "i8")

    def binary(self, cells: Cells) -> Values:
        cents = np.zeros((len(cells), 2), np.int64)
        cents[:, 0] = self._number.binary(cells).array.fill_null(0).to_numpy()
        cents[:, 1] = cents[:, 0] >> 63
        return Values(primitive(self.type, cents, cells.valid))

    def text(self, cells: Cells) -> Values:
        texts = varlen(pa.string(), cells).to_pylist()
        plain = [None if text is None else _plain_money(text) for text in texts]
        return Values(cast(pa.array(plain, pa.string()), self.type))


def _plain_money(text: str) -> str:
    """-12345.67 from -$12,345.67: the last two digits are the hundredths, whatever stands between the others."""
    match = _MONEY.fullmatch(text)
    if match is None:
        raise DecodeError(f"not an amount of money: {text!r}")
    sign = "-" if "-" in text or "(" in text else ""
    return f"{sign}{''.join(filter(str.isdigit, match[1])) or '0'}.{match[2]}"


class TextOnly:
    """A type that is not known here: its text, never its bytes."""

    type = pa.string()

    def binary(self, cells: Cells) -> Values:
        if cells.valid is None or cells.valid.any():
            raise DecodeError("its binary form is not known", remedy="Restart without binary: its text is understood.")
        return Values(pa.nulls(len(cells), self.type))

    def text(self, cells: Cells) -> Values:
        return Values(varlen(self.type, cells))

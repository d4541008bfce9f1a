"""Values that hold any number of others: arrays, multiranges, hstore, vectors.

Elements of one width without nulls, as in most arrays of numbers, are found without a step per element; all
others take one each.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.decode.cells import I64, Bools, Cells, Values, primitive
from pgtide.decode.codec import Codec
from pgtide.decode.nested import Nested, PrintValue, all_of, cells_of, fitting, list_array
from pgtide.decode.structs import Range
from pgtide.errors import DecodeError
from pgtide.types.literals import ArrayLiteral, Texts, parse_array, parse_hstore, parse_multirange
from pgtide.types.pg_type import PgType, array_delimiter

_MAX_DIMENSIONS = 6  # MAXDIM in Postgres


class Array(Nested):
    """list<element>, nested as often as the column is declared; other dimensions or lower bounds do not fit."""

    def __init__(self, pg_type: PgType, element: Codec, print_value: PrintValue) -> None:
        super().__init__(pg_type, print_value)
        assert pg_type.element is not None
        self._element = element
        self._dimensions = max(pg_type.dimensions, 1)
        self._delimiter = array_delimiter(pg_type.element)

    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        cells.require_at_least(12)
        dimensions = cells.views.i4[cells.start].astype(np.int64)
        cells.require(
            (dimensions >= 0) & (dimensions <= _MAX_DIMENSIONS), "an array has an impossible number of dimensions"
        )
        cells.require(cells.length >= 12 + 8 * dimensions, "an array is cut short")
        sizes = np.zeros((len(cells), self._dimensions), np.int64)
        same = dimensions == self._dimensions
        fits = same | (dimensions == 0)
        for level in range(self._dimensions):
            at = cells.start + np.where(same, 12 + 8 * level, 0)
            sizes[:, level] = cells.views.i4[at] * same
            fits &= ~same | (cells.views.i4[at + 4] == 1)
        if (sizes < 0).any():
            raise DecodeError("an array has a negative size")
        counts = np.where(fits, _products(sizes)[:, -1], 0)
        cells.require(counts <= cells.length // 4, "an array has more elements than bytes")
        elements = _find_elements(cells, cells.start + 12 + 8 * dimensions, counts, fits)
        values = self._element.binary(elements)
        fits &= all_of(fitting(values), np.repeat(np.arange(len(cells)), counts), len(cells))
        return self._lists(sizes * (counts > 0)[:, None], values.array), fits

    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        literals = [parse_array(text, self._delimiter) for text in texts]
        fits = np.fromiter((self._is_regular(literal) for literal in literals), np.bool_, len(literals))
        sizes = np.zeros((len(literals), self._dimensions), np.int64)
        elements: Texts = []
        for row in np.flatnonzero(fits).tolist():
            if literals[row].sizes:
                sizes[row] = literals[row].sizes
                elements += literals[row].elements
        values = self._element.text(cells_of(elements))
        counts = _products(sizes)[:, -1]
        fits &= all_of(fitting(values), np.repeat(np.arange(len(literals)), counts), len(literals))
        return self._lists(sizes, values.array), fits

    def _is_regular(self, literal: ArrayLiteral) -> bool:
        return not literal.sizes or (len(literal.sizes) == self._dimensions and set(literal.lower_bounds) == {1})

    def _lists(self, sizes: I64, elements: pa.Array) -> pa.Array:
        """Elements folded into lists, the innermost first: `sizes` has a row per array, a column per dimension."""
        products = _products(sizes)
        array = elements
        for level in reversed(range(self._dimensions)):
            lists = np.ones(len(sizes), np.int64) if level == 0 else products[:, level - 1]
            offsets = np.concatenate([[0], np.cumsum(np.repeat(sizes[:, level], lists))])
            list_type = self.type
            for _ in range(level):
                list_type = list_type.value_type
            array = list_array(list_type, offsets, array)
        return array


def _products(sizes: I64) -> I64:
    """Number of elements down to each dimension, cut off far above the 2**27 that Postgres allows."""
    products: I64 = np.cumprod(np.minimum(sizes, 2**30).astype(np.float64), axis=1).clip(max=2**40).astype(np.int64)
    return products


def _find_elements(cells: Cells, first: I64, counts: I64, fits: Bools) -> Cells:
    """Cells of all elements, one row after the other; each has its length before it, -1 for null."""
    total = int(counts.sum())
    ends = cells.start + cells.length
    if ((first != ends) & fits & (counts == 0)).any():
        raise DecodeError("an empty value goes on behind its header")
    starts, lengths = np.zeros(total, np.int64), np.zeros(total, np.int64)
    if total and not _find_equal_elements(cells, first, counts, starts, lengths):
        _walk_elements(cells, first, ends, counts, starts, lengths)
    valid = lengths >= 0
    if valid.all():
        return Cells(cells.views, starts, lengths, None)
    return Cells(cells.views, starts, np.maximum(lengths, 0), valid)


def _find_equal_elements(cells: Cells, first: I64, counts: I64, starts: I64, lengths: I64) -> bool:
    """Elements of one width and no nulls, as in most arrays of numbers: no step per element."""
    rows = np.flatnonzero(counts)
    width = int(cells.views.i4[first[rows[0]]])
    room = cells.start + cells.length - first
    if width < 0 or (room[rows] != counts[rows] * (4 + width)).any():
        return False
    ordinal = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts[:] = np.repeat(first, counts) + ordinal * (4 + width) + 4
    lengths[:] = cells.views.i4[starts - 4]
    return bool((lengths == width).all())


def _walk_elements(cells: Cells, first: I64, ends: I64, counts: I64, starts: I64, lengths: I64) -> None:
    buffer, unpack = cells.views.buffer, struct.Struct(">i").unpack_from
    place = 0
    for at, end, count in zip(first.tolist(), ends.tolist(), counts.tolist(), strict=True):
        if not count:
            continue
        for _ in range(count):
            if at + 4 > end:
                raise DecodeError("an array is cut short")
            (length,) = unpack(buffer, at)
            starts[place], lengths[place] = at + 4, length
            at += 4 + max(length, 0)
            if length < -1 or at > end:
                raise DecodeError("an element of an array goes beyond its end")
            place += 1
        if at != end:
            raise DecodeError("an array goes on behind its last element")


class Multirange(Nested):
    """list of ranges."""

    def __init__(self, pg_type: PgType, each: Range, print_value: PrintValue) -> None:
        super().__init__(pg_type, print_value)
        self._range = each

    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        cells.require_at_least(4)
        counts = cells.views.i4[cells.start].astype(np.int64)
        cells.require((counts >= 0) & (counts <= cells.length // 4), "a multirange has more ranges than bytes")
        elements = _find_elements(cells, cells.start + 4, counts, np.ones(len(cells), np.bool_))
        return self._lists(self._range.binary(elements), counts)

    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        ranges = [parse_multirange(text) for text in texts]
        counts = np.fromiter(map(len, ranges), np.int64, len(ranges))
        return self._lists(self._range.text(cells_of([each for row in ranges for each in row])), counts)

    def _lists(self, values: Values, counts: I64) -> tuple[pa.Array, Bools]:
        fits = all_of(fitting(values), np.repeat(np.arange(len(counts)), counts), len(counts))
        return list_array(self.type, np.concatenate([[0], np.cumsum(counts)]), values.array), fits


class Hstore(Nested):
    """map<string, string>, null values included."""

    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        return self._maps([_hstore_pairs(cells.bytes_of(row)) for row in range(len(cells))])

    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        return self._maps([parse_hstore(text) for text in texts])

    def _maps(self, rows: Sequence[Sequence[tuple[str, str | None]]]) -> tuple[pa.Array, Bools]:
        return pa.array(rows, self.type), np.ones(len(rows), np.bool_)


def _hstore_pairs(raw: bytes) -> list[tuple[str, str | None]]:
    (count,) = struct.unpack_from(">i", raw)
    at, texts = 4, []
    for _ in range(2 * count):
        (length,) = struct.unpack_from(">i", raw, at)
        at += 4
        if length < -1 or at + length > len(raw):
            raise DecodeError("an hstore goes beyond its end")
        texts.append(None if length < 0 else raw[at : at + length].decode())
        at += max(length, 0)
    if at != len(raw):
        raise DecodeError("an hstore has another length than it says")
    return [(key or "", value) for key, value in zip(texts[0::2], texts[1::2], strict=True)]


class Vector(Nested):
    """pgvector's vector and halfvec: list<float>."""

    def __init__(self, pg_type: PgType, width: int, print_value: PrintValue) -> None:
        super().__init__(pg_type, print_value)
        self._width = width

    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        cells.require_at_least(4)
        counts = cells.views.u2[cells.start].astype(np.int64)
        cells.require(cells.length == 4 + self._width * counts, "a vector has another length than it says")
        ordinal = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(cells.start + 4, counts) + ordinal * self._width
        if self._width == 4:
            numbers = cells.views.f4[at].astype(np.float32)
        else:
            numbers = cells.views.u2[at].astype(np.uint16).view(np.float16).astype(np.float32)
        return self._lists(primitive(pa.float32(), numbers, None), counts)

    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        rows = [text.strip("[]").split(",") if text != "[]" else [] for text in texts]
        numbers = pc.cast(pa.array([number for row in rows for number in row], pa.string()), pa.float32())
        return self._lists(numbers, np.fromiter(map(len, rows), np.int64, len(rows)))

    def _lists(self, numbers: pa.Array, counts: I64) -> tuple[pa.Array, Bools]:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return list_array(self.type, offsets, numbers), np.ones(len(counts), np.bool_)

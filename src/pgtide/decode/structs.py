"""Values with a fixed number of parts: composites and ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pgtide.decode.cells import Bools, Cells, Values
from pgtide.decode.codec import Codec
from pgtide.decode.nested import Nested, PrintValue, cells_of, fitting
from pgtide.errors import DecodeError
from pgtide.types.literals import RangeLiteral, Texts, parse_composite, parse_range
from pgtide.types.pg_type import PgType


class Composite(Nested):
    """struct of the fields."""

    def __init__(self, pg_type: PgType, fields: Sequence[Codec], print_value: PrintValue) -> None:
        super().__init__(pg_type, print_value)
        self._fields = fields

    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        views, end = cells.views, cells.start + cells.length
        cells.require_at_least(4)
        if (views.i4[cells.start] != len(self._fields)).any():
            raise DecodeError(
                "the composite type has other fields now than when the row was written",
                remedy="Restart without binary.",
            )
        at, columns = cells.start + 4, []
        for field in self._fields:
            if (at + 8 > end).any():
                raise DecodeError("a composite value is cut short")
            length = views.i4[at + 4].astype(np.int64)
            valid = length >= 0
            start, length = at + 8, np.maximum(length, 0)
            at = start + length
            if (at > end).any():
                raise DecodeError("a field of a composite value goes beyond its end")
            columns.append(field.binary(Cells(views, start, length, None if valid.all() else valid)))
        if (at != end).any():
            raise DecodeError("a composite value goes on behind its last field")
        return self._struct(columns, len(cells))

    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        rows = [parse_composite(text) if self._fields else [] for text in texts]
        known = np.fromiter((len(row) == len(self._fields) for row in rows), np.bool_, len(rows))
        blank: Texts = [None] * len(self._fields)
        rows = [row if len(row) == len(self._fields) else blank for row in rows]
        columns = [field.text(cells_of([row[place] for row in rows])) for place, field in enumerate(self._fields)]
        array, fits = self._struct(columns, len(texts))
        return array, fits & known

    def _struct(self, columns: list[Values], count: int) -> tuple[pa.Array, Bools]:
        fits = np.ones(count, np.bool_)
        for values in columns:
            fits &= fitting(values)
        return pa.Array.from_buffers(self.type, count, [None], children=[values.array for values in columns]), fits


_EMPTY, _LOWER_INCLUSIVE, _UPPER_INCLUSIVE, _LOWER_INFINITE, _UPPER_INFINITE = 1, 2, 4, 8, 16


class Range(Nested):
    """struct(lower, upper, lower_inclusive, upper_inclusive, empty); an infinite bound is null."""

    def __init__(self, pg_type: PgType, bound: Codec, print_value: PrintValue) -> None:
        super().__init__(pg_type, print_value)
        self._bound = bound

    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        views, end = cells.views, cells.start + cells.length
        cells.require_at_least(1)
        flags = views.u1[cells.start]
        at, bounds = cells.start + 1, []
        for infinite in (_LOWER_INFINITE, _UPPER_INFINITE):
            present = flags & (_EMPTY | infinite) == 0
            if (at + 4 * present > end).any():
                raise DecodeError("a range is cut short")
            length = np.where(present, views.i4[at], 0).astype(np.int64)
            start = at + 4 * present
            at = start + length
            if (length < 0).any() or (at > end).any():
                raise DecodeError("a bound of a range goes beyond its end")
            bounds.append(self._bound.binary(Cells(views, start, length, None if present.all() else present)))
        if (at != end).any():
            raise DecodeError("a range goes on behind its bounds")
        marks = [(flags & bit != 0) for bit in (_LOWER_INCLUSIVE, _UPPER_INCLUSIVE, _EMPTY)]
        return self._struct(bounds, marks)

    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        literals: list[RangeLiteral] = [parse_range(text) for text in texts]
        lowers = self._bound.text(cells_of([literal.lower for literal in literals]))
        uppers = self._bound.text(cells_of([literal.upper for literal in literals]))
        marks = [(each.lower_inclusive, each.upper_inclusive, each.empty) for each in literals]
        columns = np.array(marks, np.bool_).reshape(-1, 3)
        return self._struct([lowers, uppers], [columns[:, place] for place in range(3)])

    def _struct(self, bounds: list[Values], marks: list[Bools]) -> tuple[pa.Array, Bools]:
        children = [values.array for values in bounds] + [pa.array(mark, pa.bool_()) for mark in marks]
        array = pa.Array.from_buffers(self.type, len(marks[0]), [None], children=children)
        return array, fitting(bounds[0]) & fitting(bounds[1])

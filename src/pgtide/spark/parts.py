"""A stretch of one table's changes, cut where its shape changes: each part is a write of its own.

Most often a part has the shape that the table is to have.  Two exceptions:

 - A table that was altered while it was loaded has the newer shape already when the changes from before come: these
   are fitted to it, which adds what the newer columns left older rows with.  The same happens where it has gone back
   to a shape that it had before.  Rows are found by the key of their own shape all the same: they tell no other.
 - A column of which nobody knows which it is (see `replication/attributes.py`) is left out if it can only be one that
   the table has lost since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pgtide.errors import TableError
from pgtide.log.reader import Slice
from pgtide.schema import TableShape


@dataclass(frozen=True, slots=True)
class Part:
    slices: tuple[Slice, ...]
    end: int  # the first offset behind it: the next part's, or where the stretch ends

    @property
    def relation_oid(self) -> int:
        return self.slices[0].relation_oid

    @property
    def fingerprint(self) -> str:
        return self.slices[0].entry.fingerprint

    @property
    def start(self) -> int:
        return max(self.slices[0].entry.first_offset, self.slices[0].start)


def parts_by_shape(slices: Sequence[Slice], to: int) -> list[Part]:
    """In the order of the log; together they reach up to `to`."""
    ordered = sorted(slices, key=lambda piece: piece.entry.first_offset)
    groups = [tuple(group) for _, group in groupby(ordered, key=lambda piece: piece.entry.fingerprint)]
    starts = [max(group[0].entry.first_offset, group[0].start) for group in groups]
    return [Part(group, end) for group, end in zip(groups, [*starts[1:], to], strict=False)]


def has_untold(shape: TableShape) -> bool:
    return any(column.attnum < 0 for column in shape.columns)


def fitting(captured: TableShape, recorded: str, shapes: Sequence[TableShape]) -> tuple[str, TableShape]:
    """The shape that a table is to have for changes of the `captured` one when it has the `recorded` one, and its name.

    `shapes` are all that it has had, in order.
    """
    places = {shape.fingerprint: place for place, shape in enumerate(shapes)}
    if places.get(recorded, -1) > places[captured.fingerprint]:
        return recorded, _keyed_as(captured, _told(shapes[places[recorded]], shapes[-1]))
    return captured.fingerprint, _told(captured, shapes[-1])


def _keyed_as(captured: TableShape, newer: TableShape) -> TableShape:
    key = {column.attnum for column in captured.key_columns}
    lost = key - {column.attnum for column in newer.columns}
    if lost:
        names = ", ".join(column.name for column in captured.key_columns if column.attnum in lost)
        raise TableError(
            f"{newer.qualified_name} has lost {names}, by which its earlier changes say whose they are.",
            remedy=f"Drop the mirror table of {newer.qualified_name} to load it anew.",
        )
    return replace(newer, columns=tuple(replace(column, key=column.attnum in key) for column in newer.columns))


def _told(shape: TableShape, now: TableShape) -> TableShape:
    untold = [column.name for column in shape.columns if column.attnum < 0]
    if not untold:
        return shape
    told = {column.attnum for column in shape.columns}
    if shape == now or any(column.attnum not in told for column in now.columns):
        raise TableError(
            f"{shape.qualified_name} was altered again before its earlier changes were read: which of its columns "
            f"{', '.join(untold)} was then cannot be told.",
            remedy=f"Drop the mirror table of {shape.qualified_name} to load it anew.",
        )
    return replace(shape, columns=tuple(column for column in shape.columns if column.attnum > 0))

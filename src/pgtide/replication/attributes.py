"""Which attribute numbers the columns of a relation message have, although the message does not say.

The stream may be behind the catalog: columns may have been renamed, dropped or added since.  It may also be ahead of
it: a transaction in progress has altered the table, and the catalog shows that to nobody else.  What helps: a message
lists columns in the order of their attribute numbers, numbers are never given twice, a later column has a greater one,
and what the table looked like before is known.  Where that does not decide, a column gets a negative number of its
own, which no attribute has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from pgtide.schema import TableShape


class RelationColumn(Protocol):
    """A column in a relation message, as the stream's decoder gives it."""

    @property
    def name(self) -> str: ...
    @property
    def type_oid(self) -> int: ...
    @property
    def typmod(self) -> int: ...
    @property
    def key(self) -> bool: ...


class RelationMessage(Protocol):
    """A relation message of the stream, as its decoder gives it."""

    @property
    def relation_oid(self) -> int: ...
    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def replica_identity(self) -> str: ...
    @property
    def columns(self) -> Sequence[RelationColumn]: ...
    @property
    def in_progress(self) -> bool: ...
    @property
    def prepared_xid(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Attribute:
    """A row of pg_attribute; a dropped one has lost its name and type."""

    attnum: int
    name: str
    type_oid: int
    typmod: int
    dimensions: int
    not_null: bool
    dropped: bool
    generated: bool
    missing: str | None = None  # attmissingval: what rows that were there before the column have


_Told = tuple[tuple[str, int, int], ...]  # name, type and modifier of each column: all that a message says of them


@dataclass
class KnownShapes:
    """Shapes whose numbers are known, by what a message says of their columns; for as long as the process lives."""

    _numbers: dict[tuple[int, _Told], tuple[int, ...]] = field(default_factory=dict)

    def remember(self, shape: TableShape) -> None:
        if all(column.attnum > 0 for column in shape.columns):
            told = tuple((column.name, column.type.oid, column.type.typmod) for column in shape.columns)
            self._numbers[shape.relation_oid, told] = tuple(column.attnum for column in shape.columns)

    def numbers(self, relation_oid: int, columns: Sequence[RelationColumn]) -> list[int] | None:
        """Those of a shape with exactly these columns, if there was one."""
        told = tuple((column.name, column.type_oid, column.typmod) for column in columns)
        found = self._numbers.get((relation_oid, told))
        return list(found) if found is not None else None


def numbered(
    message: RelationMessage, attributes: Sequence[Attribute], known: KnownShapes, before: TableShape | None
) -> list[int]:
    """The attribute number of each column; -(position + 1) where none can be told.

    The catalog decides while it agrees with the message.  Otherwise what was known helps: `known`, and the shape that
    the relation had `before`, by the last message of the same stream.
    """
    columns = message.columns
    named = _named(columns, attributes)
    if named is not None and _leave_none_out(named, attributes):
        return named
    exactly = known.numbers(message.relation_oid, columns)
    if exactly is not None:
        return exactly
    if named is not None:
        return named  # the publication lets only some columns through
    if message.in_progress:
        return _unaltered(columns, before)
    if before is None:
        return attribute_numbers(columns, attributes)
    return _continued(columns, attributes, before)


def _named(columns: Sequence[RelationColumn], attributes: Sequence[Attribute]) -> list[int] | None:
    """The numbers, if the catalog has all these columns as the message describes them."""
    live = {(a.name, a.type_oid, a.typmod): a.attnum for a in attributes if not a.dropped}
    found = [live.get((column.name, column.type_oid, column.typmod), 0) for column in columns]
    return found if all(found) and found == sorted(found) else None


def _leave_none_out(numbers: Sequence[int], attributes: Sequence[Attribute]) -> bool:
    """Whether every live attribute before the last of these is among them.

    It was there when the message was written; if the message lacks it, a name may have gone to a newer column since.
    """
    last = max(numbers, default=0)
    return all(a.attnum in numbers for a in attributes if a.attnum < last and not a.dropped and not a.generated)


def _unaltered(columns: Sequence[RelationColumn], before: TableShape | None) -> list[int]:
    """The numbers of columns that are as they were: of others, nothing can be told before the commit."""
    then = {(c.name, c.type.oid, c.type.typmod): c.attnum for c in before.columns} if before else {}
    found = [then.get((column.name, column.type_oid, column.typmod), 0) for column in columns]
    right = [number if number > max(found[:at], default=0) else 0 for at, number in enumerate(found)]
    return [number or -at - 1 for at, number in enumerate(right)]


def _continued(columns: Sequence[RelationColumn], attributes: Sequence[Attribute], before: TableShape) -> list[int]:
    """Columns that were there keep their order, so a name whose number would be out of order is that of a new column.
    Between two that are found there can be only old ones, renamed.  At the end there may be new ones, which the catalog
    may know.
    """
    places = {column.name: place for place, column in enumerate(before.columns)}
    then = [column.attnum for column in before.columns]  # negative: not known even then
    if {column.name for column in columns} == places.keys() and set(then) <= {
        attribute.attnum for attribute in attributes if not attribute.dropped
    }:
        return then  # none was dropped to this day, so names have changed hands
    at: list[int] = []  # where each column is in `before`; -1: not there under this name
    for column in columns:
        place = places.get(column.name, -1)
        at.append(place if place > max(at, default=-1) else -1)
    known_end = max((position + 1 for position, place in enumerate(at) if place >= 0), default=0)
    for start, end in _runs(at[:known_end]):
        after = at[start - 1] if start else -1
        if at[end] - after - 1 == end - start:
            at[start:end] = range(after + 1, at[end])
    found = [then[place] if place >= 0 else 0 for place in at[:known_end]]
    last, newest = max(found, default=0), max(then, default=0)
    for number in attribute_numbers(columns, attributes)[known_end:]:
        found.append(number if number > last and (number in then or number > newest) else 0)
        last = max(last, found[-1])
    return [number if number > 0 else -position - 1 for position, number in enumerate(found)]


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Where a place is missing: start and end of each run; none reaches the end."""
    starts = [at for at, place in enumerate(places) if place < 0 and (at == 0 or places[at - 1] >= 0)]
    return [(at, next(n for n in range(at, len(places)) if places[n] >= 0)) for at in starts]


def attribute_numbers(columns: Sequence[RelationColumn], attributes: Sequence[Attribute]) -> list[int]:
    """The attribute number of each column, from the catalog alone; -(position + 1) where none can be told."""
    by_name = {attribute.name: attribute.attnum for attribute in attributes if not attribute.dropped}
    candidates = [by_name.get(column.name, 0) for column in columns]
    increasing = _increasing(candidates)
    left_out = set(candidates).difference(increasing)
    if any(number < max(increasing) for number in left_out):
        increasing = _in_order(candidates)  # not added again, since others are newer: names have changed hands
    return _filled(increasing, columns, attributes)


def _filled(found: list[int], columns: Sequence[RelationColumn], attributes: Sequence[Attribute]) -> list[int]:
    """With numbers by their place where there was none by name (0)."""
    position = 0
    while position < len(found):
        if found[position]:
            position += 1
            continue
        end = next((n for n in range(position, len(found)) if found[n]), len(found))
        after = found[position - 1] if position else 0
        before = found[end] if end < len(found) else None
        gap = [a for a in attributes if a.attnum > after and (before is None or a.attnum < before) and not a.generated]
        found[position:end] = _fill(columns[position:end], gap, trailing=before is None) or range(
            -position - 1, -end - 1, -1
        )
        position = end
    return found


def _increasing(candidates: list[int]) -> list[int]:
    """Drops (sets to 0) candidates until the rest increases: first the greatest that is out of order.

    A column that was dropped and added again under its name has the greatest number of all; it is not the one meant.
    """
    candidates = list(candidates)
    while True:
        present = [number for number in candidates if number]
        wrong = [n for n, following in pairwise(present) if n > following]
        if not wrong:
            return candidates
        candidates[candidates.index(max(wrong))] = 0


def _in_order(candidates: Sequence[int]) -> list[int]:
    """Drops (sets to 0) all candidates that are out of order with any other."""
    numbers = [number or None for number in candidates]
    return [
        number
        if number
        and all(other < number for other in numbers[:at] if other)
        and all(other > number for other in numbers[at + 1 :] if other)
        else 0
        for at, number in enumerate(numbers)
    ]


def _fill(columns: Sequence[RelationColumn], gap: Sequence[Attribute], *, trailing: bool) -> list[int] | None:
    """The attributes of a gap that the nameless columns in it must be; None where that is not certain.

    Live attributes before a known one existed when the message was written, so they are in it, renamed.  Dropped ones
    may have been there or not.  At the end of the table there may also be newer ones that the message cannot know.
    """
    live = [attribute for attribute in gap if not attribute.dropped]
    if trailing:
        first = gap[: len(columns)]
        live = [] if any(attribute.dropped for attribute in first) else list(first)
    chosen = live if len(live) == len(columns) else gap
    if len(chosen) != len(columns):
        return None
    fits = all(a.dropped or a.type_oid == column.type_oid for a, column in zip(chosen, columns, strict=True))
    return [attribute.attnum for attribute in chosen] if fits else None

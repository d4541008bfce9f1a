"""Which attribute numbers the columns of a relation message have, although the message does not say.

The stream may be behind the catalog: columns may have been renamed, dropped or added since.  What helps: a message
lists columns in the order of their attribute numbers, numbers are never given twice, and a later column has a
greater one.  Where that does not decide, a column gets a negative number of its own, which no attribute has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


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


def attribute_numbers(columns: Sequence[RelationColumn], attributes: Sequence[Attribute]) -> list[int]:
    """The attribute number of each column; -(position + 1) where none can be told."""
    by_name = {attribute.name: attribute.attnum for attribute in attributes if not attribute.dropped}
    found = _increasing([by_name.get(column.name, 0) for column in columns])
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

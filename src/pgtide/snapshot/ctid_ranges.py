"""Parts of a table by ctid: what they are called in the lake's commits, and which are missing beside others.

A range belongs to one file of the table.  TRUNCATE and rewrites give a table another file, in which the same blocks
hold other rows, so what was read of the old one says nothing about the new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

_NAME = re.compile(r"(\d+)/(\d+):(\d+)-(\d*)")


@dataclass(frozen=True, slots=True)
class CtidRange:
    """Blocks [first_block, end_block) of one table or leaf partition; without end: all from the first on."""

    relation_oid: int
    file: int  # pg_class.relfilenode
    first_block: int
    end_block: int | None

    @property
    def name(self) -> str:
        end = "" if self.end_block is None else str(self.end_block)
        return f"{self.relation_oid}/{self.file}:{self.first_block}-{end}"

    @property
    def whole(self) -> bool:
        """Whether it is all of the file."""
        return self.first_block == 0 and self.end_block is None

    def halves(self, about_blocks: int) -> tuple[CtidRange, CtidRange] | None:
        """Two ranges instead of this one, of which `about_blocks` have rows; None for a single block."""
        blocks = about_blocks if self.end_block is None else self.end_block - self.first_block
        if blocks < 2:
            return None
        middle = self.first_block + blocks // 2
        return replace(self, end_block=middle), replace(self, first_block=middle)


def parse_range(name: str) -> CtidRange | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    oid, file, first, end = match.groups()
    return CtidRange(int(oid), int(file), int(first), int(end) if end else None)


def together(ranges: Iterable[CtidRange]) -> list[CtidRange]:
    """The same blocks in as few ranges as can be, in order."""
    result: list[CtidRange] = []
    ordered = sorted(ranges, key=_place)
    for _, group in groupby(ordered, key=lambda one: (one.relation_oid, one.file)):
        last: CtidRange | None = None
        for one in group:
            if last is None:
                last = one
            elif last.end_block is None or one.first_block <= last.end_block:
                last = replace(last, end_block=_later(last.end_block, one.end_block))
            else:
                result.append(last)
                last = one
        assert last is not None
        result.append(last)
    return result


def missing(wanted: Iterable[CtidRange], loaded: Iterable[CtidRange]) -> list[CtidRange]:
    """What of the wanted ranges is in none of the loaded ones; pieces of a range stay in its place."""
    there = together(loaded)
    result: list[CtidRange] = []
    for one in wanted:
        pieces = [one]
        for have in there:
            if (have.relation_oid, have.file) == (one.relation_oid, one.file):
                pieces = [rest for piece in pieces for rest in _without(piece, have)]
        result += pieces
    return result


def _without(one: CtidRange, other: CtidRange) -> list[CtidRange]:
    rest = []
    if other.first_block > one.first_block:
        before = other.first_block if one.end_block is None else min(one.end_block, other.first_block)
        rest.append(replace(one, end_block=before))
    if other.end_block is not None and (one.end_block is None or one.end_block > other.end_block):
        rest.append(replace(one, first_block=max(one.first_block, other.end_block)))
    return rest


def _later(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _place(one: CtidRange) -> tuple[int, int, int, float]:
    return one.relation_oid, one.file, one.first_block, float("inf") if one.end_block is None else one.end_block

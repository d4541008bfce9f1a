"""Which objects of a log count, and for which of its offsets.

Objects never change, and everything below the marker is in a chain of flushed ones or in merged ones that cover a
stretch of it, with the same blocks; whichever is taken, the rows are the same.  Names alone tell: nothing is
opened to find out.  Listing is a request for each thousand names, so a reader that lives on asks only for names after
those that it knows, and now and then for all, to find what was merged meanwhile.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterable

from pgtide.errors import LogCorruptError
from pgtide.log.control import removed
from pgtide.log.marker import Marker
from pgtide.log.objects.marker import read_held
from pgtide.log.objects.names import ObjectName, parse_name
from pgtide.log.segment import FOLDER, Extent, View
from pgtide.log.storage import Storage, Stored

# What was merged stays this long beside what it was merged into, for readers that have planned with it.  A store's
# clock and ours may differ by 15 minutes; more, and S3 refuses to talk to us.
GRACE_S = 3600.0
_LIST_ALL_EVERY_S = 600.0


class ObjectLayout:
    """See `layout.Layout`."""

    merges = True

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._names: dict[ObjectName, Stored] = {}
        self._removed_to = 0
        self._listed_all_at_s = float("-inf")
        self._listed_to = -1  # a marker that was read before the last listing

    def marker(self) -> Marker:
        return read_held(self._storage)[0].marker

    def look(self) -> View:
        end_offset = self.marker().end_offset
        return View(end_offset, self._extents(end_offset))

    def _extents(self, end_offset: int) -> list[Extent]:
        """`end_offset` was read before the listing: an object may come into being in between."""
        if time.monotonic() - self._listed_all_at_s > _LIST_ALL_EVERY_S:
            self._list_all()
        elif end_offset > self._listed_to:
            known = [name.first_offset for name in self._names]
            after = f"{FOLDER}/{ObjectName(max(known))}" if known else ""
            self._add(self._storage.entries(FOLDER, after))
        self._listed_to = max(self._listed_to, end_offset)
        try:
            return cover(self._names, self._removed_to, end_offset)
        except _Gap:
            self._list_all()
        try:
            return cover(self._names, self._removed_to, end_offset)
        except _Gap as gap:
            raise LogCorruptError(
                f"{self._storage.location}/{FOLDER}: no object has the changes from offset {gap.offset} on, "
                "and retention did not remove them",
                remedy="restore the objects from a copy; `pgtide log check` tells what is left",
            ) from None

    def stored(self, extent: Extent) -> Stored:
        assert isinstance(extent.name, ObjectName)
        return self._names[extent.name]

    def forget(self) -> None:
        self._listed_all_at_s = float("-inf")

    def superseded(self, now_s: float) -> list[Stored]:
        """What can be removed without any row being lost: what lies within a merged object that everybody knows by
        now, and what a writer that was thought dead has put below what retention took."""
        known = [name for name, entry in self._names.items() if name.level and now_s - entry.modified_s >= GRACE_S]
        within = {level: _Ranges(known, level) for level in {name.level for name in self._names}}
        return [
            entry
            for name, entry in self._names.items()
            if _end(name) <= self._removed_to or within[name.level].contain(name)
        ]

    def _list_all(self) -> None:
        self._names = {}
        self._add(self._storage.entries(FOLDER))
        # After the listing: whatever retention had removed by then, it had recorded before.
        self._removed_to = removed(self._storage).end_offset
        self._listed_all_at_s = time.monotonic()

    def _add(self, entries: Iterable[Stored]) -> None:
        self._names |= {name: entry for entry in entries if (name := parse_name(entry.name)) is not None}


class _Gap(Exception):
    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def cover(names: Iterable[ObjectName], removed_to: int, end_offset: int) -> list[Extent]:
    """Objects that hold every row from what retention left up to the durable end once, in order.

    A merged object goes before the flushed ones within it.  These may be there in part only: one may even be there
    again, from a writer that was held up for longer than it took to merge and remove what it was about to write.
    """
    merged = sorted((name for name in names if name.end_offset is not None), key=lambda name: name.first_offset)
    flushed = sorted(name.first_offset for name in names if name.end_offset is None)
    begins = sorted({*flushed, *(name.first_offset for name in merged)})
    position = max(removed_to, begins[0] if begins else 0)
    extents: list[Extent] = []
    furthest: ObjectName | None = None
    next_merged = 0
    while position < end_offset:
        while next_merged < len(merged) and merged[next_merged].first_offset <= position:
            furthest = max(filter(None, (furthest, merged[next_merged])), key=_end)
            next_merged += 1
        if furthest is not None and _end(furthest) > position:
            chosen, end = furthest, _end(furthest)
        else:
            at = bisect.bisect_left(begins, position)
            if at == len(begins) or begins[at] != position:
                raise _Gap(position)
            chosen, end = ObjectName(position), begins[at + 1] if at + 1 < len(begins) else end_offset
        extents.append(Extent(chosen, min(end, end_offset), position if position > chosen.first_offset else None))
        position = end
    return extents


def _end(name: ObjectName) -> int:
    """Of a flushed object only that it has one change at least is known; all that lies above its name is later."""
    return name.first_offset + 1 if name.end_offset is None else name.end_offset


class _Ranges:
    """The merged objects above a level.  An object within one of a higher level is not needed: a strict order, so that
    two who remove at the same time can never remove all that have a row."""

    def __init__(self, names: Iterable[ObjectName], level: int) -> None:
        higher = sorted((name.first_offset, _end(name)) for name in names if name.level > level)
        self._begins = [begin for begin, _ in higher]
        self._furthest = list(itertools.accumulate((end for _, end in higher), max))

    def contain(self, name: ObjectName) -> bool:
        at = bisect.bisect_right(self._begins, name.first_offset)
        return at > 0 and self._furthest[at - 1] >= _end(name)

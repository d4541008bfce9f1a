"""How far a log can be read, and which of its segments hold what: in a folder one way, on an object store another."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pgtide.log.control import removed
from pgtide.log.folder import Folder
from pgtide.log.marker import Marker, read_marker
from pgtide.log.objects.layout import ObjectLayout
from pgtide.log.recovery import check_end_is_there
from pgtide.log.segment import FOLDER, Extent, SegmentName, View, list_segments, valid_extents
from pgtide.log.storage import Storage, Stored


class Layout(Protocol):
    @property
    def merges(self) -> bool:
        """Whether rows may turn up in another segment than before."""

    def marker(self) -> Marker:
        """What is durable now."""

    def look(self) -> View:
        """What is durable now, and the segments that count for it, in order."""

    def stored(self, extent: Extent) -> Stored:
        """Size and age of a segment that `look` has named."""

    def superseded(self, now_s: float) -> list[Stored]:
        """Segments of which no row is needed, as far as the last `look` saw."""

    def forget(self) -> None:
        """Something was not there that should have been: look at everything anew."""


def layout_of(storage: Storage) -> Layout:
    return FolderLayout(storage.path) if isinstance(storage, Folder) else ObjectLayout(storage)


class FolderLayout:
    """Segments with epochs: the first offset of a higher one voids what lower ones have from there on.

    Which segments count is remembered: that changes only when the marker comes to name another segment or another
    writer's, or when retention says that it has taken something.
    """

    merges = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._extents: list[Extent] = []
        self._extents_as_of: tuple[int, int, int] | None = None  # the writer, and the segment that it writes

    def marker(self) -> Marker:
        return self._marker()[1]

    def look(self) -> View:
        """The marker is read before the listing: a segment that comes into being since does not count."""
        epoch, marker = self._marker()
        as_of = (epoch, marker.segment_first_offset, marker.segment_epoch)
        first, taken = self._extents[0].first_offset if self._extents else 0, removed(self._path).end_offset
        if as_of != self._extents_as_of or first < taken:
            names = list_segments(self._path / FOLDER)
            self._check_end(epoch, marker, names)
            self._extents, self._extents_as_of = valid_extents(names, marker.end_offset), as_of
        elif self._extents and self._extents[-1].end_offset != marker.end_offset:
            self._extents = [*self._extents[:-1], Extent(self._extents[-1].name, marker.end_offset)]
        return View(marker.end_offset, self._extents)

    def stored(self, extent: Extent) -> Stored:
        return self._stored(extent.name)

    def superseded(self, now_s: float) -> list[Stored]:
        """Segments of which no row counts any more, because a later writer began at or before their first offset."""
        counting = {extent.name for extent in self._extents}
        newest = max((name.epoch for name in counting if isinstance(name, SegmentName)), default=0)
        names = list_segments(self._path / FOLDER)
        return [self._stored(name) for name in names if name not in counting and name.epoch < newest]

    def forget(self) -> None:
        self._extents_as_of = None

    def _marker(self) -> tuple[int, Marker]:
        epoch, marker = read_marker(self._path / "control")
        if not epoch:  # either there was no writer yet, or there were some and nothing tells how far they got
            self._check_end(epoch, marker, list_segments(self._path / FOLDER))
        return epoch, marker

    def _check_end(self, epoch: int, marker: Marker, names: list[SegmentName]) -> None:
        """Looks closely where marker and segments do not fit: a writer has its marker before it has segments."""
        written = SegmentName(marker.segment_first_offset, marker.segment_epoch)
        ends_there = not written.epoch or written in names[-1:] or written in names
        if max((name.epoch for name in names), default=0) > epoch or not ends_there:
            check_end_is_there(self._path)

    def _stored(self, name: object) -> Stored:
        status = (self._path / FOLDER / str(name)).stat()
        return Stored(f"{FOLDER}/{name}", status.st_size, status.st_mtime)

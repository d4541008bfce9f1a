"""Which segments may go, and making them go without anybody losing something unawares.

A segment goes when every registered reader has passed it and it is older than the retention time; or, the oldest
first, when the log is larger than its limit, and then readers that lose changes are named.  Before files are removed it
is recorded, per table, up to which offset its changes go: a reader of a quiet table loses nothing.

The clock may be wrong now, or have been wrong when a segment was written.  Segments are written one after the other, so
each is at least as young as the one before it; and a time in the future says nothing.  In doubt a segment stays.
"""

from __future__ import annotations

import bisect
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgtide.errors import LogError
from pgtide.failpoints import declare, reach
from pgtide.log.control import Removed, record_removed, removed
from pgtide.log.files import FILE_MODE, fsync_path
from pgtide.log.large import first_offset_of, folder_of
from pgtide.log.reader import LogReader
from pgtide.log.segment import Extent, list_segments

_LOCK = "retention.lock"

_RECORDED = declare("log.retention.recorded", "what retention takes is recorded, no segment is removed yet")


@dataclass(frozen=True, slots=True)
class Reader:
    name: str
    offset: int  # it still needs everything from here on


@dataclass(frozen=True, slots=True)
class Removal:
    """What would go."""

    segments: tuple[Path, ...]  # in the order of the log; superseded ones last
    large: tuple[Path, ...]
    end_offset: int  # changes below this offset go
    nbytes: int
    losers: tuple[Reader, ...]  # readers that have not read what goes


def readers(log_path: Path) -> list[Reader]:
    """The registered readers and what they still need."""
    found = []
    for file in sorted((log_path / "readers").glob("*.json")):
        try:
            content: dict[str, Any] = json.loads(file.read_bytes())
            found.append(Reader(file.stem, int(content["offset"])))
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(f"{file}: not the position of a reader: {error}", remedy="mend or remove the file") from None
    return found


def plan_removal(log_path: Path, *, retention_s: float, max_bytes: int, now_s: float | None = None) -> Removal:
    """What the rules let go now.  The segment that is being written always stays."""
    now_s = time.time() if now_s is None else now_s
    log = LogReader(log_path)
    extents = log.extents()
    known = readers(log_path)
    needed = min((reader.offset for reader in known), default=log.end().end_offset)
    folder = log_path / "segments"
    large_files = _large_files(log_path)
    facts = [(folder / str(extent.name)).stat() for extent in extents]
    sizes = [fact.st_size + _large_bytes(large_files, extent) for fact, extent in zip(facts, extents, strict=True)]
    written_s = _written_s([fact.st_mtime for fact in facts], now_s)
    total, gone = sum(sizes), 0
    for extent, size, written in zip(extents[:-1], sizes, written_s, strict=False):
        passed = extent.end_offset <= needed and now_s - written >= retention_s
        if not passed and not (max_bytes and total > max_bytes):
            break
        total -= size
        gone += 1
    while gone and not log.ends_transaction(extents[gone - 1]):
        gone -= 1  # what is left must not begin inside a transaction
    going = extents[:gone]
    end_offset = going[-1].end_offset if going else (extents[0].name.first_offset if extents else 0)
    void = _superseded(log_path, extents)
    large = tuple(file for file in large_files if first_offset_of(file) < end_offset)
    return Removal(
        segments=(*(folder / str(extent.name) for extent in going), *void),
        large=large,
        end_offset=end_offset,
        nbytes=sum(sizes[:gone]) + sum(file.stat().st_size for file in void),
        losers=tuple(reader for reader in known if reader.offset < end_offset) if going else (),
    )


def remove(log_path: Path, removal: Removal) -> None:
    """Records what goes, then removes the files; can be repeated, and done by several at once."""
    if not removal.segments:
        return
    with _alone(log_path):
        log = LogReader(log_path)
        first = log.first_offset()
        end_offset = max(first, removal.end_offset)
        before = removed(log_path)
        last_offsets = dict(before.last_offsets)
        for relation_oid, (_, last) in log.touched(first, end_offset).items():
            last_offsets[relation_oid] = max(last_offsets.get(relation_oid, -1), last)
        went = log.transactions(first, end_offset)["end_lsn"].to_pylist()
        end_lsn = max([before.end_lsn, *went[-1:]])
        record_removed(log_path, Removed(max(removal.end_offset, before.end_offset), last_offsets, end_lsn))
        reach(_RECORDED)
        for file in (*removal.segments, *removal.large):
            file.unlink(missing_ok=True)
        fsync_path(log_path / "segments")


@contextmanager
def _alone(log_path: Path) -> Iterator[None]:
    """The capture and people prune: the record of what went is read and written again by one of them at a time."""
    descriptor = os.open(log_path / "control" / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _written_s(modified_s: Sequence[float], now_s: float) -> list[float]:
    """When each segment was written at the latest, as far as that can be told from the times of all of them."""
    known_s: list[float | None] = []
    newest_s = float("-inf")
    for modified in modified_s:
        newest_s = max(newest_s, modified) if modified <= now_s else newest_s
        known_s.append(newest_s if modified <= now_s else None)
    written_s: list[float] = []
    following_s = now_s
    for known in reversed(known_s):
        following_s = following_s if known is None else known
        written_s.append(following_s)
    return written_s[::-1]


def _superseded(log_path: Path, extents: list[Extent]) -> tuple[Path, ...]:
    """Segments of which no row counts any more, because a later writer began at or before their first offset."""
    counting = {extent.name for extent in extents}
    newest = max((name.epoch for name in counting), default=0)
    names = list_segments(log_path / "segments")
    return tuple(log_path / "segments" / str(name) for name in names if name not in counting and name.epoch < newest)


def _large_bytes(large_files: Sequence[Path], extent: Extent) -> int:
    first = bisect.bisect_left(large_files, extent.name.first_offset, key=first_offset_of)
    end = bisect.bisect_left(large_files, extent.end_offset, key=first_offset_of)
    return sum(file.stat().st_size for file in large_files[first:end])


def _large_files(log_path: Path) -> list[Path]:
    folder = folder_of(log_path)
    return sorted(folder.glob("*.seg")) if folder.exists() else []

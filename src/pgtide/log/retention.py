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
from typing import Any

from pgtide.errors import LogError
from pgtide.failpoints import declare, reach
from pgtide.log.control import Removed, record_removed
from pgtide.log.files import FILE_MODE
from pgtide.log.folder import Folder
from pgtide.log.large import FOLDER as LARGE
from pgtide.log.large import first_offset_of
from pgtide.log.reader import LogReader
from pgtide.log.segment import Extent
from pgtide.log.storage import Location, Storage, Stored, storage_at

_READERS = "readers"
_LOCK = "retention.lock"

_RECORDED = declare("log.retention.recorded", "what retention takes is recorded, no segment is removed yet")


@dataclass(frozen=True, slots=True)
class Reader:
    name: str
    offset: int  # it still needs everything from here on


@dataclass(frozen=True, slots=True)
class Removal:
    """What would go."""

    segments: tuple[str, ...]  # names relative to the log, in its order; superseded ones last
    large: tuple[str, ...]
    end_offset: int  # changes below this offset go
    nbytes: int
    losers: tuple[Reader, ...]  # readers that have not read what goes
    kept_because: str  # why the oldest segment that is left does not go, too


def readers(location: Location) -> list[Reader]:
    """The registered readers and what they still need."""
    found = []
    for name in reader_names(location):
        report = reader_report(location, name)
        if report is None:
            continue  # it has just gone
        try:
            found.append(Reader(name, int(json.loads(report)["offset"])))
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(
                f"{storage_at(location).location}/{_READERS}/{name}.json: not the position of a reader: {error}",
                remedy="mend or remove the file",
            ) from None
    return found


def reader_names(location: Location) -> list[str]:
    names = [entry.name.removeprefix(f"{_READERS}/") for entry in storage_at(location).entries(_READERS)]
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def reader_report(location: Location, name: str) -> bytes | None:
    """What a reader of the log says of itself; readers replace their files whole."""
    found = storage_at(location).versioned(f"{_READERS}/{name}.json")
    return None if found is None else found[0]


def report_reader(location: Location, name: str, content: dict[str, Any]) -> None:
    """Registers a reader, or says how far it has got: its `offset` is the start of what it still needs."""
    storage_at(location).write(f"{_READERS}/{name}.json", json.dumps(content, indent=1).encode())


def plan_removal(location: Location, *, retention_s: float, max_bytes: int, now_s: float | None = None) -> Removal:
    """What the rules let go now.  The segment that is being written always stays."""
    now_s = time.time() if now_s is None else now_s
    storage = storage_at(location)
    log = LogReader(storage)
    extents = log.extents()
    known = readers(storage)
    needed = min((reader.offset for reader in known), default=log.end().end_offset)
    stored = [log.stored(extent) for extent in extents]
    all_large = storage.entries(LARGE)
    sizes = [
        segment.nbytes + _bytes_within(all_large, extent.first_offset, extent.end_offset)
        for segment, extent in zip(stored, extents, strict=True)
    ]
    written_s = _written_s([segment.modified_s for segment in stored], now_s)
    total, gone = sum(sizes), 0
    for extent, size, written in zip(extents[:-1], sizes, written_s, strict=False):
        passed = extent.end_offset <= needed and now_s - written >= retention_s
        if not passed and not (max_bytes and total > max_bytes):
            break
        total -= size
        gone += 1
    kept_because = _why_kept(extents[gone:], written_s[gone:], now_s, known)
    while gone and not log.ends_transaction(extents[gone - 1]):
        gone -= 1  # what is left must not begin inside a transaction
    end_offset = extents[gone - 1].end_offset if gone else (extents[0].first_offset if extents else 0)
    going = [segment.name for segment in stored[:gone]]
    void = [segment for segment in log.superseded(now_s) if segment.name not in going]
    large = tuple(entry.name for entry in all_large if first_offset_of(entry.name) < end_offset)
    return Removal(
        segments=(*going, *(segment.name for segment in void)),
        large=large,
        end_offset=end_offset,
        nbytes=sum(sizes[:gone]) + sum(segment.nbytes for segment in void),
        losers=tuple(reader for reader in known if reader.offset < end_offset) if gone else (),
        kept_because=kept_because,
    )


def _why_kept(extents: Sequence[Extent], written_s: Sequence[float], now_s: float, known: Sequence[Reader]) -> str:
    if len(extents) < 2:
        return "the segment that is being written always stays" if extents else "the log is empty"
    needing = [reader for reader in known if reader.offset < extents[0].end_offset]
    if needing:
        slowest = min(needing, key=lambda reader: reader.offset)
        return f"reader {slowest.name}, at offset {slowest.offset}, still needs the oldest segment that stays"
    return f"the oldest segment that stays was written {(now_s - written_s[0]) / 3600:.1f} hours ago"


def remove(location: Location, removal: Removal) -> None:
    """Records what goes, then removes the files, the oldest first; can be repeated, and done by several at once."""
    if not removal.segments:
        return
    storage = storage_at(location)
    with _alone(storage):
        log = LogReader(storage)
        first = log.first_offset()
        end_offset = max(first, removal.end_offset)
        last_offsets, without_reads = (
            {relation_oid: last for relation_oid, (_, last) in reader.touched(first, end_offset).items()}
            for reader in (log, LogReader(storage, reads=False))
        )
        went = log.transactions(first, end_offset)["end_lsn"].to_pylist()
        record_removed(storage, Removed(removal.end_offset, last_offsets, max(went[-1:], default=0), without_reads))
        reach(_RECORDED)
        for name in (*removal.segments, *removal.large):
            storage.delete(name)


@contextmanager
def _alone(storage: Storage) -> Iterator[None]:
    """The capture and people prune: in a folder one of them at a time.  On an object store nobody can be kept out;
    there the record only grows, and what is removed was recorded."""
    if not isinstance(storage, Folder):
        yield
        return
    descriptor = os.open(storage.path / "control" / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
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


def _bytes_within(large: Sequence[Stored], first_offset: int, end_offset: int) -> int:
    first = bisect.bisect_left(large, first_offset, key=lambda entry: first_offset_of(entry.name))
    end = bisect.bisect_left(large, end_offset, key=lambda entry: first_offset_of(entry.name))
    return sum(entry.nbytes for entry in large[first:end])

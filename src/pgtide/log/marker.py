"""The durable marker: how far the log may be read, and the epochs that say whose word counts.

`control/marker-<epoch>` has two slots, at 0 and 4096, written in turn: a slot overwritten in place can be read torn,
of two one is always whole.  The newest valid slot counts.  A writer takes an epoch by creating its marker file; the
file comes into being with its predecessor's position in it, so that the highest epoch always has an answer.

Old marker files go, all but the newest few.  Only the highest epoch counts, so nobody needs them: a reader whose file
is gone between listing and reading lists again, a writer whose file is gone was fenced long ago, and one that creates
a low epoch again, after a long pause between listing and creating, finds a higher one there and gives it up.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from pgtide.errors import FencedError, LogCorruptError
from pgtide.log.files import FILE_MODE, create_durably, make_directory

_SLOT_BYTES = 4096
_FIELDS = struct.Struct("<8sQQQQQQQ")  # magic, sequence, segment's first offset, its epoch, bytes, end, durable, commit
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"PGTIDEM1"
_NAME = re.compile(r"marker-(\d+)")
_KEPT_FILES = 3


@dataclass(frozen=True, slots=True)
class Marker:
    """Everything below `end_offset` is durable; it ends at `length_bytes` of the segment named here."""

    sequence: int = 0
    segment_first_offset: int = 0
    segment_epoch: int = 0  # 0: no segment yet
    length_bytes: int = 0
    end_offset: int = 0
    durable_lsn: int = 0
    last_commit_lsn: int = 0


def _encode(marker: Marker) -> bytes:
    packed = _FIELDS.pack(
        _MAGIC,
        marker.sequence,
        marker.segment_first_offset,
        marker.segment_epoch,
        marker.length_bytes,
        marker.end_offset,
        marker.durable_lsn,
        marker.last_commit_lsn,
    )
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def _decode(slot: bytes) -> Marker | None:
    if len(slot) < _FIELDS.size + _CHECKSUM.size:
        return None
    magic, *fields = _FIELDS.unpack_from(slot)
    (checksum,) = _CHECKSUM.unpack_from(slot, _FIELDS.size)
    if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(slot[: _FIELDS.size]):
        return None
    return Marker(*fields)


def _path(control: Path, epoch: int) -> Path:
    return control / f"marker-{epoch:010d}"


def epochs(control: Path) -> list[int]:
    """The epochs that have a marker file, ascending; the last one counts."""
    try:
        names = os.listdir(control)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_epoch(control: Path, epoch: int) -> Marker:
    """The newest valid slot of one epoch's marker."""
    valid = [slot for slot in map(_decode, _slots(control, epoch)) if slot is not None]
    if not valid:
        raise LogCorruptError(f"{_path(control, epoch)} at byte 0: neither slot of the durable marker is valid")
    return max(valid, key=lambda slot: slot.sequence)


def damaged_slots(control: Path, epoch: int) -> list[str]:
    """Slots with something in them that is no marker: where they are, as file and byte."""
    slots = _slots(control, epoch)
    damaged = [number for number, slot in enumerate(slots) if any(slot) and _decode(slot) is None]
    return [f"{_path(control, epoch)} at byte {_SLOT_BYTES * number}" for number in damaged]


def _slots(control: Path, epoch: int) -> tuple[bytes, bytes]:
    data = _path(control, epoch).read_bytes()
    return data[:_SLOT_BYTES], data[_SLOT_BYTES:]


def read_marker(control: Path) -> tuple[int, Marker]:
    """Epoch and marker that count now; epoch 0 with an empty marker for a log that has no writer yet."""
    while True:
        known = epochs(control)
        if not known:
            return 0, Marker()
        with contextlib.suppress(FileNotFoundError):  # others have taken over so often that it is gone
            marker = read_epoch(control, known[-1])
            if epochs(control)[-1:] == known[-1:]:  # a writer may have taken over while we read
                return known[-1], marker


class MarkerFile:
    """The marker of the writer that holds an epoch."""

    def __init__(self, control: Path, epoch: int, marker: Marker) -> None:
        self.epoch = epoch
        self.marker = marker
        self._control = control
        self._descriptor = os.open(_path(control, epoch), os.O_RDWR | os.O_CLOEXEC, FILE_MODE)

    @staticmethod
    def take(control: Path, *, after: int | None = None) -> MarkerFile:
        """Takes the next epoch: from here on no older writer moves what readers see.

        `after`: only if that is still the highest one, for a writer that goes on; else it was fenced.
        """
        make_directory(control)
        while True:
            epoch, marker = read_marker(control)
            if after is not None and epoch != after:
                raise _fenced(control)
            path = _path(control, epoch + 1)
            if not create_durably(path, _encode(marker).ljust(2 * _SLOT_BYTES, b"\0")):
                continue
            try:
                if epochs(control)[-1] == epoch + 1:
                    return MarkerFile._taken(control, epoch, marker)
            except BaseException:
                path.unlink()
                raise
            path.unlink()  # it had been taken before, and was removed when it was old

    @staticmethod
    def _taken(control: Path, predecessor: int, marker: Marker) -> MarkerFile:
        taken = MarkerFile(control, predecessor + 1, marker)
        try:
            if predecessor:  # it may have moved on between our look and our taking over
                moved = read_epoch(control, predecessor)
                if moved.end_offset > marker.end_offset or moved.durable_lsn > marker.durable_lsn:
                    taken.record(moved, durably=True)
        except BaseException:
            taken.close()
            raise
        return taken

    def remove_older(self) -> None:
        """Removes all marker files but the newest few; that some stay is no harm."""
        for epoch in epochs(self._control)[:-_KEPT_FILES]:
            with contextlib.suppress(OSError):
                _path(self._control, epoch).unlink()

    def check_not_fenced(self) -> None:
        """Raises once another writer has taken a higher epoch."""
        highest = max(epochs(self._control), default=0)
        if highest > self.epoch:
            raise _fenced(self._control)
        if highest < self.epoch:
            raise LogCorruptError(f"{_path(self._control, self.epoch)}: the durable marker was removed")

    def record(self, marker: Marker, *, durably: bool) -> None:
        """Moves the marker: readers may read up to here from now on."""
        self.check_not_fenced()
        marker = replace(marker, sequence=self.marker.sequence + 1)
        os.pwrite(self._descriptor, _encode(marker), _SLOT_BYTES * (marker.sequence % 2))
        if durably:
            os.fsync(self._descriptor)
        self.marker = marker

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1  # never twice: the number may be somebody else's by now
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _fenced(control: Path) -> FencedError:
    return FencedError(
        f"another capture has taken over the log in {control.parent}",
        remedy="run one capture per log; this one stops",
    )

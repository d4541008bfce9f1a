"""The durable marker: how far the log may be read, and the epochs that say whose word counts.

`control/marker-<epoch>` has two slots, at 0 and 4096, written in turn: a slot overwritten in place can be read torn,
of two one is always whole.  The newest valid slot counts.  A writer takes an epoch by creating its marker file; the
file comes into being with its predecessor's position in it, so that the highest epoch always has an answer.
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
    """All epochs that were ever taken, ascending."""
    try:
        names = os.listdir(control)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_epoch(control: Path, epoch: int) -> Marker:
    """The newest valid slot of one epoch's marker."""
    data = _path(control, epoch).read_bytes()
    slots = [_decode(data[:_SLOT_BYTES]), _decode(data[_SLOT_BYTES:])]
    valid = [slot for slot in slots if slot is not None]
    if not valid:
        raise LogCorruptError(
            f"{_path(control, epoch)}: neither slot of the durable marker is valid",
            remedy="restore the file; `pgtide log check` tells what is left",
        )
    return max(valid, key=lambda slot: slot.sequence)


def read_marker(control: Path) -> tuple[int, Marker]:
    """Epoch and marker that count now; epoch 0 with an empty marker for a log that has no writer yet."""
    while True:
        known = epochs(control)
        if not known:
            return 0, Marker()
        marker = read_epoch(control, known[-1])
        if epochs(control)[-1] == known[-1]:  # a writer may have taken over while we read
            return known[-1], marker


class MarkerFile:
    """The marker of the writer that holds an epoch."""

    def __init__(self, control: Path, epoch: int, marker: Marker) -> None:
        self.epoch = epoch
        self.marker = marker
        self._control = control
        self._descriptor = os.open(_path(control, epoch), os.O_RDWR | os.O_CLOEXEC, FILE_MODE)

    @staticmethod
    def take(control: Path) -> MarkerFile:
        """Takes the next epoch: from here on no older writer moves what readers see."""
        make_directory(control)
        while True:
            epoch, marker = read_marker(control)
            if create_durably(_path(control, epoch + 1), _encode(marker).ljust(2 * _SLOT_BYTES, b"\0")):
                break
        taken = MarkerFile(control, epoch + 1, marker)
        if epoch:  # the predecessor may have moved on between our look and our taking over
            moved = read_epoch(control, epoch)
            if moved.end_offset > marker.end_offset or moved.durable_lsn > marker.durable_lsn:
                taken.record(moved, durably=True)
        return taken

    def check_not_fenced(self) -> None:
        """Raises once another writer has taken a higher epoch."""
        if _path(self._control, self.epoch + 1).exists():
            raise FencedError(
                f"another capture has taken over the log in {self._control.parent}",
                remedy="run one capture per log; this one stops",
            )

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

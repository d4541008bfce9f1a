"""What a writer that died had made durable, but not marked.

After a kill the marker is as far as the writer got.  After a power loss it may be older (it is fsynced only at rolls
and idle records), while blocks above it were fsynced and perhaps acknowledged.  Those that are valid and complete
whole transactions are copied, byte for byte and so under the same offsets, into a segment of the new epoch, which
gets its name only when all of them are in it: a crash in between leaves everything as it was.  Fsyncing the old tail
in place would not do: after a failed fsync the pages are clean and a second one "succeeds".  An incomplete
transaction at the end is left out: Postgres sends it again, because nothing past it was acknowledged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pgtide.errors import LogCorruptError
from pgtide.failpoints import declare, reach
from pgtide.log.block import HEADER_BYTES, BlockHeader, decode_rows, parse_directory, parse_header
from pgtide.log.files import FILE_MODE, fsync_path, write_all
from pgtide.log.marker import Marker, read_marker
from pgtide.log.segment import SegmentHeader, SegmentName, list_segments, parse_segment_header

_COPIED = declare("log.recovery.copied", "recovery has copied the tail aside, its segment has no name yet")
_NAMED = declare("log.recovery.named", "the recovered segment has its name, the marker not yet moved")


@dataclass(frozen=True, slots=True)
class RecoveredTail:
    segment: SegmentName
    length_bytes: int
    end_offset: int
    last_end_lsn: int
    last_commit_lsn: int


def check_end_is_there(path: Path) -> None:
    """The marker of the last writer, and the segment where it says that the log ends; without them nothing goes on."""
    newest = max((name.epoch for name in list_segments(path / "segments")), default=0)
    epoch, marker = read_marker(path / "control")  # read last: a writer has its marker before it has segments
    if newest > epoch:
        raise LogCorruptError(
            f"{path / 'control'}: the durable marker of epoch {newest} is missing, which has segments; "
            f"the highest that is there is {epoch}"
        )
    if not marker.segment_epoch:
        return
    segment = path / "segments" / str(SegmentName(marker.segment_first_offset, marker.segment_epoch))
    length = segment.stat().st_size if segment.exists() else 0
    if length < marker.length_bytes:
        state = f"it ends at byte {length}" if length else "it is missing"
        raise LogCorruptError(f"{segment}: the log is durable up to byte {marker.length_bytes} of it, but {state}")


def recover_tail(path: Path, marker: Marker, epoch: int, timeline: int) -> RecoveredTail | None:
    """Copies whole transactions above the marker into a new segment; None if there are none."""
    folder = path / "segments"
    for leftover in folder.glob(".recovering-*"):
        leftover.unlink()
    headers: list[BlockHeader] = []
    complete_blocks = complete_bytes = 0
    header = SegmentHeader(marker.end_offset, epoch, timeline, previous="").encode()
    aside = folder / f".recovering-{epoch:010d}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        write_all(descriptor, header)
        length = len(header)
        for block_header, data in _valid_blocks(folder, marker, epoch):
            write_all(descriptor, data)
            length += len(data)
            headers.append(block_header)
            if block_header.ends_transaction:
                complete_blocks, complete_bytes = len(headers), length
        os.ftruncate(descriptor, complete_bytes)
        os.fsync(descriptor)
    except BaseException:
        os.unlink(aside)
        raise
    finally:
        os.close(descriptor)
    if not complete_blocks:
        os.unlink(aside)
        return None
    reach(_COPIED)
    name = SegmentName(marker.end_offset, epoch)
    os.rename(aside, folder / str(name))
    fsync_path(folder)
    reach(_NAMED)
    last = headers[complete_blocks - 1]
    return RecoveredTail(name, complete_bytes, last.end_offset, last.last_end_lsn, last.last_commit_lsn)


def _valid_blocks(folder: Path, marker: Marker, epoch: int) -> Iterator[tuple[BlockHeader, bytes]]:
    """Blocks from the marker on, of the writer that wrote last, up to the first that is not whole."""
    next_offset = marker.end_offset
    for name in _tail_segments(folder, marker, epoch):
        if name.first_offset > next_offset:
            return
        path = folder / str(name)
        with open(path, "rb") as file:
            try:
                position = _start_position(file.read(1 << 16), name, marker, str(path))
                while True:
                    file.seek(position)
                    header, data = _read_block(file, f"{path} at byte {position}")
                    position += header.total_bytes
                    if header.first_offset < next_offset:
                        continue
                    if header.first_offset > next_offset or 0 < header.last_end_lsn <= marker.durable_lsn:
                        return
                    next_offset = header.end_offset
                    yield header, data
            except LogCorruptError:
                continue  # a torn tail: above the marker that is no corruption


def _tail_segments(folder: Path, marker: Marker, epoch: int) -> list[SegmentName]:
    """Segments of the writer that wrote last, from the one that the marker names on."""
    older = [name for name in list_segments(folder) if name.epoch < epoch]
    last_epoch = max((name.epoch for name in older), default=0)
    names = [name for name in older if name.epoch == last_epoch]
    if marker.segment_epoch == last_epoch:
        names = [name for name in names if name.first_offset >= marker.segment_first_offset]
    return names


def _start_position(head: bytes, name: SegmentName, marker: Marker, where: str) -> int:
    if (name.first_offset, name.epoch) == (marker.segment_first_offset, marker.segment_epoch):
        return marker.length_bytes
    return parse_segment_header(head, where)[1]


def _read_block(file: BinaryIO, where: str) -> tuple[BlockHeader, bytes]:
    """A whole block with every checksum checked."""
    head = file.read(HEADER_BYTES)
    header = parse_header(head, where)
    rest = file.read(header.directory_bytes + header.body_bytes)
    directory = parse_directory(rest[: header.directory_bytes], header, where)
    data = head + rest
    for entry in directory.tables:
        decode_rows(data[entry.position : entry.position + entry.length_bytes], entry, where)
    return header, data

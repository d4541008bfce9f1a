"""Segments: files of blocks, and which of their rows count.

A segment is named `<first offset>-<epoch>.seg`.  Nothing that was marked is ever cut or rewritten: when a writer takes
over, its first segment begins at the durable end, and every segment of a lower epoch is void from that offset on.  So a
torn tail, or what a paused old writer still adds, does no harm.
"""

from __future__ import annotations

import bisect
import json
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from pgtide.errors import LogCorruptError
from pgtide.log.block import HEADER_BYTES, BlockHeader, Directory, TableEntry, parse_directory, parse_header

MAGIC = b"PGTIDES1"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_NAME = re.compile(r"(\d{20})-(\d{10})\.seg")
_UNDERSTOOD_FLAGS: frozenset[str] = frozenset()
_WALK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    first_offset: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.first_offset:020d}-{self.epoch:010d}.seg"


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself, before its first block."""

    first_offset: int
    epoch: int
    timeline: int
    previous: str  # name of the segment before it, "" for the first
    checksum: str = "xxh3-64"
    slot_generation: int = 1
    mask_version: int = 0
    must_understand: tuple[str, ...] = ()
    version: int = 1

    def encode(self) -> bytes:
        described = json.dumps({name: getattr(self, name) for name in self.__slots__}, separators=(",", ":")).encode()
        packed = MAGIC + _LENGTH.pack(len(described)) + described
        return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def parse_segment_header(data: bytes, where: str) -> tuple[SegmentHeader, int]:
    """The header at the start of a segment, and its length in bytes."""
    fixed = len(MAGIC) + _LENGTH.size
    if data[: len(MAGIC)] != MAGIC or len(data) < fixed:
        raise LogCorruptError(f"{where}: not a segment of a pgtide log (wrong magic)")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    packed = data[: fixed + length]
    checksum = data[fixed + length : fixed + length + _CHECKSUM.size]
    if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed)):
        raise LogCorruptError(f"{where}: the segment's header does not match its checksum")
    fields = json.loads(packed[fixed:])
    if unknown := set(fields["must_understand"]) - _UNDERSTOOD_FLAGS:
        raise LogCorruptError(
            f"{where}: the segment needs {sorted(unknown)}, which this version does not understand",
            remedy="read this log with the pgtide version that wrote it, or a newer one",
        )
    known = {name: fields[name] for name in SegmentHeader.__slots__} | {
        "must_understand": tuple(fields["must_understand"])
    }
    return SegmentHeader(**known), fixed + length + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Extent:
    """A segment and where its rows stop to count (exclusive), because a later segment has taken over."""

    name: SegmentName
    end_offset: int


def list_segments(folder: Path) -> list[SegmentName]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (_NAME.fullmatch(name) for name in sorted(names))  # digits with leading zeros: in the order of the log
    return [SegmentName(int(match[1]), int(match[2])) for match in found if match]


def valid_extents(names: list[SegmentName], end_offset: int) -> list[Extent]:
    """Which segments count, and up to where, below the durable end; ascending and without overlap."""
    extents: list[Extent] = []
    limit, void_from, epoch = end_offset, end_offset, -1
    for name in sorted(names, key=lambda name: (name.epoch, name.first_offset), reverse=True):
        if name.epoch != epoch:  # all segments of higher epochs are seen: the first of their offsets voids the rest
            limit, epoch = void_from, name.epoch
        if name.first_offset < limit:
            extents.append(Extent(name, limit))
            limit = name.first_offset
        void_from = min(void_from, name.first_offset)
    return sorted(extents, key=lambda extent: extent.name.first_offset)


@dataclass(slots=True)
class BlockIndex:
    """The blocks of one segment that have been walked so far: their positions and headers, no contents."""

    path: Path
    positions: list[int] = field(default_factory=list)
    headers: list[BlockHeader] = field(default_factory=list)
    end_offsets: list[int] = field(default_factory=list)
    next_position: int = 0
    next_offset: int = 0

    def extend(self, end_offset: int) -> None:
        """Walks on until the rows below `end_offset` are covered; anything unreadable before that is corruption."""
        if self.next_position and self.next_offset >= end_offset:
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            walk = _Walk(descriptor)
            if not self.next_position:
                self._begin(walk.bytes_at(0, _WALK_BYTES))
            while self.next_offset < end_offset:
                where = f"{self.path} at byte {self.next_position}"
                data = walk.bytes_at(self.next_position, HEADER_BYTES)
                if not data:
                    raise LogCorruptError(
                        f"{where}: the segment ends here with offset {self.next_offset}, but should go on to "
                        f"{end_offset}: it was cut off, or the segment after it is missing"
                    )
                self._add(parse_header(data, where), where)
        finally:
            os.close(descriptor)

    def _begin(self, head: bytes) -> None:
        header, self.next_position = parse_segment_header(head, f"{self.path} at byte 0")
        self.next_offset = header.first_offset
        name = str(SegmentName(header.first_offset, header.epoch))
        if name != self.path.name:
            raise LogCorruptError(f"{self.path} at byte 0: this is segment {name} under another name")

    def _add(self, header: BlockHeader, where: str) -> None:
        if header.first_offset != self.next_offset:
            raise LogCorruptError(
                f"{where}: the block begins at offset {header.first_offset}, expected {self.next_offset}"
            )
        self.positions.append(self.next_position)
        self.headers.append(header)
        self.end_offsets.append(header.end_offset)
        self.next_position += header.total_bytes
        self.next_offset = header.end_offset

    def from_offset(self, offset: int) -> int:
        """Index of the first block with rows at or after `offset`."""
        return bisect.bisect_right(self.end_offsets, offset)


class _Walk:
    """Reads headers one after the other: many with one read where blocks are small, nothing between where not."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start, self._data = 0, b""

    def bytes_at(self, position: int, length: int) -> bytes:
        begin = position - self._start
        if not 0 <= begin <= len(self._data) - length:
            near = begin < _WALK_BYTES
            self._start, self._data = position, os.pread(self._descriptor, _WALK_BYTES if near else length, position)
            begin = 0
        return self._data[begin : begin + length]


def read_directory(path: Path, position: int, header: BlockHeader) -> Directory:
    data = read_range(path, position + HEADER_BYTES, header.directory_bytes)
    return parse_directory(data, header, f"{path} at byte {position}")


def read_entry(path: Path, position: int, entry: TableEntry) -> bytes:
    return read_range(path, position + entry.position, entry.length_bytes)


def read_range(path: Path, position: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, length, position)
    finally:
        os.close(descriptor)

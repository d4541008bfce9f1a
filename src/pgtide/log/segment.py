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
from pgtide.log.block import HEADER_BYTES, BlockHeader, Directory, parse_directory, parse_header
from pgtide.log.objects.names import ObjectName, parse_name
from pgtide.log.storage import OpenedFile, Storage

FOLDER = "segments"
MAGIC = b"PGTIDES1"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_NAME = re.compile(r"(\d{20})-(\d{10})\.seg")
INDEXED = "index"  # flag: the headers of all blocks follow the segment's header, before the first block
_UNDERSTOOD_FLAGS = frozenset({INDEXED})
_WALK_BYTES = 64 << 10  # more than any header has


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
    writer: str = ""  # on an object store: who made this object
    index_bytes: int = 0

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
    known = {name: fields[name] for name in SegmentHeader.__slots__ if name in fields}
    known["must_understand"] = tuple(fields["must_understand"])
    return SegmentHeader(**known), fixed + length + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Extent:
    """A segment and where its rows stop to count (exclusive), because a later segment has taken over."""

    name: SegmentName | ObjectName
    end_offset: int
    begins: int | None = None  # where its rows begin to count, if not with the first

    @property
    def first_offset(self) -> int:
        return self.name.first_offset if self.begins is None else self.begins

    @property
    def file(self) -> str:
        return f"{FOLDER}/{self.name}"


@dataclass(frozen=True, slots=True)
class View:
    """The log as one look at marker and segments shows it."""

    end_offset: int
    extents: list[Extent]

    @property
    def first_offset(self) -> int:
        return self.extents[0].first_offset if self.extents else self.end_offset


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
    return sorted(extents, key=lambda extent: extent.first_offset)


@dataclass(slots=True)
class BlockIndex:
    """The blocks of one segment that have been walked so far: their positions and headers, no contents."""

    name: str
    positions: list[int] = field(default_factory=list)
    headers: list[BlockHeader] = field(default_factory=list)
    end_offsets: list[int] = field(default_factory=list)
    next_position: int = 0
    next_offset: int = 0

    def extend(self, storage: Storage, end_offset: int) -> None:
        """Walks on until the rows below `end_offset` are covered; anything unreadable before that is corruption."""
        if self.next_position and self.next_offset >= end_offset:
            return
        with storage.open(self.name) as file:
            walk = _Walk(file)
            if not self.next_position:
                self._begin(walk, f"{storage.location}/{self.name}")
            while self.next_offset < end_offset:
                where = f"{storage.location}/{self.name} at byte {self.next_position}"
                data = walk.bytes_at(self.next_position, HEADER_BYTES)
                if not data:
                    raise LogCorruptError(
                        f"{where}: the segment ends here with offset {self.next_offset}, but should go on to "
                        f"{end_offset}: it was cut off, or the segment after it is missing"
                    )
                self._add(parse_header(data, where), where)

    def _begin(self, walk: _Walk, where: str) -> None:
        header, length = parse_segment_header(walk.bytes_at(0, _WALK_BYTES), f"{where} at byte 0")
        if not _is_named(header, self.name):
            found = SegmentName(header.first_offset, header.epoch)
            raise LogCorruptError(f"{where} at byte 0: this is segment {found} under another name")
        index = walk.bytes_at(length, header.index_bytes) if header.index_bytes else b""
        self.next_position, self.next_offset = length + header.index_bytes, header.first_offset
        for position in range(0, len(index), HEADER_BYTES):
            at = f"{where} at byte {length + position}, its index"
            self._add(parse_header(index[position : position + HEADER_BYTES], at), at)

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

    def __init__(self, file: OpenedFile) -> None:
        self._file = file
        self._start, self._data = 0, b""

    def bytes_at(self, position: int, length: int) -> bytes:
        begin = position - self._start
        if not 0 <= begin <= len(self._data) - length:
            near = begin < _WALK_BYTES
            self._file.seek(position)
            self._start, self._data = position, self._file.read(max(length, _WALK_BYTES) if near else length)
            begin = 0
        return self._data[begin : begin + length]


def _is_named(header: SegmentHeader, name: str) -> bool:
    """Whether a segment that says this of itself has this name."""
    as_object = parse_name(name)
    if as_object is not None:
        return as_object.first_offset == header.first_offset
    return name.rpartition("/")[2] == str(SegmentName(header.first_offset, header.epoch))


def read_directory(storage: Storage, name: str, position: int, header: BlockHeader) -> Directory:
    data = storage.read_range(name, position + HEADER_BYTES, header.directory_bytes)
    return parse_directory(data, header, f"{storage.location}/{name} at byte {position}")

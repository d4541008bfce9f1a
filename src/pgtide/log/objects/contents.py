"""One object of a log as a whole: read, and checked to the last byte."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from pgtide.errors import LogCorruptError
from pgtide.log.block import HEADER_BYTES, BlockHeader, parse_directory, parse_header
from pgtide.log.objects.names import ObjectName
from pgtide.log.segment import FOLDER, SegmentHeader, parse_segment_header
from pgtide.log.storage import Storage


@dataclass(frozen=True, slots=True)
class ObjectContents:
    name: str
    header: SegmentHeader
    headers: list[BlockHeader]
    blocks: bytes  # all of them, as they are


def read_object(storage: Storage, name: ObjectName) -> ObjectContents | None:
    """None if it is not there; anything wrong in it is corruption."""
    file = f"{FOLDER}/{name}"
    try:
        data = storage.read(file)
    except FileNotFoundError:
        return None
    where = f"{storage.location}/{file}"
    header, length = parse_segment_header(data, where)
    start = position = length + header.index_bytes
    headers: list[BlockHeader] = []
    while position < len(data):
        headers.append(_checked_block(data, position, f"{where} at byte {position}"))
        position += headers[-1].total_bytes
    expected = name.first_offset
    for block in headers:
        if block.first_offset != expected:
            raise LogCorruptError(f"{where}: a block begins at offset {block.first_offset}, expected {expected}")
        expected = block.end_offset
    return ObjectContents(file, header, headers, data[start:])


def _checked_block(data: bytes, position: int, where: str) -> BlockHeader:
    header = parse_header(data[position : position + HEADER_BYTES], where)
    body = position + HEADER_BYTES + header.directory_bytes
    directory = parse_directory(data[position + HEADER_BYTES : body], header, where)
    if body + header.body_bytes > len(data):
        raise LogCorruptError(f"{where}: a block is cut off")
    for entry in directory.tables:
        rows = data[position + entry.position : position + entry.position + entry.length_bytes]
        if xxhash.xxh3_64_intdigest(rows) != entry.checksum:
            raise LogCorruptError(f"{where}: rows of relation {entry.relation_oid} do not match their checksum")
    return header

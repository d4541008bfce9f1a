"""Relation messages, and how the tuples of a relation are decoded.

The message tells names, types and key flags as they were when the rows were written.  The rest (attribute
numbers, elements of arrays, fields of composites) only the catalog knows: whoever owns the decoder turns
a message into a `TableShape`, which may leave columns out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pyarrow as pa

from pgtide.decode.codec import Codec
from pgtide.decode.codecs import codec_of
from pgtide.errors import DecodeError
from pgtide.schema import Column, TableShape, storage_schema


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    type_oid: int
    typmod: int
    key: bool  # part of the replica identity; under REPLICA IDENTITY FULL every column is


@dataclass(frozen=True, slots=True)
class RelationMessage:
    relation_oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]
    in_progress: bool = field(default=False, compare=False)  # its transaction is: the catalog may not show it yet
    prepared_xid: int = field(default=0, compare=False)  # its transaction is prepared, and may have ended since; else 0


def parse_relation(message: bytes, *, in_progress: bool = False, prepared_xid: int = 0) -> RelationMessage:
    """From the relation's oid on (without the kind, and the xid in a stream block)."""
    try:
        (oid,) = struct.unpack_from(">I", message)
        namespace, name, rest = message[4:].split(b"\0", 2)
        identity, count = struct.unpack_from(">BH", rest)
        columns, at = [], 3
        for _ in range(count):
            end = rest.index(0, at + 1)
            type_oid, typmod = struct.unpack_from(">Ii", rest, end + 1)
            columns.append(RelationColumn(rest[at + 1 : end].decode(), type_oid, typmod, bool(rest[at] & 1)))
            at = end + 9
        if at != len(rest):
            raise ValueError("it has bytes left over")
        # An empty namespace stands for pg_catalog.
        schema = namespace.decode() or "pg_catalog"
        return RelationMessage(oid, schema, name.decode(), chr(identity), tuple(columns), in_progress, prepared_xid)
    except (struct.error, ValueError, IndexError) as error:
        raise DecodeError(f"a relation message cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class DecodedColumn:
    """A column of the shape, its place in the tuples and its decoder."""

    column: Column
    place: int
    codec: Codec
    in_key_image: bool


class Relation:
    """A relation as its tuples come now."""

    def __init__(self, message: RelationMessage, shape: TableShape) -> None:
        self.message, self.shape = message, shape
        self.width = len(message.columns)
        places = {column.name: place for place, column in enumerate(message.columns)}
        missing = [column.name for column in shape.columns if column.name not in places]
        if missing:
            raise DecodeError(
                f"{shape.qualified_name} has no column {missing[0]} in the stream",
                remedy="The table changed between its changes and now; nothing was lost: start again.",
            )
        self.columns = tuple(
            DecodedColumn(column, places[column.name], codec_of(column.type), message.columns[places[column.name]].key)
            for column in shape.columns
        )
        self._schemas: dict[tuple[object, ...], pa.Schema] = {}

    def schema(
        self, unchanged: bool, old: tuple[Column, ...] | None, text: tuple[Column, ...], old_text: tuple[Column, ...]
    ) -> pa.Schema:
        """Of a batch of changes; made once for each combination of optional columns."""
        variant = (unchanged, old and len(old), old is None, text, old_text)
        if variant not in self._schemas:
            stored = storage_schema(self.shape, unchanged=unchanged, old=old, text=text, old_text=old_text)
            stored = stored.set(1, pa.field("_change", pa.int64(), nullable=False))
            self._schemas[variant] = stored.set(2, pa.field("_subxid", pa.uint32(), nullable=False))
        return self._schemas[variant]

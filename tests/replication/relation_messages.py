"""Relation messages as a real server sends them, read by hand: the reference for shapes that the catalog gives."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tests.database import Database


@dataclass(frozen=True)
class RelationColumn:
    name: str
    type_oid: int
    typmod: int
    key: bool


@dataclass(frozen=True)
class RelationMessage:
    relation_oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]
    in_progress: bool = False
    prepared_xid: int = 0


def create_slot(database: Database, slot: str) -> None:
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")


def relation_messages(database: Database, slot: str, publications: tuple[str, ...]) -> list[RelationMessage]:
    """The relation messages of all changes since the last call."""
    query = f"""SELECT data FROM pg_logical_slot_get_binary_changes('{slot}', NULL, NULL,
        'proto_version', '1', 'publication_names', '{",".join(publications)}', 'binary', 'true')"""
    return [_parse(bytes(data)) for (data,) in database.rows(query) if data[:1] == b"R"]


def _parse(data: bytes) -> RelationMessage:
    relation_oid = struct.unpack_from(">I", data, 1)[0]
    namespace, rest = _text(data[5:])
    name, rest = _text(rest)
    identity, count = chr(rest[0]), struct.unpack_from(">H", rest, 1)[0]
    rest = rest[3:]
    columns = []
    for _ in range(count):
        key, (column, rest) = bool(rest[0]), _text(rest[1:])
        type_oid, typmod = struct.unpack_from(">Ii", rest)
        rest = rest[8:]
        columns.append(RelationColumn(column, type_oid, typmod, key))
    return RelationMessage(relation_oid, namespace, name, identity, tuple(columns))


def _text(data: bytes) -> tuple[str, bytes]:
    text, _, rest = data.partition(b"\0")
    return text.decode(), rest

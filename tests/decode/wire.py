"""Messages as a server writes them, built field by field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pgtide.types import PgType

Value = tuple[bytes, bytes]  # kind (n, u, b, t) and content
NULL: Value = (b"n", b"")
UNCHANGED: Value = (b"u", b"")


@dataclass(frozen=True)
class WireColumn:
    name: str
    type: PgType
    key: bool


@dataclass(frozen=True)
class WireTable:
    oid: int
    name: str
    identity: str
    columns: tuple[WireColumn, ...]


def xlog_data(message: bytes, lsn: int = 0) -> bytes:
    return b"w" + struct.pack(">QQq", lsn, lsn, 0) + message


def keepalive(wal_end: int, clock: int, reply: bool) -> bytes:
    return b"k" + struct.pack(">QqB", wal_end, clock, reply)


def with_xid(kind: bytes, xid: int, body: bytes) -> bytes:
    return kind + (struct.pack(">I", xid) if xid else b"") + body


def relation(table: WireTable, xid: int = 0) -> bytes:
    body = struct.pack(">I", table.oid) + b"public\0" + table.name.encode() + b"\0" + table.identity.encode()
    body += struct.pack(">H", len(table.columns))
    for column in table.columns:
        body += bytes([column.key]) + column.name.encode() + b"\0"
        body += struct.pack(">Ii", column.type.oid, column.type.typmod)
    return with_xid(b"R", xid, body)


def tuple_data(tag: bytes, values: Sequence[Value]) -> bytes:
    body = tag + struct.pack(">H", len(values))
    for kind, content in values:
        body += kind + (struct.pack(">I", len(content)) + content if kind in b"bt" else b"")
    return body


def insert(oid: int, new: Sequence[Value], xid: int = 0) -> bytes:
    return with_xid(b"I", xid, struct.pack(">I", oid) + tuple_data(b"N", new))


def update(oid: int, new: Sequence[Value], old: Sequence[Value] | None, old_tag: bytes, xid: int = 0) -> bytes:
    before = tuple_data(old_tag, old) if old is not None else b""
    return with_xid(b"U", xid, struct.pack(">I", oid) + before + tuple_data(b"N", new))


def delete(oid: int, old: Sequence[Value], old_tag: bytes, xid: int = 0) -> bytes:
    return with_xid(b"D", xid, struct.pack(">I", oid) + tuple_data(old_tag, old))


def truncate(oids: Sequence[int], xid: int = 0) -> bytes:
    return with_xid(b"T", xid, struct.pack(f">iB{len(oids)}I", len(oids), 0, *oids))


def logical_message(transactional: bool, lsn: int, prefix: str, content: bytes, xid: int = 0) -> bytes:
    body = struct.pack(">BQ", transactional, lsn) + prefix.encode() + b"\0" + struct.pack(">I", len(content)) + content
    return with_xid(b"M", xid, body)


def type_message(xid: int = 0) -> bytes:
    return with_xid(b"Y", xid, struct.pack(">I", 99) + b"public\0mood\0")


def begin(lsn: int, clock: int, xid: int) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, clock, xid)


def commit(lsn: int, clock: int) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, lsn, lsn + 8, clock)


def origin(lsn: int, name: str) -> bytes:
    return b"O" + struct.pack(">Q", lsn) + name.encode() + b"\0"


def stream_start(xid: int, first: bool) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


def stream_stop() -> bytes:
    return b"E"


def stream_commit(xid: int, lsn: int, clock: int) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, 0, lsn, lsn + 8, clock)


def stream_abort(xid: int, subxid: int, details: tuple[int, int] | None) -> bytes:
    return b"A" + struct.pack(">II", xid, subxid) + (struct.pack(">Qq", *details) if details else b"")


def begin_prepare(lsn: int, clock: int, xid: int, gid: str) -> bytes:
    return b"b" + struct.pack(">QQqI", lsn, lsn + 8, clock, xid) + gid.encode() + b"\0"


def prepare(kind: bytes, lsn: int, clock: int, xid: int, gid: str) -> bytes:
    """Prepare (P), commit prepared (K) and stream prepare (p) look alike."""
    return kind + struct.pack(">BQQqI", 0, lsn, lsn + 8, clock, xid) + gid.encode() + b"\0"


def rollback_prepared(lsn: int, clock: int, xid: int, gid: str) -> bytes:
    return b"r" + struct.pack(">BQQqqI", 0, lsn, lsn + 8, clock - 5, clock, xid) + gid.encode() + b"\0"

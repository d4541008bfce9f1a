"""Real pgoutput bytes without a replication connection: a slot's changes by SQL, wrapped as a walsender does."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import psycopg

from pgtide.decode import Decoded, Decoder, Frames
from pgtide.replication.catalog import Catalog

Connection = psycopg.Connection[tuple[Any, ...]]


def xlog_data(message: bytes, lsn: int = 0) -> bytes:
    return b"w" + struct.pack(">QQq", lsn, lsn, 0) + message


def create_slot(connection: Connection, slot: str, *, two_phase: bool = False) -> None:
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)", [slot, two_phase])


def read_slot(connection: Connection, slot: str, publication: str, **options: str) -> list[bytes]:
    """The messages that the slot has to give, each as the payload of a CopyData."""
    given = {"proto_version": "4", "publication_names": publication, "messages": "true", **options}
    arguments = [part for option in given.items() for part in option]
    places = ", ".join(["%s"] * len(arguments))
    rows = connection.execute(
        f"SELECT data, (lsn - '0/0')::int8 FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, {places})".encode(),
        [slot, *arguments],
    ).fetchall()
    return [xlog_data(data, lsn) for data, lsn in rows]


def decode(connection: Connection, messages: Sequence[bytes]) -> Decoded:
    return Decoder(Catalog(connection).shape_for).feed(Frames.from_messages(messages))


def copy_frames(connection: Connection, query: str) -> Frames:
    """The tuples of COPY (query) TO STDOUT (FORMAT binary), without the header."""
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode()) as copy:
        messages = [bytes(message) for message in copy]
    header_bytes = 19 + struct.unpack_from(">i", messages[0], 15)[0]
    messages[0] = messages[0][header_bytes:]
    return Frames.from_messages([message for message in messages if message])

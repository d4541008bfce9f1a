"""Rows of a binary COPY, received in large pieces: as libpq gives them, and the connection goes on."""

from __future__ import annotations

import psycopg
import pytest

from pgtide.errors import TransientError
from pgtide.replication import copy_out as module
from pgtide.replication.channels import Received
from pgtide.replication.copy_out import copy_out
from tests.database import Database

TRAILER = b"\xff\xff"


def messages(pieces: list[Received]) -> list[bytes]:
    return [
        bytes(piece.buffer[start:end]) for piece in pieces for start, end in zip(piece.starts, piece.ends, strict=True)
    ]


def received(connection: psycopg.Connection[tuple[object, ...]], query: str) -> list[bytes]:
    rows: list[bytes] = []
    for piece in copy_out(connection, f"COPY ({query}) TO STDOUT (FORMAT binary)".encode()):
        rows += messages([piece])  # at once: the buffer is used again
    return rows


def by_libpq(connection: psycopg.Connection[tuple[object, ...]], query: str) -> list[bytes]:
    with connection.cursor() as cursor, cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode()) as copy:
        found = [bytes(message) for message in copy]
    return [found[0][19:], *found[1:]]


QUERIES = [
    "SELECT n, repeat('x', n % 300), NULL::int FROM generate_series(1, 5000) n",
    "SELECT 1 WHERE false",
    "SELECT repeat('long', 100000)",  # larger than the buffer
    # Values that end as ReadyForQuery does.
    "SELECT decode('5a0000000549', 'hex') FROM generate_series(1, 3000)",
    "SELECT FROM generate_series(1, 3)",
]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("buffer_bytes", [8 << 20, 1000])
def test_every_row_comes_as_through_libpq(
    database: Database, monkeypatch: pytest.MonkeyPatch, query: str, buffer_bytes: int
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", buffer_bytes)
    with database.connect() as connection, connection.transaction():
        rows = received(connection, query)
        assert rows[-1] == TRAILER
        assert rows == [row for row in by_libpq(connection, query) if row]
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("query", QUERIES)
def test_an_encrypted_connection_is_read_through_libpq_with_the_same_rows(
    database: Database, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    with database.connect() as connection:
        expected = received(connection, query)
        monkeypatch.setattr(module, "is_encrypted", lambda _: True)
        assert received(connection, query) == expected


def test_an_error_of_the_server_is_raised_as_what_it_is_and_the_connection_goes_on(database: Database) -> None:
    with database.connect() as connection:
        with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero"), connection.transaction():
            received(connection, "SELECT 1 / (900 - n) FROM generate_series(1, 1000) n")
        with pytest.raises(psycopg.errors.UndefinedTable), connection.transaction():
            received(connection, "SELECT * FROM nowhere")
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_rows_that_are_not_wanted_to_the_end_leave_a_connection_that_can_be_used(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1000)
    with database.connect() as connection:
        pieces = copy_out(connection, b"COPY (SELECT n FROM generate_series(1, 100000000) n) TO STDOUT (FORMAT binary)")
        assert len(next(pieces).starts) > 1
        pieces.close()  # type: ignore[attr-defined]
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_connection_that_is_lost_is_told_as_something_that_passes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1000)
    with database.connect() as connection, database.connect() as other:
        pieces = copy_out(connection, b"COPY (SELECT n FROM generate_series(1, 100000000) n) TO STDOUT (FORMAT binary)")
        next(pieces)
        other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises((TransientError, psycopg.errors.AdminShutdown)):
            for _ in pieces:
                pass
        assert connection.closed

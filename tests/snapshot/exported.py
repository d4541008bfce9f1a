"""A snapshot as the capture offers it, kept by a connection of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgtide.replication.slot import Snapshot
from tests.database import Database


@contextmanager
def exported_snapshot(database: Database, table: str) -> Iterator[tuple[Snapshot, int]]:
    """The snapshot, and the oid of the table that is to be read under it."""
    with database.connect() as keeper:
        keeper.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        [(name, contents, oid)] = keeper.execute(
            f"SELECT pg_export_snapshot(), pg_current_snapshot()::text, '{table}'::regclass::oid::int8".encode()
        ).fetchall()
        yield Snapshot(name, contents, server_started=""), oid

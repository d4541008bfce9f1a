"""A database of one test's own, on the server that all tests share."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgtide.local import LocalPostgres
from tests.waiting import wait_for


@dataclass(frozen=True, slots=True)
class Database:
    server: LocalPostgres
    name: str

    @property
    def dsn(self) -> str:
        return self.server.dsn_of(self.name)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        return self.server.connect(self.name, **options)

    def execute(self, *statements: str) -> None:
        """Runs statements, each in a transaction of its own."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query.encode()).fetchall()


def create_database(server: LocalPostgres) -> Database:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with server.connect() as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return Database(server, name)


def drop_database(database: Database) -> None:
    """Removes the database with everything that would hold it: slots, their connections, prepared transactions."""
    server, name = database.server, database.name
    if not server.running:
        server.start()
    with server.connect() as connection:

        def slots() -> list[tuple[str, int | None]]:
            found = connection.execute(
                "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s", [name]
            )
            return [(row[0], row[1]) for row in found.fetchall()]

        def all_dropped() -> bool:
            for slot, active_pid in slots():
                if active_pid is not None:
                    connection.execute("SELECT pg_terminate_backend(%s, 1000)", [active_pid])
                try:
                    connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
                except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                    continue  # it was taken again, or was temporary: look once more
            return not slots()

        wait_for(all_dropped, what=f"the slots of {name} to go")
        prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name]).fetchall()
        if prepared:
            with database.connect() as inside:
                for (gid,) in prepared:
                    inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

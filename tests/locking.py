"""Somebody who locks a table against all others, again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.database import Database


@contextmanager
def locking(database: Database, table: str) -> Iterator[None]:
    """While the block lasts; whoever reads the table has it for as long as this waits."""
    over = threading.Event()

    def lock() -> None:
        with database.connect() as connection:
            while not over.is_set():
                connection.execute(f"BEGIN; LOCK TABLE {table}; COMMIT".encode())

    thread = threading.Thread(target=lock)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

"""Roles of one test's own: they belong to the server that all tests share, so they must go again."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import sql

from tests.database import Database


@contextmanager
def role(database: Database, attributes: str = "") -> Iterator[str]:
    """A role that may log in, with further attributes such as REPLICATION."""
    name = f"role_{uuid.uuid4().hex[:8]}"
    with database.connect() as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN {}").format(sql.Identifier(name), sql.SQL(attributes)))
        try:
            yield name
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))

"""What publications let through, as the server itself works it out: tables, columns and row filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from pgtide.replication.connect import Connection, postgres_errors


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """What a publication lets through of one table."""

    namespace: str
    name: str
    columns: frozenset[str] | None  # None: all but generated ones
    row_filter: str | None


def published_tables(
    connection: Connection, names: Sequence[str], oids: Sequence[int] | None = None
) -> dict[int, PublishedTable]:
    """What the stream will tell of, by oid; only of these tables, if given.

    A row is sent if the filter of one publication lets it through.
    """
    version = connection.info.server_version
    query = sql.SQL(_PUBLISHED).format(
        columns=sql.SQL("p.attnames::text[]" if version >= 150000 else "NULL"),
        row_filter=sql.SQL("p.rowfilter" if version >= 150000 else "NULL"),
        generated=sql.SQL("false" if version >= 180000 else "a.attgenerated <> ''"),
    )
    with postgres_errors("reading publications"):
        rows = connection.execute(
            query, {"names": list(names), "oids": None if oids is None else list(oids)}
        ).fetchall()
    published: dict[int, PublishedTable] = {}
    for oid, namespace, name, columns, row_filter in rows:
        known = published.get(oid)
        if known is not None and (known.row_filter is None or row_filter is None):
            row_filter = None
        elif known is not None:
            row_filter = f"({known.row_filter}) OR ({row_filter})"
        names_of_columns = frozenset(columns) if columns is not None else None
        published[oid] = PublishedTable(namespace, name, names_of_columns, row_filter)
    return published


def unpublished(connection: Connection, names: Sequence[str], relation_oids: Sequence[int]) -> list[str]:
    """Which of these tables, as far as they are still there, no publication has: their names, quoted."""
    with postgres_errors("reading publications"):
        rows = connection.execute(_UNPUBLISHED, {"names": list(names), "oids": list(relation_oids)}).fetchall()
    return [row[0] for row in rows]


# The function itself: the view over it takes twenty times as long, and this is asked every few seconds.
_UNPUBLISHED = """
SELECT c.oid::regclass::text FROM pg_class c
WHERE c.oid = ANY(%(oids)s)
  AND c.oid NOT IN (SELECT g.relid FROM pg_publication p, pg_get_publication_tables(p.pubname::text) g
                    WHERE p.pubname = ANY(%(names)s))
ORDER BY 1"""

_PUBLISHED = """
SELECT c.oid::int8, n.nspname::text, c.relname::text,
       (SELECT array_agg(a.attname::text) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attname = ANY({columns}) AND NOT {generated}),
       {row_filter}
FROM pg_publication_tables p
JOIN pg_namespace n ON n.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
WHERE p.pubname = ANY(%(names)s) AND (%(oids)s::int8[] IS NULL OR c.oid::int8 = ANY(%(oids)s::int8[]))"""

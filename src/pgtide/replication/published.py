"""What publications let through: tables, columns and row filters.

The server's own function for this waits, from 16 on, for whoever holds an exclusive lock on one of the tables: a VACUUM
FULL, a long ALTER TABLE, a prepared TRUNCATE.  Whoever reads the stream must not wait for that, so the catalogs are
asked themselves.
"""

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
        listed=_listed(version),
        columns=sql.SQL("r.prattrs" if version >= 150000 else "NULL::int2[]"),
        row_filter=sql.SQL("pg_get_expr(r.prqual, r.prrelid)" if version >= 150000 else "NULL"),
        whole=_in_schema("c", version),
        generated=sql.SQL(
            "a.attgenerated <> '' AND r.prattrs IS NULL AND (p.pubgencols <> 's' OR a.attgenerated <> 's')"
            if version >= 180000
            else "a.attgenerated <> ''"
        ),
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


@dataclass(frozen=True, slots=True)
class Membership:
    """By which entries of the catalog a table is published: one that was taken out and put back has another entry."""

    table: str  # its name, quoted
    entries: frozenset[str]  # each begins with its publication's oid; none: no publication has the table

    def has_kept(self, entries: frozenset[str]) -> bool:
        """Whether one of these is still there: it has published the table all the time."""
        return bool(self.entries & entries)

    def is_of_another_publication(self, entries: frozenset[str]) -> bool:
        """Whether none of the publications that had these has the table, though they may have the same names."""
        return not {entry.split()[0] for entry in self.entries} & {entry.split()[0] for entry in entries}


def memberships(connection: Connection, names: Sequence[str], relation_oids: Sequence[int]) -> dict[int, Membership]:
    """Of these tables, as far as they are still there, by oid."""
    version = connection.info.server_version
    query = sql.SQL(_MEMBERSHIPS).format(
        listed=_listed(version), by_schema=sql.SQL(_ENTRIES_BY_SCHEMA if version >= 150000 else "")
    )
    with postgres_errors("reading publications"):
        rows = connection.execute(query, {"names": list(names), "oids": list(relation_oids)}).fetchall()
    return {oid: Membership(name, frozenset(entries)) for oid, name, entries in rows}


def _listed(version: int) -> sql.Composed:
    """Whether publication `p` has table `c` under its own name: as a root, or else as a leaf."""
    return sql.SQL(_LISTED).format(
        table=sql.SQL(_NAMED).format(sql.SQL("c"), _in_schema("c", version)),
        parent=sql.SQL(_NAMED).format(sql.SQL("up"), _in_schema("up", version)),
    )


def _in_schema(table: str, version: int) -> sql.Composed:
    known = "EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = {}.relnamespace)"
    return sql.SQL(known if version >= 150000 else "false").format(sql.SQL(table))


_NAMED = """(p.puballtables OR {1} OR EXISTS (
    SELECT FROM pg_publication_rel m WHERE m.prpubid = p.oid AND m.prrelid = {0}.oid))"""

_LISTED = """CASE WHEN p.pubviaroot
    THEN {table} AND NOT (c.relispartition AND EXISTS (
        SELECT FROM pg_partition_ancestors(c.oid) a JOIN pg_class up ON up.oid = a.relid AND up.oid <> c.oid
        WHERE {parent}))
    ELSE c.relkind = 'r' AND ({table} OR c.relispartition AND EXISTS (
        SELECT FROM pg_partition_ancestors(c.oid) a JOIN pg_class up ON up.oid = a.relid WHERE {parent})) END"""

_MEMBERSHIPS = """
SELECT c.oid::int8, c.oid::regclass::text, ARRAY(
    SELECT entry FROM pg_publication p
    CROSS JOIN LATERAL (
        SELECT array_agg(relid) || c.oid::regclass AS relids FROM pg_partition_ancestors(c.oid)) ancestors
    CROSS JOIN LATERAL (
        SELECT p.oid || ' all' AS entry WHERE p.puballtables
        UNION ALL SELECT p.oid || ' table ' || m.oid FROM pg_publication_rel m
        WHERE m.prpubid = p.oid AND m.prrelid = ANY(relids)
        {by_schema}) entries
    WHERE p.pubname = ANY(%(names)s) AND {listed})
FROM pg_class c WHERE c.oid = ANY(%(oids)s) ORDER BY 2"""

_ENTRIES_BY_SCHEMA = """UNION ALL SELECT p.oid || ' schema ' || s.oid FROM pg_publication_namespace s
        JOIN pg_class up ON up.relnamespace = s.pnnspid WHERE s.pnpubid = p.oid AND up.oid = ANY(relids)"""

# A list of columns or a filter counts only where the table is published by its name alone.
_PUBLISHED = """
SELECT c.oid::int8, n.nspname::text, c.relname::text,
       (SELECT array_agg(a.attname::text) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND ({columns} IS NULL OR a.attnum = ANY({columns})) AND NOT ({generated})),
       {row_filter}
FROM pg_publication p
JOIN pg_class c ON c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid AND NOT p.puballtables AND NOT {whole}
WHERE p.pubname = ANY(%(names)s) AND {listed}
  AND (%(oids)s::int8[] IS NULL OR c.oid::int8 = ANY(%(oids)s::int8[]))"""

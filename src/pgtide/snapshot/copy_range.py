"""Reading one ctid range of a table under an imported snapshot, as columns that the log stores.

TRUNCATE and rewrites are not MVCC-safe: a reader whose snapshot is older sees an empty table.  So the table is locked
first (which takes no snapshot), then the snapshot is imported, and after the rows the file as of the snapshot is
compared with the one now: if they differ, what was read means nothing.  The lock goes with the range.

Columns are found by name, and names are those of now, while the rows are those of the snapshot: the names are compared
before and after, so that two columns that have swapped theirs are not taken for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from psycopg import sql

from pgtide.decode import Frames, copied_as_text, decode_copy
from pgtide.errors import PgtideError, TableError, TransientError
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.copy_out import copy_out
from pgtide.replication.slot import Snapshot
from pgtide.schema import Column, TableShape
from pgtide.snapshot.ctid_ranges import CtidRange

_LOCK_TIMEOUT_MS = 10_000


class SnapshotGone(TransientError):
    """The snapshot cannot be imported any more: whoever kept it has ended."""


class Cancelled(TransientError):
    """Reading was cancelled: it took too long, or somebody waited for our lock."""


class Locked(TransientError):
    """Another session holds a lock that keeps readers out."""


class Rewritten(TableError):
    """The table was truncated or rewritten since the snapshot was taken."""


class Altered(TableError):
    """Columns were renamed or dropped since the snapshot was taken."""


class StartAgain(TableError):
    """What is loaded of the table cannot be brought to a new snapshot: it is loaded anew."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How to read with regard for others."""

    statement_timeout_s: float = 0  # 0: none
    reader_name: str = ""  # the application_name by which our lock is known for what it is


NO_LIMITS = ReadLimits()


@dataclass(frozen=True, slots=True)
class TableAsOf:
    """What to read of a table, and as of when."""

    shape: TableShape
    snapshot: Snapshot
    row_filter: str | None = None  # what its publication lets through, as the server prints it
    limits: ReadLimits = NO_LIMITS
    standby: bool = False  # the snapshot is one of the server in source.read_from


def limit_waiting_for_locks(connection: Connection) -> None:
    """Also what only asks for the size of a table waits for those who have locked it."""
    with postgres_errors("setting up the connection"):
        connection.execute(f"SET lock_timeout = {_LOCK_TIMEOUT_MS}".encode())


@contextmanager
def under_snapshot(
    connection: Connection, relation_oids: Sequence[int], snapshot: Snapshot, limits: ReadLimits = NO_LIMITS
) -> Iterator[dict[int, str]]:
    """A read-only transaction under the snapshot with these tables locked; gives their quoted names.

    At its end it makes sure that none of them was truncated or rewritten: only then count the rows that were read.
    """
    oids = sorted(relation_oids)
    names = _quoted_names(connection, oids)
    with connection.transaction(), postgres_errors(f"reading {names[oids[0]]}"):
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}".encode())
        connection.execute(f"SET LOCAL statement_timeout = {round(limits.statement_timeout_s * 1000)}".encode())
        if limits.reader_name:
            connection.execute(sql.SQL("SET LOCAL application_name = {}").format(sql.Literal(limits.reader_name)))
        locked = ", ".join(f"ONLY {name}" for name in names.values())
        try:
            connection.execute(f"LOCK TABLE {locked} IN ACCESS SHARE MODE".encode())
        except psycopg.errors.LockNotAvailable as error:
            what = f"reading {names[oids[0]]}: {str(error).partition(chr(10))[0]}"
            raise Locked(what, remedy="Another session holds a lock.") from error
        except psycopg.errors.UndefinedTable as error:
            raise _renamed(names[oids[0]]) from error
        try:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot.name)))
        except (psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedObject) as error:
            raise _gone(snapshot) from error
        if connection.execute("SELECT pg_current_snapshot()::text").fetchone() != (snapshot.contents,):
            raise _gone(snapshot)
        _check_locked(connection, names)
        try:
            yield names
        except psycopg.errors.QueryCanceled as error:
            raise Cancelled(f"reading {names[oids[0]]}: {str(error).partition(chr(10))[0]}") from error
        # A partitioned table has no file; a table that was not there yet has no rows as of the snapshot.
        rewritten = connection.execute(
            "SELECT w.oid::int8 FROM unnest(%s::int8[]::oid[]) w(oid) JOIN pg_catalog.pg_class c USING (oid) "
            "WHERE c.relkind IS DISTINCT FROM 'p' AND c.relfilenode IS DISTINCT FROM pg_relation_filenode(w.oid)",
            [oids],
        ).fetchone()
        if rewritten is not None:
            what = f"{names[rewritten[0]]} was truncated or rewritten while it was read."
            raise Rewritten(what, remedy="It is read again.")


@contextmanager
def leaves_under_snapshot(
    connection: Connection, table: TableAsOf, relation_oids: Sequence[int], limits: ReadLimits = NO_LIMITS
) -> Iterator[dict[int, str]]:
    """As `under_snapshot`, of the table or its partitions: one of these that was dropped is not the table."""
    try:
        with under_snapshot(connection, relation_oids, table.snapshot, limits) as names:
            yield names
    except Dropped as error:
        name = table.shape.qualified_name
        with postgres_errors("reading the catalog"):
            query = "SELECT FROM pg_catalog.pg_class WHERE oid::int8 = %s"
            if connection.execute(query, [table.shape.relation_oid]).fetchone() is None:
                raise dropped(name) from error
        what = f"A partition of {name} was dropped while it was read."
        raise Rewritten(what, remedy="A new snapshot is asked for.") from error


def _gone(snapshot: Snapshot) -> SnapshotGone:
    return SnapshotGone(f"The snapshot {snapshot.name} is gone.", remedy="A new one is asked for.")


def _check_locked(connection: Connection, names: dict[int, str]) -> None:
    """While we waited for the lock, another table may have got the name: now neither can be renamed."""
    other = connection.execute(
        "SELECT name FROM unnest(%s::int8[], %s::text[]) w(oid, name) "
        "WHERE to_regclass(name)::oid::int8 IS DISTINCT FROM oid",
        [list(names), list(names.values())],
    ).fetchone()
    if other is not None:
        raise _renamed(other[0])


def _renamed(name: str) -> Rewritten:
    return Rewritten(f"{name} was renamed, replaced or dropped while it was read.", remedy="It is read again.")


def _quoted_names(connection: Connection, relation_oids: Sequence[int]) -> dict[int, str]:
    with postgres_errors("reading the catalog"):
        rows = connection.execute(
            "SELECT c.oid::int8, quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid::int8 = ANY(%s) ORDER BY 1",
            [list(relation_oids)],
        ).fetchall()
    names: dict[int, str] = dict(rows)
    gone = set(relation_oids) - names.keys()
    if gone:
        raise dropped(f"the table with oid {min(gone)}")
    return names


class Dropped(TableError):
    """The table is no longer there."""


def dropped(what: str) -> Dropped:
    return Dropped(
        f"{what} was dropped in the source while it was loaded.",
        remedy="Take it out of source.tables, or make it again and start pgtide again.",
    )


@contextmanager
def columns_as_named(connection: Connection, shape: TableShape) -> Iterator[None]:
    """Fails unless the columns have, before and after the block, the names that the shape has for them."""
    _check_names(connection, shape)
    try:
        yield
    except PgtideError as error:
        if isinstance(error.__cause__, psycopg.errors.UndefinedColumn):
            raise Altered(f"{shape.qualified_name}: {error.what}") from error
        raise
    _check_names(connection, shape)


def _check_names(connection: Connection, shape: TableShape) -> None:
    with postgres_errors("reading the catalog"):
        found = connection.execute(
            "SELECT attnum, attname::text FROM pg_catalog.pg_attribute WHERE attrelid = %s AND NOT attisdropped",
            [shape.relation_oid],
        ).fetchall()
    wanted = {(column.attnum, column.name) for column in shape.columns}
    if found and not wanted <= set(found):
        raise Altered(
            f"{shape.qualified_name} was altered since the snapshot was taken, {_listed(wanted - set(found))} is gone",
            remedy="A new snapshot is asked for.",
        )


def _listed(columns: set[tuple[int, str]]) -> str:
    return ", ".join(f"column {name}" for _, name in sorted(columns))


def stored_rows(connection: Connection, table: TableAsOf, part: CtidRange) -> Iterator[pa.RecordBatch]:
    """The rows of a range as the log stores them.  Complete only if the iterator ends without an error."""
    leaf = part.relation_oid
    with (
        columns_as_named(connection, table.shape),
        leaves_under_snapshot(connection, table, [leaf], table.limits) as names,
    ):
        check_files(connection, [part])
        yield from copied(connection, table.shape, _query(table, names[leaf], part))


def check_files(connection: Connection, parts: Iterable[CtidRange]) -> None:
    """The ranges must be of the files that their tables have as of the snapshot."""
    wanted = {(part.relation_oid, part.file) for part in parts}
    found = connection.execute(
        "SELECT oid::int8, relfilenode::int8 FROM pg_catalog.pg_class WHERE oid::int8 = ANY(%s)",
        [[oid for oid, _ in wanted]],
    ).fetchall()
    if wanted - set(found):
        raise Rewritten("The table was truncated or rewritten since it was cut.", remedy="It is read again.")


def copied(connection: Connection, shape: TableShape, query: sql.Composed) -> Iterator[pa.RecordBatch]:
    """Rows of a COPY whose columns are the shape's, as the log stores them."""
    for received in copy_out(connection, query.as_bytes(connection)):
        rows = decode_copy(shape, Frames(received.buffer, received.starts, received.ends))
        if rows.num_rows:
            yield rows


def as_copied(column: Column, value: sql.Composable) -> sql.Composable:
    """What a COPY selects for a column: its value, or the text of it (`decode_copy` expects the same)."""
    return sql.SQL("{}::text").format(value) if copied_as_text(column.type) else value


def _query(table: TableAsOf, name: str, part: CtidRange) -> sql.Composed:
    columns = sql.SQL(", ").join(as_copied(column, sql.Identifier(column.name)) for column in table.shape.columns)
    condition = in_range(part)
    if table.row_filter is not None:
        condition += sql.SQL(" AND ({})").format(sql.SQL(table.row_filter))
    return sql.SQL("COPY (SELECT {} FROM ONLY {} WHERE {}) TO STDOUT (FORMAT binary)").format(
        columns,
        sql.SQL(name),
        condition,
    )


def in_range(part: CtidRange) -> sql.Composed:
    condition = sql.SQL("ctid >= {}").format(sql.Literal(f"({part.first_block},0)"))
    if part.end_block is not None:
        condition += sql.SQL(" AND ctid < {}").format(sql.Literal(f"({part.end_block},0)"))
    return condition

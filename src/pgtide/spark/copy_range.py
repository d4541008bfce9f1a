"""Reading one ctid range of a table under an imported snapshot, as Arrow: runs in the driver or in an executor.

TRUNCATE and rewrites are not MVCC-safe: a reader whose snapshot is older sees an empty table.  So the table is locked
first (which takes no snapshot), then the snapshot is imported, and after the rows the file as of the snapshot is
compared with the one now: if they differ, what was read means nothing.  The lock goes with the range.

Executors get a reference to the source, not its credentials: they read the configuration themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql.types import StructType

from pgtide.config import load_config
from pgtide.decode import Frames, decode_copy
from pgtide.errors import TableError, TransientError
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.server import Server
from pgtide.schema import TableShape
from pgtide.spark.rows import DEFAULT_POLICY, arrow_schema, lake_column

_BATCH_ROWS = 50_000
_BATCH_BYTES = 8 << 20
_COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_LOCK_TIMEOUT_MS = 10_000


class SnapshotGone(TransientError):
    """The snapshot cannot be imported any more: whoever kept it has ended."""


class Rewritten(TableError):
    """The table was truncated or rewritten since the snapshot was taken."""


@dataclass(frozen=True, slots=True)
class SourceReference:
    """Where to find the source's connection string; holds no secret itself."""

    config_file: str
    timeout_s: float
    server_started: str  # the server that has the snapshot

    def open(self) -> Connection:
        dsn = load_config(Path(self.config_file)).source.dsn
        return Server(dsn, self.server_started).connect(timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True)
class CtidRange:
    """Blocks [first_block, end_block) of one table or leaf partition; without end: all from the first on."""

    relation_oid: int
    first_block: int
    end_block: int | None

    @property
    def name(self) -> str:
        end = "" if self.end_block is None else str(self.end_block)
        return f"{self.relation_oid}:{self.first_block}-{end}"


@dataclass(frozen=True, slots=True)
class SourceTable:
    """What to read of a table, and as of when."""

    shape: TableShape
    columns: StructType  # of the rows, as the lake has them
    snapshot: str
    server_started: str  # the server that has the snapshot
    row_filter: str | None = None  # what its publication lets through, as the server prints it


@contextmanager
def reading(connection: Connection, relation_oid: int, snapshot: str) -> Iterator[str]:
    """A read-only transaction under the snapshot with the table locked; gives its quoted name.  Checks at the end."""
    with postgres_errors("reading the source"):
        row = connection.execute(
            "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s",
            [relation_oid],
        ).fetchone()
    if row is None:
        raise TableError(f"There is no table with oid {relation_oid} any more.", remedy="Start pgtide again.")
    name = str(row[0])
    with connection.transaction(), postgres_errors(f"reading {name}"):
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}".encode())
        connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(sql.SQL(name)))
        try:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
        except (psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedObject) as error:
            raise SnapshotGone(f"The snapshot {snapshot} is gone.", remedy="A new one is asked for.") from error
        yield name
        same = connection.execute(
            "SELECT relfilenode = pg_catalog.pg_relation_filenode(oid) FROM pg_catalog.pg_class WHERE oid = %s",
            [relation_oid],
        ).fetchone()
        if same is None or not same[0]:
            raise Rewritten(f"{name} was truncated or rewritten while it was read.", remedy="It is read again.")


def read_range(connection: Connection, table: SourceTable, part: CtidRange) -> Iterator[pa.RecordBatch]:
    """The rows of a range with the lake's columns.  Complete only if the iterator ends without an error."""
    with reading(connection, part.relation_oid, table.snapshot) as name:
        query = _query(table, name, part)
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            for frames in _frames(copy):
                rows = decode_copy(table.shape, frames)
                if rows.num_rows:
                    yield mapped(table.shape, rows, table.columns)


def mapped(shape: TableShape, rows: pa.RecordBatch, schema: StructType) -> pa.RecordBatch:
    """Stored columns as the mirror table has them; columns that the source no longer has are null."""
    wanted = arrow_schema(schema)
    by_name = {column.name: column for column in shape.columns}
    arrays = []
    for field in wanted:
        column = by_name.get(field.name)
        array = pa.nulls(rows.num_rows) if column is None else lake_column(column, column, rows, DEFAULT_POLICY)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _query(table: SourceTable, name: str, part: CtidRange) -> sql.Composed:
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.shape.columns)
    condition = sql.SQL("ctid >= {}").format(sql.Literal(f"({part.first_block},0)"))
    if part.end_block is not None:
        condition += sql.SQL(" AND ctid < {}").format(sql.Literal(f"({part.end_block},0)"))
    if table.row_filter is not None:
        condition += sql.SQL(" AND ({})").format(sql.SQL(table.row_filter))
    return sql.SQL("COPY (SELECT {} FROM ONLY {} WHERE {}) TO STDOUT (FORMAT binary)").format(
        columns,
        sql.SQL(name),
        condition,
    )


def _frames(copy: psycopg.Copy) -> Iterator[Frames]:
    """The server sends one message per row; the file header comes together with the first."""
    messages: list[bytes | memoryview] = []
    length_bytes = 0
    first = True
    for message in copy:
        message = memoryview(message)
        if first:
            message, first = message[_header_bytes(message) :], False
        if len(message) == 0:
            continue
        messages.append(message)
        length_bytes += len(message)
        if len(messages) >= _BATCH_ROWS or length_bytes >= _BATCH_BYTES:
            yield Frames.from_messages(messages)
            messages, length_bytes = [], 0
    if messages:
        yield Frames.from_messages(messages)


def _header_bytes(message: memoryview) -> int:
    if bytes(message[: len(_COPY_SIGNATURE)]) != _COPY_SIGNATURE:
        raise TableError("The server's COPY does not begin as the binary format should.")
    (extension_bytes,) = struct.unpack_from(">i", message, len(_COPY_SIGNATURE) + 4)
    return len(_COPY_SIGNATURE) + 8 + int(extension_bytes)

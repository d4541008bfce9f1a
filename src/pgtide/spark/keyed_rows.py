"""A source table's rows by key, as of a snapshot: one row for each key that is asked for, also if there is none.

Keys travel as text, as Postgres prints them, and the server turns them into its types.  Two keys that its `=` takes for
the same (1.0 and 1.00) may be two in the lake: a row is found only if its key is also printed alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyspark.sql.types import BooleanType, StructField, StructType

from pgtide.replication.connect import Connection
from pgtide.schema import Column, TableShape
from pgtide.sinks.merge import DELETE, PREFIX
from pgtide.snapshot.copy_range import as_copied, check_files, columns_as_named, copied, in_range, leaves_under_snapshot
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.spark.rows import arrow_schema
from pgtide.spark.source_table import SourceTable, mapped
from pgtide.types import PgType

_FOUND = PREFIX + "found"
_KEYS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class KeyType:
    sql: str  # as a cast writes it
    comparable: bool  # with the `=` of pg_catalog: others are not found without a search_path


@dataclass(frozen=True, slots=True)
class KeyedTable:
    """Where to look for keys: in these ranges of the source table; found elsewhere counts as not found."""

    source: SourceTable
    key_types: tuple[KeyType, ...]
    leaves: tuple[int, ...]  # all that the table has
    ranges: tuple[CtidRange, ...]

    @property
    def columns(self) -> StructType:
        """Of the rows that `read_keys` gives: as a sink's `Changes` have them."""
        return StructType([*self.source.columns, StructField(DELETE, BooleanType())])


def key_types(connection: Connection, shape: TableShape) -> tuple[KeyType, ...]:
    # With -1, not NULL: `character` is a single one, `bpchar` any number.
    rows = connection.execute(
        "SELECT a.attnum, format_type(a.atttypid, -1), "
        "       t.typtype = 'e' OR coalesce(b.typnamespace, t.typnamespace) = 'pg_catalog'::regnamespace "
        "FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid "
        "LEFT JOIN pg_catalog.pg_type b ON b.oid = t.typbasetype AND t.typtype = 'd' WHERE a.attrelid = %s",
        [shape.relation_oid],
    ).fetchall()
    types = {attnum: KeyType(name, comparable) for attnum, name, comparable in rows}
    return tuple(types[column.attnum] for column in shape.key_columns)


def read_keys(connection: Connection, table: KeyedTable, keys: pa.Table) -> Iterator[pa.RecordBatch]:
    """For each key, given as text, its row, or one that says that the key is to be deleted."""
    shape = table.source.shape
    oids = sorted({shape.relation_oid, *table.leaves})
    answered = _with_found(shape)
    for begin in range(0, keys.num_rows, _KEYS_AT_ONCE):
        some = [column.to_pylist() for column in keys.slice(begin, _KEYS_AT_ONCE).columns]
        with (
            columns_as_named(connection, shape),
            leaves_under_snapshot(connection, table.source, oids, table.source.limits) as names,
        ):
            check_files(connection, table.ranges)
            query = _query(table, names[shape.relation_oid], some)
            for rows in copied(connection, answered, query):
                yield _changes(table, rows)


def _with_found(shape: TableShape) -> TableShape:
    last = max(column.attnum for column in shape.columns)
    return replace(shape, columns=(*shape.columns, Column(last + 1, _FOUND, PgType(16, "bool"))))


def _changes(table: KeyedTable, rows: pa.RecordBatch) -> pa.RecordBatch:
    shape = table.source.shape
    found = rows.column(_with_found(shape).columns[-1].storage_name)
    values = mapped(shape, rows, table.source.columns)
    return pa.RecordBatch.from_arrays([*values.columns, pc.invert(found)], schema=arrow_schema(table.columns))


def _query(table: KeyedTable, name: str, keys: Sequence[list[str]]) -> sql.Composed:
    shape = table.source.shape
    places = {column.attnum: sql.Identifier(f"k{place}") for place, column in enumerate(shape.key_columns)}
    wanted = sql.SQL(", ").join(
        sql.SQL("{}::{} AS {}").format(place, sql.SQL(key_type.sql), place)
        for place, key_type in zip(places.values(), table.key_types, strict=True)
    )
    given = sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(column)) for column in keys)
    same = sql.SQL(" AND ").join(
        sql.SQL(
            "t.{0} = w.{1} AND t.{0}::text = w.{1}::text" if key_type.comparable else "t.{0}::text = w.{1}::text"
        ).format(sql.Identifier(column.name), places[column.attnum])
        for column, key_type in zip(shape.key_columns, table.key_types, strict=True)
    )
    values = sql.SQL(", ").join(
        as_copied(
            column,
            sql.SQL("w.{}").format(places[column.attnum])
            if column.key
            else sql.SQL("t.{}").format(sql.Identifier(column.name)),
        )
        for column in shape.columns
    )
    condition = _in_ranges(table.ranges)
    if table.source.row_filter is not None:
        condition += sql.SQL(" AND ({})").format(sql.SQL(table.source.row_filter))
    return sql.SQL(
        "COPY (SELECT {values}, t.{found} IS NOT NULL "
        "FROM (SELECT {wanted} FROM ROWS FROM ({unnested}) AS u({aliases})) w "
        "LEFT JOIN (SELECT *, true AS {found} FROM {only} {name} WHERE {condition}) t ON {same}) "
        "TO STDOUT (FORMAT binary)"
    ).format(
        values=values,
        found=sql.Identifier(_FOUND),
        wanted=wanted,
        unnested=sql.SQL("unnest({})").format(given),
        aliases=sql.SQL(", ").join(places.values()),
        only=sql.SQL("ONLY" if table.leaves == (shape.relation_oid,) else ""),
        name=sql.SQL(name),
        condition=condition,
        same=same,
    )  # fmt: skip


def _in_ranges(ranges: Sequence[CtidRange]) -> sql.Composed:
    whole = sorted({part.relation_oid for part in ranges if part.whole})
    conditions = [sql.SQL("tableoid = ANY ({}::oid[])").format(sql.Literal("{" + ",".join(map(str, whole)) + "}"))]
    for part in ranges:
        if not part.whole:
            condition = sql.SQL("tableoid = {} AND {}").format(sql.Literal(part.relation_oid), in_range(part))
            conditions.append(sql.SQL("({})").format(condition))
    return sql.SQL("({})").format(sql.SQL(" OR ").join(conditions))

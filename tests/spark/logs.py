"""Logs written by hand: changes of any kind, and a plain model of the tables that they leave behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from pgtide.change import TRANSACTIONS, Committed, OldImage, Op, TableRows, TransactionKind
from pgtide.log.identity import LogIdentity, create_identity
from pgtide.log.writer import SEGMENT_BYTES, LogWriter
from pgtide.schema import Column, TableShape, storage_schema
from pgtide.types import PgType

INT8 = PgType(20, "int8")
INT4 = PgType(23, "int4")
TEXT = PgType(25, "text")

Row = dict[str, Any]

START_LSN = 100
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


def table_shape(name: str = "orders", oid: int = 16384, key: Sequence[str] = ("id",)) -> TableShape:
    columns = [("id", INT8), ("region", TEXT), ("amount", INT4), ("body", TEXT)]
    return TableShape(
        oid, "public", name, "d",
        tuple(Column(number, column, of, key=column in key) for number, (column, of) in enumerate(columns, 1)),
    )  # fmt: skip


@dataclass(frozen=True)
class Change:
    shape: TableShape
    op: Op
    row: Row = field(default_factory=dict)
    old_key: Row | None = None
    unchanged: tuple[str, ...] = ()
    old_row: Row | None = None  # as REPLICA IDENTITY FULL sends it


def insert(shape: TableShape, **row: Any) -> Change:
    return Change(shape, Op.INSERT, row)


def update(shape: TableShape, old_key: Row | None = None, unchanged: Iterable[str] = (), **row: Any) -> Change:
    return Change(shape, Op.UPDATE, row, old_key, tuple(unchanged))


def delete(shape: TableShape, **key: Any) -> Change:
    return Change(shape, Op.DELETE, key)


def full_update(shape: TableShape, old: Row, **row: Any) -> Change:
    """An update under REPLICA IDENTITY FULL."""
    return Change(shape, Op.UPDATE, row, old_row=old)


def full_delete(shape: TableShape, **row: Any) -> Change:
    """A delete under REPLICA IDENTITY FULL."""
    return Change(shape, Op.DELETE, row, old_row=row)


def truncate(shape: TableShape) -> Change:
    return Change(shape, Op.TRUNCATE)


class WrittenLog:
    """A log in a folder, with a writer that takes one transaction at a time."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self.identity = create_identity(path, LogIdentity("7000", "shop", 1, "pgtide", start_lsn=START_LSN))
        self.writer = LogWriter(path, segment_bytes=segment_bytes)
        self._lsn = itertools.count(START_LSN + 100, 100)

    def commit(self, *changes: Change) -> int:
        """Appends one transaction; returns the log's end."""
        self.writer.write([committed(changes, next(self._lsn))])
        return self.writer.end_offset


def committed(changes: Sequence[Change], end_lsn: int) -> Committed:
    tables = []
    for shape in dict.fromkeys(change.shape for change in changes):
        mine = [(place, change) for place, change in enumerate(changes) if change.shape == shape]
        tables.append(TableRows(shape, stored(shape, mine)))
    entry = {
        "kind": int(TransactionKind.COMMIT),
        "xid": end_lsn,
        "commit_lsn": end_lsn - 8,
        "end_lsn": end_lsn,
        "commit_timestamp": int(BEGINNING.timestamp()) * 1_000_000 + end_lsn,
        "first_offset": 0,
        "end_offset": 0,
        "changes": len(changes),
        "ends": True,
        "origin": None,
        "extra": None,
    }
    return Committed(pa.RecordBatch.from_pylist([entry], schema=TRANSACTIONS), tuple(tables))


def stored(shape: TableShape, placed: Sequence[tuple[int, Change]]) -> pa.RecordBatch:
    """Changes of one table as the log stores them."""
    full = any(change.old_row is not None for _, change in placed)
    with_old = full or any(change.old_key is not None or change.op == Op.DELETE for _, change in placed)
    with_unchanged = any(change.unchanged for _, change in placed)
    old_columns = shape.columns if full else shape.key_columns
    schema = storage_schema(shape, unchanged=with_unchanged, old=old_columns if with_old else None)
    rows = []
    for place, change in placed:
        row: Row = {"_op": int(change.op), "_place": place, "_txn": 0}
        row |= {column.storage_name: change.row.get(column.name) for column in shape.columns}
        if with_unchanged:
            bits = sum(1 << i for i, column in enumerate(shape.columns) if column.name in change.unchanged)
            row["_unchanged"] = bits.to_bytes(shape.unchanged_width_bytes, "little")
        if with_old:
            row["_old"] = int(_old_image(change))
            old = change.old_row if change.old_row is not None and change.op == Op.UPDATE else change.old_key or {}
            row |= {f"_old.{column.storage_name}": old.get(column.name) for column in old_columns}
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def _old_image(change: Change) -> OldImage:
    if change.old_row is not None:
        return OldImage.FULL
    return OldImage.KEY if change.old_key is not None or change.op == Op.DELETE else OldImage.NONE


def offset_rows(shape: TableShape, changes: Sequence[Change]) -> pa.RecordBatch:
    """The same as a reader of the log gives them."""
    return stored(shape, list(enumerate(changes)))


def model(shape: TableShape, changes: Iterable[Change], before: Iterable[Row] = ()) -> dict[tuple[Any, ...], Row]:
    """The table after the changes, worked out one by one."""
    names = [column.name for column in shape.columns]
    keys = [column.name for column in shape.key_columns]

    def key_of(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in keys)

    table = {key_of(row): dict(row) for row in before}
    for change in changes:
        if change.op == Op.TRUNCATE:
            table.clear()
        elif change.op == Op.DELETE:
            table.pop(key_of(change.row), None)
        else:
            row = {name: change.row.get(name) for name in names}
            was = table.pop(key_of(change.old_key), None) if change.old_key else table.get(key_of(change.row))
            for name in change.unchanged:
                assert was is not None
                row[name] = was[name]
            table[key_of(row)] = row
    return table

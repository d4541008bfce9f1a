"""Tables as the redo log describes them, and their values as the log of changes stores them.

A DDL record has the table's number, owner, name and columns; from then on its rows have these.  The dictionary is part
of the read position: the file with the description may be gone long before the table's last change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from pgtide.change import OldImage, Op, TableRows
from pgtide.errors import DecodeError
from pgtide.redo.records import Operation, Record, Values
from pgtide.schema import Column, TableShape, storage_schema
from pgtide.types import PgType, storage_type

_NUMBER = re.compile(r"NUMBER(?:\((\d+)(?:,\s*(\d+))?\))?")
_LONG_DIGITS = 18  # that many fit into 64 bits
_NAMED = {
    "VARCHAR2": PgType(25, "text"),
    "NVARCHAR2": PgType(25, "text"),
    "CHAR": PgType(25, "text"),
    "CLOB": PgType(25, "text"),
    "RAW": PgType(17, "bytea"),
    "BLOB": PgType(17, "bytea"),
    "DATE": PgType(1114, "timestamp"),  # Oracle's dates have a time
    "TIMESTAMP": PgType(1114, "timestamp"),
    "BINARY_DOUBLE": PgType(701, "float8"),
}
_OPS = {Operation.INSERT: Op.INSERT, Operation.UPDATE: Op.UPDATE, Operation.DELETE: Op.DELETE}


def type_of(declared: str) -> PgType:
    """Oracle's type as the log of changes has it; an unknown one is text."""
    if match := _NUMBER.fullmatch(declared):
        precision, scale = int(match[1] or 0), int(match[2] or 0)
        if not precision:
            return PgType(1700, "numeric")
        if precision <= _LONG_DIGITS and not scale:
            return PgType(20, "int8")
        return PgType(1700, "numeric", typmod=(precision << 16 | scale) + 4)
    return _NAMED.get(declared.partition("(")[0], PgType(25, "text"))


def shape_of(table: dict[str, Any]) -> TableShape:
    """The shape that a DDL record describes."""
    columns = tuple(
        Column(column["id"], column["name"], type_of(column["type"]), bool(column.get("key")))
        for column in table["columns"]
    )
    return TableShape(table["data_obj"], table["owner"], table["name"], "f", columns)


@dataclass(frozen=True, slots=True)
class Change:
    """A record of a row, with the shape that its table had then."""

    shape: TableShape
    record: Record


def rows_of(changes: Sequence[Change], first_place: int) -> list[TableRows]:
    """The changes as columns, at consecutive places."""
    by_shape: dict[TableShape, list[tuple[int, Record]]] = {}
    for place, change in enumerate(changes, first_place):
        by_shape.setdefault(change.shape, []).append((place, change.record))
    return [_table(shape, placed) for shape, placed in by_shape.items()]


def _table(shape: TableShape, placed: list[tuple[int, Record]]) -> TableRows:
    """New rows in `c<n>`, those that went too; the old image of updates in `_old.c<n>`."""
    records = [record for _, record in placed]
    shown = [record.old if record.operation is Operation.DELETE else record.new for record in records]
    before = [record.old if record.operation is Operation.UPDATE else None for record in records]
    images = [OldImage.NONE if record.old is None else OldImage.FULL for record in records]
    columns = [
        pa.array([int(_OPS[record.operation]) for record in records], pa.uint8()),
        pa.array([place for place, _ in placed], pa.int64()),
        pa.array(np.zeros(len(placed), np.uint32)),
        pa.array([int(image) for image in images], pa.uint8()),
        *(_column(shape, column, shown) for column in shape.columns),
        *(_column(shape, column, before) for column in shape.columns),
    ]
    return TableRows(shape, pa.RecordBatch.from_arrays(columns, schema=storage_schema(shape, old=shape.columns)))


def _column(shape: TableShape, column: Column, rows: Sequence[Values | None]) -> pa.Array:
    stored = storage_type(column.type)
    read = str if stored == pa.string() else _READ[column.type.name]
    try:
        values = [None if row is None or row.get(column.name) is None else read(row[column.name]) for row in rows]
        return pa.array(values, stored)
    except (ValueError, TypeError, ArithmeticError, pa.ArrowInvalid) as error:
        raise DecodeError(f"{shape.qualified_name}, column {column.name}: a value cannot be read: {error}") from error


def _numeric(value: object) -> Any:
    return Decimal(str(value))


_READ: dict[str, Callable[[Any], Any]] = {
    "int8": int,
    "float8": float,
    "numeric": _numeric,
    "bytea": bytes.fromhex,
    "timestamp": datetime.fromisoformat,
}

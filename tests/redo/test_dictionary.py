"""Oracle's types in the log: every value comes through, and null stays null."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from pgtide.change import OldImage, Op
from pgtide.redo.dictionary import Change, rows_of, shape_of, type_of
from pgtide.redo.records import Operation, Record


@pytest.mark.parametrize(
    ("declared", "in_json", "stored"),
    [
        ("NUMBER(10)", 1234567890, 1234567890),
        ("NUMBER(18,0)", -(10**18) + 1, -(10**18) + 1),
        ("NUMBER(19)", "9999999999999999999", Decimal("9999999999999999999")),
        ("NUMBER(12,2)", "-1234.50", Decimal("-1234.50")),
        ("NUMBER(12, 2)", 7, Decimal("7.00")),
        ("NUMBER", "1e-30", "1e-30"),
        ("NUMBER(39,1)", "1.5", "1.5"),
        ("VARCHAR2(10)", "é", "é"),
        ("CLOB", "", ""),
        ("RAW(4)", "00ff", b"\x00\xff"),
        ("DATE", "2024-02-29T12:00:01", datetime(2024, 2, 29, 12, 0, 1)),
        ("TIMESTAMP(6)", "2024-02-29T12:00:01.000001", datetime(2024, 2, 29, 12, 0, 1, 1)),
        ("BINARY_DOUBLE", 1.5, 1.5),
        ("SDO_GEOMETRY", "POINT (1 2)", "POINT (1 2)"),
    ],
)
def test_a_value_of_each_type_is_stored(declared: str, in_json: Any, stored: Any) -> None:
    shape = shape_of(
        {"data_obj": 1, "owner": "S", "name": "T", "columns": [{"id": 1, "name": "V", "type": declared, "key": True}]}
    )
    records = [Record(1, Operation.INSERT, "01", new={"V": value}) for value in (in_json, None)]
    (table,) = rows_of([Change(shape, record) for record in records], first_place=5)
    assert table.rows["c1"].to_pylist() == [stored, None]
    assert table.rows["_place"].to_pylist() == [5, 6]
    assert shape.columns[0].type == type_of(declared)


def test_old_rows_are_where_readers_look_for_them() -> None:
    shape = shape_of(
        {"data_obj": 1, "owner": "S", "name": "T", "columns": [{"id": 3, "name": "V", "type": "NUMBER(1)"}]}
    )
    records = [
        Record(1, Operation.INSERT, "01", new={"V": 1}),
        Record(1, Operation.UPDATE, "01", new={"V": 2}, old={"V": 1}),
        Record(1, Operation.DELETE, "01", old={"V": 2}),
    ]
    (table,) = rows_of([Change(shape, record) for record in records], first_place=0)
    assert table.rows["_op"].to_pylist() == [Op.INSERT, Op.UPDATE, Op.DELETE]
    assert table.rows["c3"].to_pylist() == [1, 2, 2]
    assert table.rows["_old.c3"].to_pylist() == [None, 1, None]
    assert table.rows["_old"].to_pylist() == [OldImage.NONE, OldImage.FULL, OldImage.FULL]

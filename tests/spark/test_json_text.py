"""JSON text made a column at a time says what Python's own writer would say."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pgtide.spark.json_text import json_objects, json_values

COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), st.text()),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.decimal128(20, 6), st.decimals(-(10**13), 10**13, places=6)),
    (pa.binary(), st.binary()),
    (pa.list_(pa.string()), st.lists(st.none() | st.text())),
    (
        pa.struct([("x", pa.int32()), ("y", pa.float64())]),
        st.fixed_dictionaries({"x": st.integers(0, 9), "y": st.floats()}),
    ),
]


def expected(value: Any) -> Any:
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case list():
            return [expected(part) for part in value]
        case dict():
            return {name: expected(part) for name, part in value.items()}
        case _:
            return value


@given(st.data())
def test_any_row_is_parsed_back_to_its_values(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    columns = [data.draw(st.lists(st.none() | values, min_size=count, max_size=count)) for _, values in COLUMNS]
    names = data.draw(st.lists(st.text(), min_size=len(COLUMNS), max_size=len(COLUMNS), unique=True))
    absent = [data.draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count)) for _ in COLUMNS]
    objects = json_objects(
        names,
        [pa.array(values, kind) for values, (kind, _) in zip(columns, COLUMNS, strict=True)],
        [None if flags is None else np.array(flags) for flags in absent],
    )
    for row, text in enumerate(objects.to_pylist()):
        wanted = {
            name: expected(values[row])
            for name, values, flags in zip(names, columns, absent, strict=True)
            if flags is None or not flags[row]
        }
        found = json.loads(text, parse_float=Decimal)
        for name, value in wanted.items():
            assert _same(found[name], value)
        assert found.keys() == wanted.keys()


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, float):
        return float(found) == value
    if isinstance(value, dict):
        return all(_same(found[name], part) for name, part in value.items())
    return bool(found == value)


def test_dates_and_times_are_as_iso_8601_prints_them() -> None:
    moment = datetime(2026, 1, 31, 8, 0, 1, 5, UTC)
    assert json_values(pa.array([moment, None], pa.timestamp("us", "UTC"))).to_pylist() == [
        '"2026-01-31T08:00:01.000005Z"',
        "null",
    ]
    assert json_values(pa.array([moment.replace(tzinfo=None)], pa.timestamp("us"))).to_pylist() == [
        '"2026-01-31T08:00:01.000005"'
    ]
    assert json_values(pa.array([date(1, 2, 3)])).to_pylist() == ['"0001-02-03"']


def test_a_decimal_inside_a_list_keeps_its_digits() -> None:
    values = pa.array([[Decimal("12345678901234567890.123456")]], pa.list_(pa.decimal128(38, 6)))
    assert json_values(values).to_pylist() == ["[12345678901234567890.123456]"]


def test_a_map_is_an_object() -> None:
    assert json_values(pa.array([[("a", "1"), ("b", None)]], pa.map_(pa.string(), pa.string()))).to_pylist() == [
        '{"a":"1","b":null}'
    ]


def test_maps_are_objects_also_when_they_are_empty_and_wherever_they_are() -> None:
    tags = pa.map_(pa.string(), pa.string())
    whole = pa.array([[("a", "1"), ("b", None)], [], None], tags)
    assert json_values(whole).to_pylist() == ['{"a":"1","b":null}', "{}", "null"]
    in_a_list = pa.array([[[("a", "1")], [], None], []], pa.list_(tags))
    assert json_values(in_a_list).to_pylist() == ['[{"a":"1"},{},null]', "[]"]
    in_a_struct = pa.array(
        [{"tags": [], "numbers": []}], pa.struct([("tags", tags), ("numbers", pa.list_(pa.int32()))])
    )
    assert json_values(in_a_struct).to_pylist() == ['{"tags":{},"numbers":[]}']

"""Arrow columns as JSON text, a column at a time: a row is an object, and never a Python one.

Numbers are JSON numbers (decimals exact), NaN and infinities strings, binary values base64, dates and timestamps as ISO
8601 prints them.  Only binary and nested values are turned one by one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_SHORT_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_CONTROL_CHARACTERS = [chr(code) for code in range(32)]


def json_objects(
    names: Sequence[str], columns: Sequence[pa.Array], absent: Sequence[npt.NDArray[np.bool_] | None]
) -> pa.Array:
    """One object per row; a column is left out of the rows that its `absent` names."""
    if not columns:
        raise ValueError("an object needs at least one column")
    members = []
    for name, column, left_out in zip(names, columns, absent, strict=True):
        member = _joined(f"{json.dumps(name, ensure_ascii=False)}:", json_values(column))
        members.append(member if left_out is None else pc.if_else(pa.array(left_out), None, member))
    inner = pc.binary_join_element_wise(*members, ",", null_handling="skip")
    return _joined("{", inner, "}")


def json_values(array: pa.Array) -> pa.Array:
    """Each value as JSON; `null` for null."""
    return pc.fill_null(_values(array), "null")


def _values(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_boolean(kind):
        return pc.if_else(array, "true", "false")
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return array.cast(pa.string())
    if pa.types.is_floating(kind):
        return _floats(array)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _joined('"', _escaped(array.cast(pa.string())), '"')
    if pa.types.is_date(kind):
        return _joined('"', array.cast(pa.string()), '"')
    if pa.types.is_timestamp(kind):
        return _joined('"', pc.replace_substring(array.cast(pa.string()), " ", "T"), '"')
    texts = [None if value is None else _text(value, kind) for value in array.to_pylist()]
    return pa.array(texts, pa.string())


def _floats(array: pa.Array) -> pa.Array:
    """JSON has no NaN and no infinities: they are strings."""
    text = array.cast(pa.string())
    finite = pc.is_finite(array)
    if pc.all(finite).as_py() is not False:
        return text
    named = pc.if_else(pc.is_nan(array), '"NaN"', pc.if_else(pc.greater(array, 0), '"Infinity"', '"-Infinity"'))
    return pc.if_else(finite, text, named)


def _escaped(text: pa.Array) -> pa.Array:
    text = pc.replace_substring(text, "\\", "\\\\")
    text = pc.replace_substring(text, '"', '\\"')
    if pc.any(pc.match_substring_regex(text, r"[\x00-\x1f]")).as_py():
        for character in _CONTROL_CHARACTERS:
            text = pc.replace_substring(text, character, _SHORT_ESCAPES.get(character, f"\\u{ord(character):04x}"))
    return text


def _joined(*parts: str | pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def _text(value: Any, kind: pa.DataType) -> str:
    """A nested value, part by part: `json` alone would round decimals to floats."""
    match value:
        case dict():
            return _object((name, part, kind.field(name).type) for name, part in value.items())
        case list() if pa.types.is_map(kind):
            return _object((name, part, kind.item_type) for name, part in value)
        case list():
            return f"[{','.join(_text(part, kind.value_type) for part in value)}]"
        case bytes():
            return f'"{base64.b64encode(value).decode()}"'
        case Decimal():
            return f"{value:f}"
        case float() if math.isnan(value) or math.isinf(value):
            return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'
        case datetime() | date():
            return f'"{value.isoformat()}"'
        case _:
            return json.dumps(value, ensure_ascii=False)


def _object(items: Iterable[tuple[Any, Any, pa.DataType]]) -> str:
    members = (f"{json.dumps(str(name), ensure_ascii=False)}:{_text(part, kind)}" for name, part, kind in items)
    return f"{{{','.join(members)}}}"

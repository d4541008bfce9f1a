"""One stored value as Postgres prints it: the way back from the log's types to text."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from pgtide.types.literals import (
    RangeLiteral,
    float4,
    float8,
    format_array,
    format_composite,
    format_hstore,
    format_range,
)
from pgtide.types.pg_type import PgType, array_delimiter, part_of


def stored_text(pg_type: PgType, value: Any) -> str:
    """`value` as pyarrow gives it for the type's storage type; never None."""
    match pg_type.kind:
        case "domain":
            return stored_text(part_of(pg_type), value)
        case "enum":
            return str(value)
        case "array":
            return _array(pg_type, value)
        case "composite":
            return format_composite([_maybe(field, value[name]) for name, field in pg_type.fields])
        case "range":
            return _range(part_of(pg_type), value)
        case "multirange":
            return "{" + ",".join(stored_text(part_of(pg_type), each) for each in value) + "}"
    return _base(pg_type.name, value)


def _maybe(pg_type: PgType, value: Any) -> str | None:
    return None if value is None else stored_text(pg_type, value)


def _array(pg_type: PgType, value: list[Any]) -> str:
    element = part_of(pg_type)
    sizes, flat = _sizes(value, max(pg_type.dimensions, 1)), value
    for _ in sizes[1:]:
        flat = [each for inner in flat for each in inner]
    elements = [_maybe(element, each) for each in flat]
    lowers = [1] * len(sizes)
    return format_array(sizes if elements else (), lowers, elements, array_delimiter(element))


def _sizes(value: list[Any], dimensions: int) -> list[int]:
    """Of a rectangular nested list."""
    sizes = [len(value)]
    while len(sizes) < dimensions:
        value = value[0] if value else []
        sizes.append(len(value))
    return sizes


def _range(bound: PgType, value: dict[str, Any]) -> str:
    lower, upper = _maybe(bound, value["lower"]), _maybe(bound, value["upper"])
    literal = RangeLiteral(lower, upper, value["lower_inclusive"], value["upper_inclusive"], value["empty"])
    return format_range(literal)


def _base(name: str, value: Any) -> str:
    match name:
        case "bool":
            return "t" if value else "f"
        case "float4":
            return float4(value)
        case "float8":
            return float8(value)
        case "numeric":
            return value if isinstance(value, str) else f"{value:f}"
        case "money":
            return f"{'-' if value < 0 else ''}${abs(value):,.2f}"
        case "bytea":
            return f"\\x{value.hex()}"
        case "geometry" | "geography":
            return str(value.hex().upper())
        case "uuid":
            return str(uuid.UUID(bytes=value))
        case "date":
            return str(value.isoformat())
        case "timestamp":
            return _timestamp(value)
        case "timestamptz":
            return f"{_timestamp(value.astimezone(UTC).replace(tzinfo=None))}+00"
        case "time":
            return _time(value)
        case "hstore":
            return format_hstore(value)
        case "vector" | "halfvec":
            return "[" + ",".join(float4(number) for number in value) + "]"
    return str(value)


def _timestamp(value: datetime) -> str:
    text = value.isoformat(" ", "microseconds")
    return text.rstrip("0").rstrip(".")


def _time(micros: int) -> str:
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{fraction:06d}"
    return text.rstrip("0").rstrip(".")

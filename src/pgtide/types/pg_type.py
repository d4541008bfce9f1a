"""Postgres types, resolved, and what each becomes in the log's Arrow columns.

`PgType` is a type as a column uses it: with its modifier, and down to elements, fields and base types.
`storage_type` keeps every value or leaves a null beside which `_text.c<n>` has the exact text (NaN in a
decimal, infinite dates, an array with other dimensions): policies apply when reading, not for ever at capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

Kind = Literal["base", "enum", "domain", "array", "composite", "range", "multirange"]


@dataclass(frozen=True, slots=True)
class PgType:
    oid: int
    name: str  # as pg_type.typname says; the schema is not part of it
    kind: Kind = "base"
    typmod: int = -1
    element: PgType | None = None  # array: element; domain: base type; range: subtype; multirange: range
    dimensions: int = 1  # array: nesting, from pg_attribute.attndims
    fields: tuple[tuple[str, PgType], ...] = ()  # composite: names and types, dropped ones left out

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"oid": self.oid, "name": self.name, "kind": self.kind, "typmod": self.typmod}
        if self.element is not None:
            data["element"] = self.element.to_json()
        if self.kind == "array":
            data["dimensions"] = self.dimensions
        if self.fields:
            data["fields"] = [[name, field.to_json()] for name, field in self.fields]
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> PgType:
        return PgType(
            data["oid"],
            data["name"],
            data["kind"],
            data["typmod"],
            PgType.from_json(data["element"]) if "element" in data else None,
            data.get("dimensions", 1),
            tuple((name, PgType.from_json(field)) for name, field in data.get("fields", ())),
        )


# Base types by pg_type.typname.  All that are named nowhere here are stored as text.
TEXT_TYPES = ("text", "varchar", "bpchar", "name", "xml", "citext", "json", "refcursor")
VERSIONED_TEXT_TYPES = ("jsonb", "jsonpath", "ltree", "lquery", "ltxtquery")  # a version byte before it in binary form
OID_TYPES = (
    "oid", "regclass", "regcollation", "regconfig", "regdictionary", "regnamespace", "regoper", "regoperator",
    "regproc", "regprocedure", "regrole", "regtype",
)  # fmt: skip
# Types without a send function: text even in a binary stream; inside of arrays and composites they stop it.
NO_BINARY_OUTPUT = (
    "aclitem", "gtsvector", "seg", "query_int", "ean13", "isbn", "isbn13", "ismn", "ismn13", "issn", "issn13", "upc",
)  # fmt: skip

_FIXED: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    **dict.fromkeys(OID_TYPES, pa.int64()),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "time": pa.int64(),  # microseconds since midnight: 24:00:00 is a time in Postgres, and none in Arrow
    "uuid": pa.binary(16),
    "money": pa.decimal128(19, 2),
    "hstore": pa.map_(pa.string(), pa.string()),
    "vector": pa.list_(pa.float32()),
    "halfvec": pa.list_(pa.float32()),
    "geometry": pa.binary(),
    "geography": pa.binary(),
}


def decimal_precision_scale(typmod: int) -> tuple[int, int] | None:
    """Precision and scale of the decimal that holds every numeric with this modifier; None if none does.

    Since Postgres 15 the scale may be negative or larger than the precision.
    """
    if typmod < 4:
        return None
    precision = (typmod - 4) >> 16 & 0xFFFF
    scale = ((typmod - 4 & 0x7FF) ^ 1024) - 1024
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return (precision, scale) if precision <= 38 else None


def storage_type(pg_type: PgType) -> pa.DataType:
    """The Arrow type that a column of this type has in the log."""
    match pg_type.kind:
        case "base":
            if pg_type.name == "numeric":
                decimal = decimal_precision_scale(pg_type.typmod)
                return pa.decimal128(*decimal) if decimal else pa.string()
            return _FIXED.get(pg_type.name, pa.string())
        case "enum":
            return pa.string()
        case "domain":
            return storage_type(part_of(pg_type))
        case "array":
            return nested_list(storage_type(part_of(pg_type)), pg_type.dimensions)
        case "composite":
            return pa.struct([pa.field(name, storage_type(field)) for name, field in pg_type.fields])
        case "range":
            return range_struct(storage_type(part_of(pg_type)))
        case "multirange":
            return pa.list_(storage_type(part_of(pg_type)))


def part_of(pg_type: PgType) -> PgType:
    """The element, base type, subtype or range that the type is made of."""
    assert pg_type.element is not None, f"the type {pg_type.name} was not resolved"
    return pg_type.element


# pg_type.typdelim, where it is no comma; PostGIS chose another for its types.
_ARRAY_DELIMITERS = {"box": ";", "geometry": ":", "geography": ":"}


def array_delimiter(element: PgType) -> str:
    """What stands between the elements of an array's text; a domain has its base type's."""
    while element.kind == "domain":
        element = part_of(element)
    return _ARRAY_DELIMITERS.get(element.name, ",") if element.kind == "base" else ","


def nested_list(element: pa.DataType, dimensions: int) -> pa.DataType:
    for _ in range(max(dimensions, 1)):  # a column of a domain over an array may have 0 in pg_attribute.attndims
        element = pa.list_(element)
    return element


def range_struct(bound: pa.DataType) -> pa.DataType:
    """An infinite bound is null, and so are both bounds of an empty range."""
    return pa.struct(
        [
            pa.field("lower", bound),
            pa.field("upper", bound),
            pa.field("lower_inclusive", pa.bool_()),
            pa.field("upper_inclusive", pa.bool_()),
            pa.field("empty", pa.bool_()),
        ]
    )

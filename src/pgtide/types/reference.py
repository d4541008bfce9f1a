"""The page `docs/reference/types.md`, made from the mapping itself: `python -m pgtide.types.reference > FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyarrow as pa

from pgtide.types.lake import lake_type
from pgtide.types.pg_type import NO_BINARY_OUTPUT, OID_TYPES, PgType, storage_type
from pgtide.types.policy import TypePolicy

_TEXT, _INT4, _DATE = PgType(25, "text"), PgType(23, "int4"), PgType(1082, "date")
_NUMERIC, _MONEY = PgType(1700, "numeric"), PgType(790, "money")
_INT4RANGE = PgType(3904, "int4range", "range", element=_INT4)


def _decimal(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", typmod=(precision << 16 | scale) + 4)


# What the page shows: as a user writes the type, the type, and what there is to say about it.
_ROWS: tuple[tuple[str, PgType, str], ...] = (
    ("smallint", PgType(21, "int2"), ""),
    ("integer", _INT4, ""),
    ("bigint", PgType(20, "int8"), ""),
    ("real", PgType(700, "float4"), "NaN and ±Infinity are kept"),
    ("double precision", PgType(701, "float8"), "NaN and ±Infinity are kept"),
    ("numeric(12,2)", _decimal(12, 2), "up to 38 digits; NaN by `decimals`"),
    ("numeric(50,2)", _decimal(50, 2), "more than 38 digits: exact text, or by `decimals`"),
    ("numeric", _NUMERIC, "no fixed scale: exact text, or by `decimals`"),
    ("money", _MONEY, "two decimals, whatever lc_monetary says"),
    ("boolean", PgType(16, "bool"), ""),
    ("text, varchar(n), char(n), name, citext, xml", _TEXT, "char(n) with its padding"),
    ('"char"', PgType(18, "char"), ""),
    ("bytea", PgType(17, "bytea"), ""),
    ("date", _DATE, "outside of the years 1 to 9999 by `infinity`"),
    ("timestamp", PgType(1114, "timestamp"), "outside of the years 1 to 9999 by `infinity`"),
    ("timestamptz", PgType(1184, "timestamptz"), "outside of the years 1 to 9999 by `infinity`"),
    ("time", PgType(1083, "time"), "by `times`; 24:00:00 included"),
    ("timetz", PgType(1266, "timetz"), "by `times`; as microseconds: since midnight in UTC"),
    ("interval", PgType(1186, "interval"), "ISO 8601; by `times`; as microseconds: months have 30 days"),
    ("uuid", PgType(2950, "uuid"), ""),
    ("json, jsonb", PgType(3802, "jsonb"), "by `json`"),
    ("jsonpath", PgType(4072, "jsonpath"), "as Postgres prints it"),
    ("enum", PgType(16384, "mood", "enum"), "its label"),
    ("domain over integer", PgType(16385, "positive", "domain", element=_INT4), "as its base type"),
    ("integer[]", PgType(1007, "_int4", "array", element=_INT4), "other dimensions or lower bounds by `arrays`"),
    ("integer[][]", PgType(1007, "_int4", "array", element=_INT4, dimensions=2), "nested as declared"),
    (
        "composite (a text, b date)",
        PgType(16386, "pair", "composite", fields=(("a", _TEXT), ("b", _DATE))),
        "",
    ),
    ("int4range and all ranges", _INT4RANGE, "an infinite bound is null"),
    ("int4multirange and all multiranges", PgType(4451, "int4multirange", "multirange", element=_INT4RANGE), ""),
    ("inet, cidr, macaddr, macaddr8", PgType(869, "inet"), "as Postgres prints it"),
    ("bit(n), varbit", PgType(1562, "varbit"), "as Postgres prints it"),
    ("point, line, lseg, box, path, polygon, circle", PgType(600, "point"), "as Postgres prints it"),
    ("tsvector, tsquery", PgType(3614, "tsvector"), "as Postgres prints it"),
    (", ".join(OID_TYPES), PgType(26, "oid"), "the number; in a text stream names (regclass …) are null, counted"),
    ("pg_lsn, xid, cid, xid8, tid, pg_snapshot", PgType(3220, "pg_lsn"), "as Postgres prints it"),
    ("hstore", PgType(16387, "hstore"), ""),
    ("ltree, lquery, ltxtquery, cube", PgType(16388, "ltree"), "as Postgres prints it"),
    ("vector, halfvec (pgvector)", PgType(16389, "vector"), ""),
    ("sparsevec (pgvector)", PgType(16390, "sparsevec"), "as Postgres prints it"),
    ("geometry, geography (PostGIS)", PgType(16391, "geometry"), "EWKB"),
    (
        ", ".join(NO_BINARY_OUTPUT),
        PgType(16392, "seg"),
        "text; inside of arrays or composites the stream must be in text form",
    ),
    ("anything else", PgType(16393, "anything"), "as Postgres prints it; the stream must be in text form"),
)

_HEAD = """# Types

What a column becomes in the change log and in Spark. This page is made from the code:
`python -m pgtide.types.reference`.

The log keeps every value: where its type cannot hold one (NaN in a decimal, an infinite date, an array of other
dimensions than declared) the value is null and its exact text is kept beside it. Policies apply when reading. A value
that a policy alters is counted and reported.

| Postgres | in the log | in Spark | |
|---|---|---|---|
"""

_OPTIONS_HEAD = """
## Policies

| option | values (the first is the default) | what it decides |
|---|---|---|
"""

_OPTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "decimals",
        "`null`, `string`, `decimal(p,s)`",
        "NaN: null, or all numerics as text; with `decimal(p,s)` numerics without a fixed scale are rounded to that",
    ),
    (
        "infinity",
        "`clamp`, `null`, `string`",
        "dates and timestamps outside of the years 1 to 9999: the nearest in range, null, or the whole column as text",
    ),
    ("json", "`string`, `variant`", "whether Spark parses json and jsonb"),
    ("times", "`string`, `micros`", "time, timetz and interval as ISO text or as microseconds"),
    (
        "arrays",
        "`null`, `string`",
        "arrays of other dimensions or lower bounds than declared: null, or all arrays as text",
    ),
)


_KEYS = """
## Keys

A mirror finds rows again by their key as Spark has it. Arrays, ranges and composites can be keys, and are compared as
a whole. What cannot be found again is refused, by the first load and by changes: the table is parked, with what to do,
and the others go on.

- A value that the type cannot hold (`infinity`, a year before 1 or after 9999, NaN in a decimal, an array of other
  dimensions than declared), also inside of an array, a range or a composite. Two such keys could become one. Correct
  the row, or choose another key (`REPLICA IDENTITY USING INDEX`). In a range leave the bound out instead:
  `[2026-01-01,)`.
- Keys of hstore, or with one inside: Spark does not compare maps. Choose another key.

A table that is being loaded is then tried again by itself. One that had met such a key in its changes is loaded anew:
`pgtide snapshot start TABLE --type bulk`.
"""


def spark_name(data_type: pa.DataType) -> str:
    """What Spark calls an Arrow type."""
    if pa.types.is_decimal(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if pa.types.is_map(data_type):
        return f"map<{spark_name(data_type.key_type)},{spark_name(data_type.item_type)}>"
    if pa.types.is_list(data_type):
        return f"array<{spark_name(data_type.value_type)}>"
    if pa.types.is_struct(data_type):
        return f"struct<{', '.join(f'{field.name}: {spark_name(field.type)}' for field in data_type)}>"
    if pa.types.is_timestamp(data_type):
        return "timestamp_ntz" if data_type.tz is None else "timestamp"
    names = {"int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean", "date32[day]": "date"}
    return names.get(str(data_type), str(data_type))


def _lines() -> Iterator[str]:
    policy = TypePolicy()
    for name, pg_type, note in _ROWS:
        stored, seen = storage_type(pg_type), lake_type(pg_type, policy)
        yield f"| {name} | {_arrow_name(stored)} | {spark_name(seen)} | {note} |"


def _arrow_name(data_type: pa.DataType) -> str:
    return str(data_type).replace("item: ", "").replace("[day]", "").replace("fixed_size_binary", "binary")


def types_page() -> str:
    options = [f"| `{name}` | {values} | {decides} |" for name, values, decides in _OPTIONS]
    return _HEAD + "\n".join(_lines()) + "\n" + _OPTIONS_HEAD + "\n".join(options) + "\n" + _KEYS


if __name__ == "__main__":
    sys.stdout.write(types_page())

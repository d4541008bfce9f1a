"""Every column type that Debezium's tests of its Postgres connector use is one of our type cases.

By table, as declared in its `postgres_create_tables.ddl` and in the tables that single tests make; serial columns are
integers.  PostGIS's types are recorded (`tests/decode/test_extension_types.py`), the others are asked of real servers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pgtide.local import LocalPostgres
from tests.compat.type_cases import cases_of, types_of
from tests.database import create_database, drop_database
from tests.decode.test_extension_types import RECORDED

ARRAYS = (
    "int[], bigint[], text[], char(10)[], varchar(10)[], date[], numeric(10, 2)[], numeric[3], citext[], inet[],"
    " cidr[], macaddr[], tsrange[], tstzrange[], daterange[], int4range[], numrange[], int8range[], uuid[],"
    " json[], jsonb[]"
)
DEBEZIUM = {
    "numeric_table": "smallint, integer, bigint, real, double precision, smallint, bigint, boolean, oid",
    "numeric_decimal_table": "decimal(3,2), decimal(4), decimal, numeric(6,4), numeric(4), numeric",
    "numeric_table_with_n_defaults": "int4, numeric(19, 4)",
    "string_table": "varchar(2), character varying(2), character(4), char(3), text, bytea, citext",
    "network_address_table": "inet",
    "cidr_network_address_table": "cidr",
    "macaddr_table": "macaddr",
    "macaddr8_table": "macaddr8",
    "cash_table": "money",
    "bitbin_table": "bytea, bit(1), bit, bit(2), bit(7), bit varying(1), bit varying(2), bit varying(24),"
    " bit varying(64), bit varying",
    "bytea_binmode_table": "bytea, bytea[]",
    "time_table": "timestamp, timestamp(6) without time zone, timestamp(3), timestamptz, date, time, time(3),"
    " time with time zone, time(3) with time zone, interval, timestamp(0) with time zone",
    "timetz_boundary_table": "time(0) with time zone, time(6) with time zone, timetz[]",
    "time_array_table": "time[], timetz[], timestamp[], timestamptz[]",
    "text_table": "json, jsonb, xml, uuid",
    "geom_table": "point",
    "circle_table": "circle",
    "range_table": "tsrange, tstzrange, daterange, int4range, numrange, int8range",
    "array_table": f"{ARRAYS}, oid[]",
    "array_table_with_nulls": ARRAYS,
    "custom_table": "ltree, isbn, text, ltree[]",
    "hstore_table, hstore_table_mul, hstore_table_with_null, hstore_table_with_special": "hstore, hstore[]",
    "not_null_table": "numeric(20,8), timestamp, timestamptz, time, timetz, date, money, bit(3), smallint, integer,"
    " bigint, real, bool, float8, numeric(6,2), varchar(5), box, circle, interval, line, lseg, path, point, polygon,"
    " char, text, json, xml, uuid, varbit(3), inet, cidr, macaddr",
    "default_column_test": "bit(1), bit(2), varbit(5), char(10), float8, interval, json, jsonb",
    "enum_table, enum_array_table": "mood, mood[]",
    "unknown_type_table": "tsquery",
    "text_search_test": "tsvector",
    "domains over base types (alias_table, domaintypes)": "over_bit_3_, over_smallint, over_integer, over_bigint,"
    " over_real, over_double_precision, over_numeric_6_2_, over_boolean, over_varchar_25_, over_date, over_time,"
    " over_timetz, over_timestamp, over_timestamptz, over_money, over_text, over_char, over_json, over_xml, over_uuid,"
    " over_varbit_3_, over_inet, over_cidr, over_macaddr, over_interval, over_box, over_circle, over_line, over_lseg,"
    " over_path, over_point, over_polygon, over_numeric, over_numeric_8_3_, small_text[]",
    "domains over domains": "over_over_varbit_3_, over_over_numeric_8_2_",
    "a composite": "financial_asset",
    "keys": "numeric(9,0), numeric, uuid, varchar, timestamptz, mood",
    "TOAST tests": "text, bpchar(6), text[], bigint[], jsonb, hstore",
    "aliases": "float(10), decimal(8,4), dec(6,2), numeric(12,2)",
}
PGVECTOR = {"table_vector": "vector(3), halfvec(3), sparsevec(3000), vector, sparsevec(25)"}
POSTGIS = {"postgis_table, postgis_array_table": {"geometry", "geography", "_geometry"}}


def resolved(server: LocalPostgres, types: list[str]) -> list[str]:
    """The types as the server names them in a column, modifiers included."""
    database = create_database(server)
    columns = ", ".join(f"c{number} {name}" for number, name in enumerate(types))
    database.execute(*types_of(server.version), f"CREATE TABLE t ({columns})")
    found = database.rows(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0"
        " ORDER BY attnum"
    )
    drop_database(database)
    return [name for (name,) in found]


def split(declared: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for character in declared:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


@pytest.mark.parametrize(("version", "tables"), [(15, DEBEZIUM), (16, PGVECTOR)], ids=["contrib", "pgvector"])
def test_every_column_type_of_debeziums_tables_is_among_the_type_cases(
    server_of: Callable[[int], LocalPostgres], version: int, tables: dict[str, str]
) -> None:
    theirs = [name for declared in tables.values() for name in split(declared)]
    ours = list(cases_of(version))
    named = resolved(server_of(version), [*theirs, *ours])
    covered = set(named[len(theirs) :])
    missing = {declared for declared, name in zip(theirs, named, strict=False) if name not in covered}
    assert missing == set()


def test_every_type_of_debeziums_postgis_tables_is_recorded() -> None:
    wanted = set().union(*POSTGIS.values())
    assert wanted <= {pg_type.name for pg_type, _, _ in RECORDED}

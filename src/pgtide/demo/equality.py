"""Whether a mirror equals its source: row for row and column for column, and if not, in what.

The source's rows come by psycopg, not by anything of pgtide's, so that a mistake in decoding cannot hide itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from pgtide.demo.shop import SCHEMA, ShopTable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_EXAMPLES_MAX = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    source_rows: int
    mirror_rows: int
    missing: int  # rows that only the source has
    extra: int  # rows that only the mirror has, repeated ones included
    differing: int  # rows whose key both have, with other values
    columns: str = ""  # in what way the mirror's columns are not the source's; empty: they are
    examples: tuple[str, ...] = ()

    @property
    def mismatches(self) -> int:
        return self.missing + self.extra + self.differing + (1 if self.columns else 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def comparison_from_json(data: dict[str, Any]) -> Comparison:
    return Comparison(**(data | {"examples": tuple(data["examples"])}))


def arrow_schema(table: ShopTable) -> pa.Schema:
    """The columns that a table's mirror must have."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType, _parse_datatype_string

    parsed = _parse_datatype_string(", ".join(f"`{name}` {kind}" for name, kind in table.columns.items()))
    assert isinstance(parsed, StructType)
    return to_arrow_schema(parsed)


def read_source(connection: psycopg.Connection[Any], table: ShopTable) -> pa.Table:
    """All rows, with the types that the mirror must have; text for what Spark has no type for."""
    import pyarrow as pa

    columns = [
        sql.SQL("{}::text" if kind == "string" else "{}").format(sql.Identifier(name))
        for name, kind in table.columns.items()
    ]
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(columns), sql.Identifier(SCHEMA, table.name))
    rows = connection.execute(query).fetchall()
    wanted = arrow_schema(table)
    arrays = [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(wanted)]
    return pa.Table.from_arrays(arrays, schema=wanted)


def compare(spark: SparkSession, table: ShopTable, source: pa.Table, mirror: DataFrame) -> Comparison:
    """Every difference between the rows, counted as a multiset: a row that is twice in the mirror is one too many."""
    difference = _column_difference(table, mirror)
    if difference:
        return Comparison(source.num_rows, mirror.count(), missing=0, extra=0, differing=0, columns=difference)
    keys = _by_key(spark.createDataFrame(source), mirror, table)
    found = keys.selectExpr(
        "coalesce(sum(mirror_rows), 0) AS mirror_rows",
        "coalesce(sum(greatest(in_source - in_mirror, 0)), 0) AS missing",
        "coalesce(sum(greatest(in_mirror - in_source, 0)), 0) AS extra",
        "coalesce(sum(least(in_source, in_mirror)), 0) AS differing",
    ).collect()[0]
    comparison = Comparison(source.num_rows, **found.asDict())
    return replace(comparison, examples=_examples(keys, table)) if comparison.mismatches else comparison


def _by_key(source: DataFrame, mirror: DataFrame, table: ShopTable) -> DataFrame:
    """For every key: the mirror's rows, and how many rows of either side have no equal on the other."""
    from pyspark.sql.functions import expr

    both = source.selectExpr("*", "1 AS _side").unionByName(mirror.selectExpr("*", "-1 AS _side"))
    # Grouping takes nulls as equal, which is what equality of rows means.
    rows = both.groupBy(*table.columns).agg(expr("sum(_side) AS _surplus"), expr("count_if(_side = -1) AS _mirrored"))
    return rows.groupBy(*table.key).agg(
        expr("sum(_mirrored) AS mirror_rows"),
        expr("sum(greatest(_surplus, 0)) AS in_source"),
        expr("sum(greatest(-_surplus, 0)) AS in_mirror"),
    )


def _column_difference(table: ShopTable, mirror: DataFrame) -> str:
    found = {field.name: field.dataType.simpleString() for field in mirror.schema}
    if list(found.items()) == list(table.columns.items()):
        return ""
    return f"expected {_listed(table.columns)}, found {_listed(found)}"


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _examples(keys: DataFrame, table: ShopTable) -> tuple[str, ...]:
    examples = []
    unequal = keys.where("in_source > 0 OR in_mirror > 0")
    for row in unequal.orderBy(*table.key).limit(_EXAMPLES_MAX).collect():
        key = ", ".join(f"{name} = {row[name]}" for name in table.key)
        where = "only in the source" if not row.in_mirror else "only in the mirror" if not row.in_source else "differs"
        examples.append(f"{key}: {where}")
    return tuple(examples)

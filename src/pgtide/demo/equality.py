"""Whether a mirror equals its source, by the comparison that `pgtide verify` makes.

The source's rows come by psycopg, not by anything of pgtide's, so that a mistake in decoding cannot hide itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from pgtide.demo.shop import SCHEMA, ShopTable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from pgtide.spark.comparison import Comparison


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


def compare_table(spark: SparkSession, table: ShopTable, source: pa.Table, mirror: DataFrame) -> Comparison:
    from pgtide.spark.comparison import compare
    from pgtide.spark.verify import shared_columns

    rows = spark.createDataFrame(source)
    columns, problems = shared_columns(rows.schema, mirror.schema)
    return replace(compare(rows, mirror, columns, table.key), problems=problems)

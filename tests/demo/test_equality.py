"""The demo's comparison finds nothing where nothing is wrong, and a row or column that is."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from pgtide.demo import Settings, shop
from pgtide.demo.equality import compare_table, read_source
from tests.database import Database
from tests.demo.rows import ROWS, arrow_rows, table_named

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = ROWS["orders"]


def test_a_changed_value_and_a_column_of_another_type_are_mismatches(spark: SparkSession) -> None:
    changed = [ORDERS[0], (*ORDERS[1][:3], Decimal("10.01"), *ORDERS[1][4:])]
    mirror = spark.createDataFrame(arrow_rows("orders", changed))
    found = compare_table(spark, table_named("orders"), arrow_rows("orders"), mirror)
    assert (found.differing, found.mismatches) == (1, 1)
    assert [(example.key, example.mirror) for example in found.examples] == [({"id": "11"}, {"total": "10.01"})]
    other = mirror.selectExpr("* EXCEPT (total)", "cast(total AS double) total")
    found = compare_table(spark, table_named("orders"), arrow_rows("orders"), other)
    assert (found.differing, found.mismatches) == (0, 1)
    assert "the mirror has double" in found.problems[0]


def test_what_is_read_from_postgres_equals_itself_in_spark(spark: SparkSession, database: Database) -> None:
    with database.connect() as connection:
        shop.open_shop(connection, Settings(customers=20, products=10, orders=60))
        for table in shop.TABLES:
            rows = read_source(connection, table)
            assert rows.num_rows == shop.counts(connection)[table.name]
            assert compare_table(spark, table, rows, spark.createDataFrame(rows)).mismatches == 0

"""The comparison of mirror and source finds what was planted, and nothing where nothing was."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from pgtide.demo import Settings, shop
from pgtide.demo.equality import Comparison, compare, read_source
from tests.database import Database
from tests.demo.rows import ROWS, arrow_rows, table_named

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = ROWS["orders"]
LATER = (ORDERS[0], (*ORDERS[1][:3], Decimal("10.01"), *ORDERS[1][4:]))
WITHOUT_NOTE = (ORDERS[0], (*ORDERS[1][:4], None, ORDERS[1][5]))
STRANGER = (99, *ORDERS[0][1:])


def compared(spark: SparkSession, mirror: list[tuple[Any, ...]]) -> Comparison:
    table = table_named("orders")
    return compare(spark, table, arrow_rows("orders"), spark.createDataFrame(arrow_rows("orders", mirror)))


def test_equal_rows_in_another_order_have_no_mismatch(spark: SparkSession) -> None:
    assert compared(spark, ORDERS[::-1]) == Comparison(2, 2, missing=0, extra=0, differing=0)


@pytest.mark.parametrize(
    ("mirror", "found"),
    [
        pytest.param([*LATER], (0, 0, 1, "id = 11: differs"), id="a changed value"),
        pytest.param([*WITHOUT_NOTE], (0, 0, 1, "id = 11: differs"), id="a null for a value"),
        pytest.param(ORDERS[:1], (1, 0, 0, "id = 11: only in the source"), id="a lost row"),
        pytest.param([*ORDERS, STRANGER], (0, 1, 0, "id = 99: only in the mirror"), id="a row of nowhere"),
        pytest.param([*ORDERS, ORDERS[0]], (0, 1, 0, "id = 10: only in the mirror"), id="a row applied twice"),
        pytest.param([*ORDERS, LATER[1]], (0, 1, 0, "id = 11: only in the mirror"), id="an old version kept"),
    ],
)
def test_a_planted_difference_is_found(
    spark: SparkSession, mirror: list[tuple[Any, ...]], found: tuple[int, int, int, str]
) -> None:
    missing, extra, differing, example = found
    assert compared(spark, mirror) == Comparison(2, len(mirror), missing, extra, differing, examples=(example,))


def test_an_empty_mirror_lacks_every_row(spark: SparkSession) -> None:
    found = compared(spark, [])
    assert (found.mirror_rows, found.missing, found.mismatches) == (0, 2, 2)


def test_a_column_of_another_type_is_a_mismatch(spark: SparkSession) -> None:
    mirror = spark.createDataFrame(arrow_rows("orders")).selectExpr("* EXCEPT (total)", "cast(total AS double) total")
    found = compare(spark, table_named("orders"), arrow_rows("orders"), mirror)
    assert found.mismatches == 1
    assert "total double" in found.columns


def test_what_is_read_from_postgres_equals_itself_in_spark(spark: SparkSession, database: Database) -> None:
    with database.connect() as connection:
        shop.open_shop(connection, Settings(customers=20, products=10, orders=60))
        for table in shop.TABLES:
            rows = read_source(connection, table)
            assert rows.num_rows == shop.counts(connection)[table.name]
            assert compare(spark, table, rows, spark.createDataFrame(rows)).mismatches == 0

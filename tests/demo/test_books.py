"""The books balance when they do, and not when one row of one table is of another moment."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from pgtide.demo.books import Books, books_from_json, check_books
from tests.demo.rows import GOODS, ROWS, arrow_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = list[tuple[Any, ...]]


def checked(spark: SparkSession, **instead: Rows) -> Books:
    def table(name: str) -> DataFrame:
        return spark.createDataFrame(arrow_rows(name, instead.get(name)))

    return check_books(spark, 0x1_0000_00AB, table, GOODS)


def test_balanced_books_balance(spark: SparkSession) -> None:
    books = checked(spark)
    assert books.balance
    assert books.lsn == "1/AB"
    assert (books.orders, books.ordered, books.goods) == (2, Decimal("159.98"), GOODS)
    assert books_from_json(books.to_json()) == books


@pytest.mark.parametrize(
    ("table", "change"),
    [
        pytest.param("payments", lambda rows: rows[:-1], id="a payment not there yet"),
        pytest.param(
            "payments", lambda rows: [*rows, ("p", 77, Decimal(1), "card", None)], id="a payment for no order"
        ),
        pytest.param("order_items", lambda rows: rows[1:], id="an item lost"),
        pytest.param("orders", lambda rows: rows[:-1], id="an order not there yet"),
        pytest.param("customers", lambda rows: rows[:-1], id="a customer not there yet"),
        pytest.param("products", lambda rows: rows[:-1], id="a product lost"),
        pytest.param("products", lambda rows: [(*rows[0][:3], 8), rows[1]], id="stock of another moment"),
    ],
)
def test_books_with_one_row_of_another_moment_do_not_balance(
    spark: SparkSession, table: str, change: Callable[[Rows], Rows]
) -> None:
    assert not checked(spark, **{table: change(ROWS[table])}).balance

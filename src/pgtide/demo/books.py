"""The shop's books, checked by a Spark SQL join across its tables, all read at one consistent point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pgtide.lsn import format_lsn

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

# Outer joins: items or payments without their order are wrong too.
_BALANCE = """
SELECT count(*) AS orders,
       sum(o.total) AS ordered, sum(i.total) AS itemised, sum(p.total) AS paid,
       count_if(NOT (o.total <=> i.total AND o.total <=> p.total)) AS unbalanced,
       count_if(c.id IS NULL) AS without_customer
FROM {orders} o
FULL OUTER JOIN (SELECT order_id, sum(quantity * price) AS total FROM {order_items} GROUP BY order_id) i
    ON i.order_id = o.id
FULL OUTER JOIN (SELECT order_id, sum(amount) AS total FROM {payments} GROUP BY order_id) p
    ON p.order_id = coalesce(o.id, i.order_id)
LEFT JOIN {customers} c ON c.id = o.customer_id
"""

_GOODS = """
SELECT (SELECT coalesce(sum(stock), 0) FROM {products})
           + (SELECT coalesce(sum(quantity), 0) FROM {order_items}) AS goods,
       (SELECT count(*) FROM {order_items} i LEFT ANTI JOIN {products} p ON p.id = i.product_id) AS without_product
"""


@dataclass(frozen=True, slots=True)
class Books:
    """What the join found at one point."""

    lsn: str
    orders: int
    ordered: Decimal | None  # None: there are no orders
    itemised: Decimal | None
    paid: Decimal | None
    unbalanced: int  # orders whose total is not what their items or payments add up to
    without_customer: int
    goods: int  # stock and what is in orders
    without_product: int
    goods_expected: int

    @property
    def balance(self) -> bool:
        wrong_rows = self.unbalanced + self.without_customer + self.without_product
        return wrong_rows == 0 and self.goods == self.goods_expected and self.ordered == self.itemised == self.paid

    def to_json(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Decimal) else value for name, value in asdict(self).items()}


def books_from_json(data: dict[str, Any]) -> Books:
    money = {name: None if data[name] is None else Decimal(data[name]) for name in ("ordered", "itemised", "paid")}
    return Books(**(data | money))


def check_books(spark: SparkSession, lsn: int, table: Callable[[str], DataFrame], goods_expected: int) -> Books:
    """`table` gives each table as of `lsn`."""
    balance = spark.sql(_BALANCE, **_tables(table, "orders", "order_items", "payments", "customers")).collect()[0]
    goods = spark.sql(_GOODS, **_tables(table, "products", "order_items")).collect()[0]
    return Books(lsn=format_lsn(lsn), goods_expected=goods_expected, **balance.asDict(), **goods.asDict())


def _tables(table: Callable[[str], DataFrame], *names: str) -> dict[str, Any]:
    return {name: table(name) for name in names}

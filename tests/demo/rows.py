"""A few rows of the shop, balanced, as Arrow tables with the mirror's types."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from pgtide.demo.equality import arrow_schema
from pgtide.demo.shop import TABLES, ShopTable

NOON = datetime(2024, 5, 1, 12, 0, 0, 123456, tzinfo=UTC)
GOODS = 20

ROWS: dict[str, list[tuple[Any, ...]]] = {
    "customers": [(1, "Ada", "Łódź", True, date(2024, 1, 1)), (2, "Björn", None, False, date(2024, 2, 29))],
    "products": [(1, "lamp", Decimal("9.99"), 7), (2, "rug", Decimal("120.00"), 9)],
    "orders": [
        (10, 1, "placed", Decimal("149.98"), None, NOON),
        (11, 2, "shipped", Decimal("10.00"), "ring twice", NOON),
    ],
    "order_items": [
        (10, 1, 1, 2, Decimal("14.99")),
        (10, 2, 2, 1, Decimal("120.00")),
        (11, 1, 1, 1, Decimal("10.00")),
    ],
    "payments": [
        ("5f0c7f39-5d0f-4a4f-8d0a-000000000001", 10, Decimal("50.00"), "card", NOON),
        ("5f0c7f39-5d0f-4a4f-8d0a-000000000002", 10, Decimal("99.98"), "card", NOON),
        ("5f0c7f39-5d0f-4a4f-8d0a-000000000003", 11, Decimal("10.00"), "voucher", NOON),
    ],
}


def table_named(name: str) -> ShopTable:
    return next(table for table in TABLES if table.name == name)


def arrow_rows(name: str, rows: list[tuple[Any, ...]] | None = None) -> pa.Table:
    """The rows of a table, or others in their place."""
    wanted = arrow_schema(table_named(name))
    chosen = ROWS[name] if rows is None else rows
    return pa.Table.from_arrays(
        [pa.array([row[place] for row in chosen], field.type) for place, field in enumerate(wanted)], schema=wanted
    )

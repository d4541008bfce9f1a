"""Soft deletes: rows that the source deletes stay, marked, and what is not marked is the table as the source has it."""

from __future__ import annotations

from typing import Any

import pytest

from pgtide.config import TableOptions
from pgtide.schema import TableShape
from tests.spark.conftest import Mirrored
from tests.spark.logs import delete, full_delete, insert, table_shape, truncate, update

ORDERS = table_shape()
VISITS = table_shape("visits", oid=16500, key=())
HARD = table_shape("hard", oid=16600)


@pytest.fixture
def soft(mirrored: Mirrored) -> Mirrored:
    """A mirror with soft deletes, but for one table."""
    hard = {"public.hard": TableOptions(soft_delete=False)}
    options = mirrored.config.mirror.model_copy(update={"soft_delete": True, "tables": hard})
    mirrored.config = mirrored.config.model_copy(update={"mirror": options})
    return mirrored


def marked(mirrored: Mirrored, shape: TableShape, *columns: str) -> list[tuple[Any, ...]]:
    rows = mirrored.spark.table(mirrored.target(shape)).select(*columns, "_is_deleted").collect()
    return sorted(tuple(row) for row in rows)


def test_rows_stay_and_come_back(soft: Mirrored) -> None:
    soft.log.commit(
        *(insert(ORDERS, id=number, amount=0, body="large") for number in range(1, 5)),
        *(insert(VISITS, id=1, region="n") for _ in range(3)),
        *(insert(HARD, id=number) for number in range(1, 3)),
    )
    soft.run()
    soft.log.commit(
        delete(ORDERS, id=1),
        delete(ORDERS, id=2),
        update(ORDERS, old_key={"id": 3}, unchanged=["body"], id=30, amount=3),
        insert(ORDERS, id=9, amount=9),
        delete(ORDERS, id=9),
        full_delete(VISITS, id=1, region="n"),
        delete(HARD, id=1),
    )
    soft.run()
    assert marked(soft, ORDERS, "id", "amount", "body") == [
        (1, 0, "large", True),
        (2, 0, "large", True),
        (3, 0, "large", True),
        (4, 0, "large", False),
        (30, 3, "large", False),
    ]
    assert marked(soft, VISITS, "id") == [(1, False), (1, False), (1, True)]
    assert list(soft.rows(HARD)) == [(2,)]
    assert "_is_deleted" not in soft.spark.table(soft.target(HARD)).columns
    soft.log.commit(
        insert(ORDERS, id=1, amount=7), update(ORDERS, old_key={"id": 30}, id=3, amount=4), truncate(VISITS)
    )
    soft.run()
    assert marked(soft, ORDERS, "id", "amount") == [
        (1, 7, False),
        (2, 0, True),
        (3, 4, False),
        (4, 0, False),
        (30, 3, True),
    ]
    assert marked(soft, VISITS, "id") == [(1, True)] * 3
    soft.log.commit(
        truncate(ORDERS), insert(ORDERS, id=2, amount=8), insert(ORDERS, id=50), insert(VISITS, id=1, region="n"),
        full_delete(VISITS, id=1, region="n"), insert(VISITS, id=2),
    )  # fmt: skip
    soft.run()
    living = [row[:2] for row in marked(soft, ORDERS, "id", "amount") if not row[2]]
    assert living == [(2, 8), (50, None)]
    assert len(marked(soft, ORDERS, "id")) == 6, "the others are still there"
    assert marked(soft, VISITS, "id") == [(1, True)] * 3 + [(2, False)]


def test_turned_on_later_all_rows_live_and_turned_off_the_table_parks(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1), insert(ORDERS, id=2))
    mirrored.run()
    before = mirrored.config
    options = before.mirror.model_copy(update={"soft_delete": True})
    mirrored.config = before.model_copy(update={"mirror": options})
    mirrored.log.commit(delete(ORDERS, id=1))
    mirrored.run()
    assert marked(mirrored, ORDERS, "id") == [(1, True), (2, False)]
    mirrored.config = before
    mirrored.run(parked=["public.orders"])  # also while nothing is changed
    mirrored.log.commit(insert(ORDERS, id=3))
    mirrored.run(parked=["public.orders"])
    assert "soft_delete = true" in mirrored.progress()["tables"]["public.orders"]["error"]
    assert marked(mirrored, ORDERS, "id") == [(1, True), (2, False)]

"""The shop's own promise: whatever the traffic does, the books balance at every commit."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from pgtide.demo import Settings, shop
from pgtide.demo.traffic import STEPS, Step, Traffic, Writer
from tests.database import Database
from tests.waiting import wait_for

SMALL = Settings(customers=20, products=10, orders=60, transactions_per_second=2_000)

# Asked of Postgres, in other words than the proof asks Spark.
UNBALANCED = """
SELECT id FROM orders
WHERE total <> (SELECT sum(quantity * price) FROM order_items WHERE order_id = orders.id)
   OR total <> (SELECT sum(amount) FROM payments WHERE order_id = orders.id)
   OR NOT EXISTS (SELECT FROM order_items WHERE order_id = orders.id)
   OR NOT EXISTS (SELECT FROM payments WHERE order_id = orders.id)
"""
GOODS = "SELECT (SELECT sum(stock) FROM products) + (SELECT sum(quantity) FROM order_items)"


@pytest.fixture
def shop_database(database: Database) -> Database:
    with database.connect() as connection:
        shop.open_shop(connection, SMALL)
    return database


def assert_balanced(database: Database) -> None:
    assert database.rows(UNBALANCED) == []
    assert database.rows(GOODS) == [(shop.goods(SMALL),)]


def test_the_shop_opens_with_balanced_books(shop_database: Database) -> None:
    with shop_database.connect() as connection:
        rows = shop.counts(connection)
    assert (rows["customers"], rows["products"], rows["orders"]) == (20, 10, 60)
    assert rows["order_items"] >= 60
    assert rows["payments"] >= 60
    assert_balanced(shop_database)


def test_the_check_of_this_test_sees_unbalanced_books(shop_database: Database) -> None:
    shop_database.execute("UPDATE payments SET amount = amount + 1 WHERE order_id = 7")
    assert shop_database.rows(UNBALANCED) == [(7,)]


@pytest.mark.parametrize("step", [step for step, _ in STEPS], ids=lambda step: step.__name__)
def test_each_step_of_the_traffic_keeps_the_books_balanced(shop_database: Database, step: Step) -> None:
    writer = Writer(shop_database.dsn, SMALL, 0)
    with psycopg.connect(shop_database.dsn) as connection:
        for _ in range(10):
            writer.attempt(connection, step)
            assert_balanced(shop_database)
    assert writer.committed + writer.rolled_back == 10


def test_an_order_that_is_rolled_back_leaves_nothing(shop_database: Database) -> None:
    writer = Writer(shop_database.dsn, SMALL, 0)
    with shop_database.connect() as watching, psycopg.connect(shop_database.dsn) as connection:
        before = shop.counts(watching)
        writer.attempt(connection, Writer.place_order_and_change_mind)
        assert (writer.committed, writer.rolled_back) == (0, 1)
        assert shop.counts(watching) == before


def test_writers_side_by_side_do_not_get_in_each_others_way(shop_database: Database) -> None:
    traffic = Traffic(shop_database.dsn, SMALL)
    traffic.start()
    try:
        wait_for(lambda: traffic.tally().committed >= 400, what="400 transactions")
    finally:
        traffic.stop()
    assert traffic.tally().rolled_back > 0
    assert_balanced(shop_database)


def test_connection_that_is_lost_in_a_rollback_is_an_error_of_the_traffic(
    shop_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_connection(_: Writer, connection: psycopg.Connection[Any]) -> None:
        with connection.transaction() as savepoint:
            shop_database.rows(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
            raise psycopg.Rollback(savepoint)

    monkeypatch.setattr("pgtide.demo.traffic.STEPS", ((lose_connection, 1),))
    writer = Writer(shop_database.dsn, SMALL, 0)
    writer.run(threading.Event())
    assert "lost in a rollback" in str(writer.error)


def test_traffic_that_loses_its_server_says_so(shop_database: Database) -> None:
    traffic = Traffic(shop_database.dsn, SMALL)
    traffic.start()
    wait_for(lambda: traffic.tally().committed >= 1, what="a transaction")
    with shop_database.server.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [shop_database.name]
        )

    def told() -> str:
        try:
            traffic.tally()
        except Exception as error:  # noqa: BLE001 - looked at below
            return str(error)
        return ""

    assert "traffic failed" in wait_for(told, what="the error")
    traffic.stop()

"""The examples do what they say, on a log that a real capture has made of a real database."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide.local import LocalPostgres
from tests.capture.running import capturing, configuration, wait_until_captured
from tests.database import Database, create_database, drop_database

FOLDER = Path(__file__).parents[2] / "examples"
RUN_BY_A_TEST: set[str] = set()


@pytest.fixture(scope="module")
def shop(server: LocalPostgres) -> Iterator[Database]:
    created = create_database(server)
    created.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, customer int, total numeric(12,2))",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        "CREATE TABLE payments (id int PRIMARY KEY, order_id int, amount numeric(12,2))",
    )
    yield created
    drop_database(created)


@pytest.fixture(scope="module")
def log(shop: Database, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = configuration(shop, tmp_path_factory.mktemp("examples"))
    with capturing(config):
        shop.execute(
            "INSERT INTO orders SELECT n, n % 3, n FROM generate_series(1, 30) n",
            "UPDATE orders SET total = total + 0.50 WHERE id <= 10",
            "INSERT INTO payments SELECT n, n * 2, 1 FROM generate_series(1, 10) n",
            "DELETE FROM orders WHERE id > 25",
            "UPDATE orders SET id = 100 WHERE id = 3",
            "UPDATE orders SET customer = 0 WHERE id = 5",
        )
        wait_until_captured(shop, config)
    return config.log_location


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    RUN_BY_A_TEST.add(name)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def source(shop: Database, query: str) -> list[tuple[Any, ...]]:
    return sorted(shop.rows(query))


def test_running_totals_are_those_of_the_table(
    spark: SparkSession, shop: Database, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "running_totals.py", log)
    found = sorted(tuple(row) for row in spark.table("running_totals").collect())
    assert found == source(shop, "SELECT customer, sum(total) FROM orders GROUP BY customer")


def test_each_payment_meets_its_order(spark: SparkSession, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "join_streams.py", log)
    rows = spark.table("paid_orders").select("id", "customer", "amount").collect()
    assert sorted(tuple(row) for row in rows) == [(n * 2, n * 2 % 3, Decimal(1)) for n in range(1, 11)]


def test_a_copy_in_postgres_equals_its_source_and_takes_each_change_once(
    spark: SparkSession, shop: Database, log: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "into_postgres.py", log, shop.dsn, tmp_path / "checkpoint")
    assert source(shop, "SELECT * FROM orders_copy") == source(shop, "SELECT * FROM orders")
    shop.execute("UPDATE orders_copy SET total = -1 WHERE id = 1")
    run(monkeypatch, "into_postgres.py", log, shop.dsn, tmp_path / "the checkpoint was lost")
    assert source(shop, "SELECT total FROM orders_copy WHERE id = 1") == [(-1,)]  # no change was applied a second time


def test_a_copy_in_postgres_needs_no_more_than_the_key_of_old_rows(
    spark: SparkSession, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """REPLICA IDENTITY DEFAULT: of most updates no old row is sent."""
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, customer int, total numeric(12,2))")
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute(
            "INSERT INTO orders SELECT n, n % 3, n FROM generate_series(1, 5) n",
            "UPDATE orders SET total = total + 0.50 WHERE id <= 3",
            "UPDATE orders SET id = 100 WHERE id = 3",
            "DELETE FROM orders WHERE id = 5",
        )
        wait_until_captured(database, config)
    run(monkeypatch, "into_postgres.py", config.log_location, database.dsn, tmp_path / "checkpoint")
    assert source(database, "SELECT * FROM orders_copy") == source(database, "SELECT * FROM orders")


def test_a_range_has_what_happened_in_it_and_nothing_else(
    spark: SparkSession, log: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = spark.read.format("pgtide").option("path", log).option("table", "public.orders").load()
    deleted = changes.where("_change_type = 'delete'").selectExpr("min(_offset)", "max(_offset) + 1").collect()[0]
    run(monkeypatch, "read_range.py", log, "public.orders", *deleted)
    kinds = {row[0]: row[1] for row in spark.table("changes").groupBy("_change_type").count().collect()}
    assert kinds == {"delete": 5}
    assert "[delete]" in capsys.readouterr().out


def test_changes_are_plotted(log: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    picture = tmp_path / "changes.png"
    run(monkeypatch, "plot_changes.py", log, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_example_is_run_by_a_test() -> None:
    """Comes last in this file."""
    assert {file.name for file in FOLDER.glob("*.py")} == RUN_BY_A_TEST

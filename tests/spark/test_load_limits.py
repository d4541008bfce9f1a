"""A load has regard for others: time, connections, locks, the server that it reads from; and outlives the capture."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide import local
from pgtide.failpoints import arm
from pgtide.snapshot.ctid_ranges import CtidRange, missing
from pgtide.spark.source_rows import source_table
from pgtide.spark.source_table import SourceTable
from tests.capture.running import CaptureProcess, wait_until_let_go
from tests.database import Database, create_database
from tests.locking import locking
from tests.spark.shop import Shop, open_shop
from tests.standby import standby_of
from tests.waiting import wait_for

READING = """SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name LIKE 'pgtide load %'"""
SLEEPING = f"{READING} AND wait_event = 'PgSleep'"


@pytest.fixture(autouse=True)
def by_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is small: it stands for what is large."""
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)


def slow_down(monkeypatch: pytest.MonkeyPatch, filters: dict[str, str]) -> None:
    """Tables are read with these conditions, which wait, for as long as they are in the dictionary."""

    def slow(*arguments: Any) -> SourceTable:
        table = source_table(*arguments)
        return replace(table, row_filter=filters.get(table.shape.name))

    monkeypatch.setattr("pgtide.spark.table_load.source_table", slow)


def flat(commits: list[list[CtidRange]]) -> list[CtidRange]:
    return [part for commit in commits for part in commit]


def ranges_of(shop: Shop, table: str) -> list[CtidRange]:
    """What the one pair of the table's load has read, in order."""
    (commits,) = shop.loads(table).values()
    return sorted(flat(commits), key=lambda part: part.first_block)


@contextmanager
def most(database: Database, query: str) -> Iterator[list[int]]:
    """The largest number that the query gives while the block lasts."""
    found, over = [0], threading.Event()

    def look() -> None:
        with database.connect() as connection:
            while not over.wait(0.01):
                found[0] = max(found[0], connection.execute(query.encode()).fetchall()[0][0])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(600)
def test_ranges_that_take_too_long_are_halved_and_a_block_that_does_parks_its_table_while_one_connection_reads(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, because the session of the tests has as many tasks as the machine has cores, which may be two."""
    monkeypatch.setattr("pgtide.spark.load._RETRY_S", 1.0)
    limits = f"statement_timeout_seconds = 1\nconnections = 1\nrange_bytes = {20 * 8192}"
    shop = open_shop(database, spark, tmp_path, snapshot=limits)
    database.execute("DROP TABLE orders, empty")
    for table, rows in (("slow", 600), ("hopeless", 30)):
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, note text)",
            f"INSERT INTO {table} SELECT n, repeat('x', 500) FROM generate_series(1, {rows}) n",
        )
    # 15 rows are a block: twice 20 blocks take more than a second each, and so does a single one.
    filters = {"slow": "pg_sleep(0.004) IS NOT NULL", "hopeless": "pg_sleep(0.1) IS NOT NULL"}
    slow_down(monkeypatch, filters)

    def hopeless() -> dict[str, Any]:
        file = shop.config.log_path / "readers" / "mirror.json"
        tables: dict[str, dict[str, Any]] = json.loads(file.read_text())["tables"] if file.exists() else {}
        return tables.get("public.hopeless", {})

    with shop.capturing(), most(database, READING) as readers, shop.mirroring_from_here() as wait_until_equal:
        wait_for(lambda: hopeless().get("state") == "parked", limit_s=120, what="the table to be parked")
        error = hopeless()["error"]
        wait_until_equal("public.slow", "public.customers")
        filters.clear()
        wait_until_equal("public.hopeless")
    assert "public.hopeless: reading a single block takes longer than 1 s." in error
    assert "Raise snapshot.statement_timeout_seconds." in error
    assert readers == [1]
    parts = ranges_of(shop, "public.slow")
    assert len(parts) >= 4
    assert [part.end_block for part in parts] == [part.first_block for part in parts[1:]] + [None]


@pytest.mark.timeout(600)
def test_migration_is_let_through_and_what_made_way_is_read_again_whole(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = open_shop(database, spark, tmp_path)
    # Slow for five minutes if it begins while somebody has the advisory lock.
    locked = "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711)"
    slow_down(monkeypatch, {"orders": f"NOT {locked} OR pg_sleep(0.1) IS NOT NULL"})
    with shop.capturing(), database.connect() as slowing:
        slowing.execute("SELECT pg_advisory_lock(4711)")
        with shop.mirroring_from_here() as wait_until_equal:
            wait_for(lambda: database.rows(SLEEPING) == [(1,)], limit_s=120, what="the table to be read")
            slowing.execute("SELECT pg_advisory_unlock(4711)")
            with database.connect() as migration:
                migration.execute("SET lock_timeout = '60s'")
                migration.execute("ALTER TABLE orders ADD COLUMN extra int DEFAULT 7")
                migration.execute("INSERT INTO orders VALUES (5000, 1, 'later', 8)")
            wait_until_equal("public.orders", "public.empty")
    assert len(ranges_of(shop, "public.orders")) == 1, "it was cut as if it had been too slow"


@pytest.mark.timeout(600)
def test_table_that_others_lock_again_and_again_is_loaded_in_smaller_ranges(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it takes two seconds, which is longer than anybody waits for its lock."""
    monkeypatch.setattr("pgtide.snapshot.lock_watch.PATIENCE_S", 1.2)
    monkeypatch.setattr("pgtide.snapshot.lock_watch._POLL_S", 0.05)
    monkeypatch.setattr("pgtide.spark.table_load._RETRY_S", 0.01)
    shop = open_shop(database, spark, tmp_path)
    slow_down(monkeypatch, {"orders": "id % 6 > 0 OR pg_sleep(0.004) IS NOT NULL"})
    with shop.capturing(), locking(database, "orders"), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal("public.orders", "public.customers")
    assert len(ranges_of(shop, "public.orders")) > 1


@pytest.mark.timeout(600)
def test_load_reads_from_the_standby_and_the_changes_since_come_from_the_primary(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, {"orders": "pg_sleep(0.001) IS NOT NULL"})
    with local.postgres() as primary, standby_of(primary) as standby:
        database = create_database(primary)
        copy = Database(standby, "postgres")  # the other database comes there a moment later
        sleeping = SLEEPING.replace("current_database()", f"'{database.name}'")
        shop = open_shop(database, spark, tmp_path, source=f'read_from = "{standby.dsn_of(database.name)}"')
        with shop.capturing(), most(database, READING) as on_primary, shop.mirroring_from_here() as wait_until_equal:
            wait_for(lambda: copy.rows(sleeping) == [(1,)], limit_s=120, what="the standby to be read")
            database.execute(
                "UPDATE orders SET note = 'meanwhile' WHERE id % 10 = 0",
                "DELETE FROM orders WHERE id % 10 = 1",
                "INSERT INTO orders VALUES (5000, 1, 'new')",
            )
            wait_until_equal("public.orders", "public.customers", "public.empty")
        assert on_primary == [0]


@pytest.mark.timeout(600)
def test_load_goes_on_with_what_it_has_when_the_capture_is_killed(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    shop = open_shop(database, spark, tmp_path, snapshot=f"connections = 1\nrange_bytes = {8 * 8192}")
    database.execute("DROP TABLE customers, empty")
    held = tmp_path / "held"
    capture = CaptureProcess(shop.config)
    try:
        wait_for((shop.config.log_path / "log.json").exists, what="the capture to make the log")
        arm(f"load.range.appended=hold:{held}")
        with shop.mirroring_from_here() as wait_until_equal:
            try:
                wait_for(lambda: shop.has_loaded_some("public.orders"), limit_s=120, what="some ranges")
                capture.kill()
                wait_until_let_go(database)
                database.execute(  # nobody captures this
                    "UPDATE orders SET note = 'meanwhile' WHERE id % 10 = 0",
                    "DELETE FROM orders WHERE id % 10 = 1",
                    "INSERT INTO orders VALUES (5000, 1, 'new')",
                )
            finally:
                arm("")
                held.touch()
            capture = CaptureProcess(shop.config)
            wait_until_equal("public.orders")
        capture.stop()
    finally:
        capture.kill()
    first, second = shop.loads("public.orders").values()
    loaded, kept, read = flat(first), second[0], flat(second[1:])
    assert loaded
    assert missing(loaded, kept) == missing(kept, loaded) == []
    assert read
    assert missing(read, kept) == read, "something was read again"

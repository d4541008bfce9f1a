"""A load whose snapshot dies goes on under a new one: what is loaded is kept, and no row is there twice or missing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.failpoints import arm
from pgtide.log.control import alterations
from pgtide.snapshot.ctid_ranges import CtidRange, missing
from tests.database import Database
from tests.spark.shop import Shop, open_shop
from tests.waiting import wait_for

TABLES = ("orders", "truncated", "rewritten", "altered", "keyless", "labelled")


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Six tables of some ranges each."""
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    shop = open_shop(database, spark, tmp_path, snapshot=f"connections = 6\nrange_bytes = {7 * 8192}")
    database.execute("DROP TABLE customers, empty", "ALTER TABLE orders ADD big text")
    for table in TABLES[1:]:
        database.execute(
            f"CREATE TABLE {table} (id int {'' if table == 'keyless' else 'PRIMARY KEY'}, note text, other int)",
            f"INSERT INTO {table} SELECT n, repeat('x', n % 50), n FROM generate_series(1, 3000) n",
        )
    database.execute(
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "CREATE TYPE mood AS ENUM ('glad', 'sad')",
        "ALTER TABLE labelled ADD mood mood",  # a default would be a part of its shape
        "UPDATE labelled SET mood = 'glad'",
    )
    return shop


def flat(commits: list[list[CtidRange]]) -> list[CtidRange]:
    return [part for ranges in commits for part in ranges]


def has_noted_a_rewrite(shop: Shop) -> bool:
    return any(note.rewritten_lsn for note in alterations(shop.config.log_location).values())


@pytest.mark.timeout(600)
def test_loaded_ranges_are_kept_and_changed_keys_read_anew(shop: Shop, tmp_path: Path) -> None:
    """All tables are half loaded when the source changes, the capture ends, and another one begins."""
    held = tmp_path / "held"
    with ExitStack() as ended:
        arm(f"load.range.appended=hold:{held}")
        ended.callback(arm, "")
        with shop.capturing():
            wait_until_equal = ended.enter_context(shop.mirroring_from_here())
            ended.callback(held.touch)
            tables = [f"public.{table}" for table in TABLES]
            wait_for(lambda: all(map(shop.has_loaded_some, tables)), limit_s=120, what="some of each table")
            shop.database.execute(
                "UPDATE orders SET note = 'changed' WHERE id % 3 = 0",  # each goes to the table's end, not loaded yet
                "DELETE FROM orders WHERE id % 100 = 7",
                "UPDATE orders SET id = id + 10000 WHERE id BETWEEN 20 AND 25",
                "UPDATE orders SET id = 20 WHERE id = 2000",  # a key of what is loaded, a row of what is not
                "INSERT INTO orders VALUES (30001, 1, 'new', repeat('large', 2000))",
                "VACUUM orders",
                "INSERT INTO orders VALUES (30002, 1, 'in a place that has become free')",
                "UPDATE orders SET note = 'its large value stays' WHERE id = 30001",
                "TRUNCATE truncated",
                "INSERT INTO truncated VALUES (1, 'after', 1)",
                "DELETE FROM rewritten WHERE id < 2000",
                "VACUUM FULL rewritten",
                "ALTER TABLE altered DROP COLUMN other",
                "DELETE FROM keyless WHERE id < 10",
                "ALTER TYPE mood RENAME VALUE 'glad' TO 'merry'",  # nothing is sent, and files and shape stay
            )
            shop.wait_until_captured()
            wait_for(lambda: has_noted_a_rewrite(shop), what="the capture to note the other label")
        with shop.capturing():
            held.touch()
            shop.database.execute("UPDATE orders SET note = 'later' WHERE id % 50 = 1")
            wait_until_equal(*(f"public.{table}" for table in TABLES if table != "altered"))
            wait_until_equal("public.altered", columns="id, note, NULL::int")
    first, second = shop.loads("public.orders").values()
    kept, read = second[0], flat(second[1:])
    assert kept
    assert missing(flat(first), kept) == missing(kept, flat(first)) == []
    assert missing(read, kept) == read, "something was read again"
    for table in TABLES[1:]:
        assert list(shop.loads(f"public.{table}").values())[-1][0] == [], f"something of {table} was kept"


@pytest.mark.timeout(300)
def test_nothing_is_kept_where_the_log_leaves_out_what_came_from_elsewhere(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `origin = "none"` the log cannot say which rows were changed between two snapshots."""
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    snapshot, source = f"connections = 1\nrange_bytes = {7 * 8192}", 'tables = ["public.orders"]\norigin = "none"'
    shop = open_shop(database, spark, tmp_path, snapshot=snapshot, source=source)
    origin = f"other_{database.name}"  # the whole server has it
    with ExitStack() as running:
        database.execute(f"SELECT pg_replication_origin_create('{origin}')")
        running.callback(database.execute, f"SELECT pg_replication_origin_drop('{origin}')")
        with shop.capturing():
            held = running.enter_context(shop.mirroring_held("public.orders", tmp_path / "gate"))
            database.execute(
                f"SELECT pg_replication_origin_session_setup('{origin}')",
                "UPDATE orders SET note = 'replicated' WHERE id <= 100",
            )
        wait_until_equal, let_go = held
        with shop.capturing():
            let_go()
            wait_until_equal("public.orders")
    assert list(shop.loads("public.orders").values())[-1][0] == [], "something was kept"

"""A load in trouble: the table recovers, or is parked with its remedy, and the others are loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide.failpoints import arm
from pgtide.spark.source_rows import source_table
from pgtide.spark.source_table import SourceTable
from tests.database import Database
from tests.disk import small_disk
from tests.spark.shop import Shop, open_shop
from tests.waiting import wait_for


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    shop = open_shop(database, spark, tmp_path, snapshot="statement_timeout_seconds = 5")
    database.execute(
        "CREATE TABLE broken (id int PRIMARY KEY, note text)",
        "INSERT INTO broken SELECT n, 'x' FROM generate_series(1, 1000) n",
    )
    return shop


OTHERS = ("public.customers", "public.orders", "public.empty")


def state(shop: Shop, table: str) -> dict[str, Any]:
    file = shop.config.log_path / "readers" / "mirror.json"
    found: dict[str, Any] = json.loads(file.read_text())["tables"].get(table, {}) if file.exists() else {}
    return found


def wait_until_parked(shop: Shop, table: str) -> None:
    try:
        wait_for(lambda: state(shop, table).get("state") == "parked", limit_s=180, what=f"{table} to be parked")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {state(shop, table)}") from error


@contextmanager
def held_before_reading(shop: Shop, folder: Path) -> Iterator[None]:
    """In the block all tables are there to be loaded, and none is read; then they go on."""
    held = folder / "held"
    arm(f"load.table.begun=hold:{held}")
    try:
        wait_for(Path(f"{held}.held").exists, limit_s=120, what="the load to begin")
        wait_for(lambda: is_there(shop, "broken"), limit_s=120, what="the table to be there")
        yield
    finally:
        arm("")
        held.touch()


def is_there(shop: Shop, table: str) -> bool:
    return shop.spark.catalog.tableExists(f"lake.{shop.config.mirror.namespace}.{table}")


@pytest.mark.timeout(600)
def test_table_that_is_dropped_is_parked_and_the_others_are_loaded(shop: Shop, tmp_path: Path) -> None:
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        with held_before_reading(shop, tmp_path):
            shop.database.execute("DROP TABLE broken")
        wait_until_equal(*OTHERS)
        wait_until_parked(shop, "public.broken")
        assert "dropped in the source" in state(shop, "public.broken")["error"]


@pytest.mark.timeout(600)
def test_table_that_is_truncated_or_altered_meanwhile_is_loaded_in_the_end(shop: Shop, tmp_path: Path) -> None:
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        with held_before_reading(shop, tmp_path):
            shop.database.execute(
                "TRUNCATE customers",
                "INSERT INTO customers VALUES (1, 'after')",
                "ALTER TABLE orders DROP COLUMN note",
            )
        wait_until_equal("public.customers", "public.empty", "public.broken")
        wait_until_equal("public.orders", columns="id, customer, NULL::text")


@pytest.mark.timeout(600)
def test_table_that_is_locked_for_long_does_not_hold_up_the_others(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.snapshot.copy_range._LOCK_TIMEOUT_MS", 300)
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal, shop.database.connect() as locker:
        with held_before_reading(shop, tmp_path):
            locker.execute("BEGIN")
            locker.execute("LOCK TABLE broken IN ACCESS EXCLUSIVE MODE")
        wait_until_equal(*OTHERS)
        wait_until_parked(shop, "public.broken")
        assert "Another session holds a lock" in state(shop, "public.broken")["error"]
        locker.execute("ROLLBACK")
        wait_until_equal("public.broken")


@pytest.mark.timeout(600)
def test_load_goes_on_when_its_connections_are_cut(shop: Shop, tmp_path: Path) -> None:
    """Those that read, and then the one that keeps the snapshot."""
    shop.read_in_ranges_of(4 * 8192)
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND state = 'idle in transaction'"
    )
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        with held_before_reading(shop, tmp_path):
            assert shop.database.rows(cut)
        wait_until_equal(*OTHERS, "public.broken")


@pytest.mark.timeout(600)
def test_range_whose_connection_is_cut_while_rows_flow_is_read_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.database.execute("UPDATE broken SET note = repeat('x', 500)", "VACUUM FULL broken")
    shop.read_in_ranges_of(20 * 8192)
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)

    def slow(*arguments: Any) -> SourceTable:
        table = source_table(*arguments)
        is_slow = table.shape.qualified_name == "public.broken"
        return replace(table, row_filter="pg_sleep(0.004) IS NOT NULL") if is_slow else table

    monkeypatch.setattr("pgtide.spark.table_load.source_table", slow)
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_progress_copy JOIN pg_stat_activity USING (pid, datname) "
        "WHERE datname = current_database() AND query LIKE '%broken%' AND tuples_processed > 50"
    )
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_for(lambda: shop.database.rows(cut) != [], limit_s=120, what="rows to be cut off")
        wait_until_equal("public.broken")
        ((_, commits),) = shop.loads("public.broken").items()
    ranges = [part for commit in commits for part in commit]
    assert len(ranges) == len(set(ranges)) > 2


@pytest.mark.timeout(600)
def test_column_that_is_added_in_the_middle_of_a_load_has_its_default_in_all_rows(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.read_in_ranges_of(4 * 8192)
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    held = tmp_path / "held"
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        arm(f"load.range.appended=hold:{held}")
        try:
            wait_for(lambda: shop.has_loaded_some("public.orders"), limit_s=120, what="some ranges to be loaded")
            shop.database.execute(
                "ALTER TABLE orders ADD COLUMN extra int DEFAULT 7",
                "INSERT INTO orders VALUES (5000, 1, 'later', 8)",
                "UPDATE orders SET extra = id WHERE id % 500 = 0",
            )
        finally:
            arm("")
            held.touch()
        wait_until_equal("public.orders", "public.customers")
        commits = next(iter(shop.loads("public.orders").values()))
        assert sum(map(bool, commits)) > 1, "the column was not added in the middle"


@pytest.mark.timeout(600)
def test_table_whose_disk_is_full_is_parked_and_loaded_when_there_is_room(shop: Shop) -> None:
    """Its folder is a small disk of its own; the other tables of the lake have room."""
    folder = Path(shop.spark.conf.get("spark.sql.catalog.lake.warehouse") or "") / (shop.config.mirror.namespace)
    folder.mkdir(parents=True)
    with small_disk(folder / "broken") as disk:
        if not disk.mounted:
            pytest.skip("a disk that is really full takes the right to mount a file system")
        disk.fill(os.getpid())
        with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
            wait_until_equal(*OTHERS)
            wait_until_parked(shop, "public.broken")
            assert "No space left" in state(shop, "public.broken")["error"]
            disk.free(os.getpid())
            wait_until_equal("public.broken")

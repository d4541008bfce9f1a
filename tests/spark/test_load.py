"""The first load: with a real source and a real capture, the mirror has every row once, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.log.control import offered_snapshot
from tests.arming import armed
from tests.database import Database
from tests.spark.shop import Shop, open_shop
from tests.waiting import wait_for


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    return open_shop(database, spark, tmp_path)


ALL = ("public.customers", "public.orders", "public.empty")


def test_rows_there_before_and_changes_made_meanwhile_both_arrive(shop: Shop) -> None:
    with shop.capturing():
        shop.database.execute(
            "UPDATE orders SET note = 'changed' WHERE id <= 10",
            "DELETE FROM orders WHERE id > 2990",
            "INSERT INTO customers VALUES (21, NULL)",
        )
        shop.mirror_until_equal(*ALL)
        assert offered_snapshot(shop.config.log_path) is None, "the snapshot is let go when nobody needs it"


def test_large_table_is_read_in_ranges_by_executors(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.read_in_ranges_of(5 * 8192)
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    with shop.capturing():
        shop.mirror_until_equal(*ALL)
    marked = shop.spark.sql(
        f"SELECT summary['pgtide.ranges'] ranges FROM lake.{shop.config.mirror.namespace}.orders.snapshots "
        "WHERE summary['pgtide.ranges'] IS NOT NULL"
    ).count()  # fmt: skip
    assert marked > 1, "ranges are committed as they are finished"


def test_load_goes_on_where_it_was_broken_off(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.read_in_ranges_of(2 * 8192)
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    with shop.capturing():
        with armed("load.range.appended=raise@5"):  # later than the other tables have ranges: it hits orders
            shop.mirror_until_equal(*ALL)
        commits = shop.spark.sql(
            "SELECT summary['pgtide.load'] load, from_json(summary['pgtide.ranges'], 'array<string>') ranges "
            f"FROM lake.{shop.config.mirror.namespace}.orders.snapshots"
        ).collect()
        assert len({row["load"] for row in commits if row["load"]}) == 1, "it was begun anew"
        ranges = [name for row in commits for name in row["ranges"] or []]
        assert len(ranges) == len(set(ranges)) > 4
        shop.database.execute("UPDATE orders SET note = 'later' WHERE id % 7 = 0")
        shop.mirror_until_equal(*ALL)
        named = [part.name for commits in shop.loads("public.orders").values() for commit in commits for part in commit]
        assert sorted(named) == sorted(ranges), "commits of changes name no ranges"


def test_table_that_is_loaded_streams_while_others_are_still_loaded(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.read_in_ranges_of(2 * 8192)
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    held = tmp_path / "held"
    with (
        shop.capturing(),
        armed(f"load.range.appended=hold:{held}"),
        shop.mirroring_from_here() as wait_until_equal,
    ):
        wait_for(Path(f"{held}.held").exists, limit_s=60, what="some of orders to be loaded")
        shop.database.execute("UPDATE customers SET name = 'later'", "DELETE FROM orders WHERE id % 3 = 0")
        wait_until_equal("public.customers", "public.empty")
        assert not shop.is_covered("public.orders")
        held.touch()
        wait_until_equal(*ALL)


def test_table_truncated_after_the_snapshot_is_loaded_under_a_new_one(shop: Shop) -> None:
    with shop.capturing():
        first = offered_snapshot(shop.config.log_path)
        assert first is not None
        shop.database.execute("TRUNCATE orders", "INSERT INTO orders VALUES (1, 1, 'after')")
        shop.mirror_until_equal(*ALL)
        pairs = [pair for pair, commits in shop.loads("public.orders").items() if any(commits)]
        assert len(pairs) == 1
        assert not pairs[0].startswith(f"{first.name}@"), "the snapshot in which the table looks empty was believed"


def test_load_asks_for_a_new_snapshot_when_the_old_one_died(shop: Shop) -> None:
    with shop.capturing():
        first = offered_snapshot(shop.config.log_path)
        assert first is not None
    shop.database.execute("DELETE FROM orders WHERE id <= 5", "INSERT INTO customers VALUES (22, 'late')")
    with shop.capturing():
        shop.mirror_until_equal(*ALL)

"""What a load must not mistake for the table: rows read before the table was away, partitions that have come or gone,
a mirror table that was dropped while it was written."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pgtide.failpoints import arm
from pgtide.spark.targets import target_of
from tests.database import Database
from tests.spark.shop import Shop, open_shop
from tests.waiting import wait_for

ALL = ("public.customers", "public.orders", "public.empty")


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Tables are loaded in commits of a few blocks each."""
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    tables = 'tables = ["public.*", "!public.apart"]'
    return open_shop(database, spark, tmp_path, source=tables, snapshot="range_bytes = 16384\nconnections = 3")


@pytest.mark.timeout(600)
def test_half_loaded_table_that_was_away_for_a_while_is_read_anew(shop: Shop, tmp_path: Path) -> None:
    everything, held = shop.config, tmp_path / "held"
    with shop.capturing(), ExitStack() as ended:
        arm(f"load.range.appended=hold:{held}")
        ended.callback(arm, "")
        ended.enter_context(shop.mirroring_from_here())
        ended.callback(held.touch)
        wait_for(lambda: shop.has_loaded_some("public.orders"), limit_s=120, what="some of orders")
    source = everything.source.model_copy(update={"tables": ["public.customers", "public.empty"]})
    shop.config = everything.model_copy(update={"source": source}).at(everything.file)
    with shop.capturing():
        shop.database.execute("UPDATE orders SET note = 'unsent' WHERE id % 2 = 0", "DELETE FROM orders WHERE id < 100")
        shop.wait_until_captured()
    shop.config = everything
    with shop.capturing():
        shop.mirror_until_equal(*ALL)


@pytest.mark.timeout(600)
def test_partitions_that_come_and_go_in_the_middle_of_a_load_are_noticed(shop: Shop, tmp_path: Path) -> None:
    held = tmp_path / "held"
    shop.database.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE parted_{n} PARTITION OF parted FOR VALUES FROM ({n}000) TO ({n + 1}000)" for n in range(3)),
        "INSERT INTO parted SELECT n, repeat('x', 100) FROM generate_series(0, 2999) n",
        "CREATE TABLE apart (id int PRIMARY KEY, note text)",
        "INSERT INTO apart SELECT n, 'apart' FROM generate_series(5000, 5999) n",
    )
    with shop.capturing(), ExitStack() as ended:
        arm(f"load.range.appended=hold:{held}")
        ended.callback(arm, "")
        wait_until_equal = ended.enter_context(shop.mirroring_from_here())
        ended.callback(held.touch)
        wait_for(lambda: shop.has_loaded_some("public.parted"), limit_s=120, what="some of the first partition")
        shop.database.execute(
            "DROP TABLE parted_0",
            "TRUNCATE parted_1",
            "INSERT INTO parted VALUES (1500, 'after')",
            "ALTER TABLE parted ATTACH PARTITION apart FOR VALUES FROM (5000) TO (6000)",
        )
        arm("")
        held.touch()
        wait_until_equal("public.parted", *ALL)
        assert shop.spark.table(target_of(shop.config, "public.parted")).count() == 1 + 1000 + 1000


@pytest.mark.timeout(600)
def test_mirror_table_that_is_dropped_while_it_is_written_is_loaded_anew(shop: Shop, tmp_path: Path) -> None:
    held, target = tmp_path / "held", target_of(shop.config, "public.orders")
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal, ExitStack() as ended:
        wait_until_equal(*ALL)
        arm(f"mirror.merged=hold:{held}")
        ended.callback(held.touch)
        ended.callback(arm, "")
        shop.database.execute("UPDATE orders SET note = 'changed' WHERE id <= 10")
        wait_for(Path(f"{held}.held").exists, limit_s=60, what="the write")
        shop.spark.sql(f"DROP TABLE {target}")
        arm("")
        held.touch()
        wait_for(lambda: shop.spark.catalog.tableExists(target), limit_s=60, what="the table to be made again")
        wait_for(lambda: shop.spark.table(target).count() > 10, limit_s=60, what="all rows, not the changes alone")
        wait_for(lambda: is_equal(shop), limit_s=60, what="the mirror to be equal")


def is_equal(shop: Shop) -> bool:
    """The latest point may still name a version of the table that is gone."""
    try:
        return shop.differences(*ALL) == []
    except AnalysisException:
        return False

"""The load under writes from before its start until after its end, its snapshot lost in the middle: all is equal."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide import local
from pgtide.failpoints import arm
from tests.database import create_database
from tests.spark.seeded_writes import NAMES, TABLES, writing
from tests.spark.shop import open_shop
from tests.spark.test_verify import verify
from tests.waiting import wait_for


@pytest.mark.timeout(900)
def test_killed_server_in_the_middle_of_a_load_loses_and_repeats_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    monkeypatch.setattr("pgtide.spark.new_pair.DRIVER_ROWS", 50)  # more changes are looked through by executors
    held = tmp_path / "held"
    with local.postgres() as server, ExitStack() as ended:
        database = create_database(server)
        shop = open_shop(database, spark, tmp_path, snapshot=f"range_bytes = {12 * 8192}")
        database.execute("DROP TABLE customers, orders, empty", *TABLES)
        with writing(database, seed=20261115):
            ended.enter_context(shop.capturing())
            arm(f"load.range.appended=hold:{held}")
            ended.callback(arm, "")
            ended.enter_context(shop.mirroring_from_here())
            ended.callback(held.touch)
            wait_for(lambda: shop.has_loaded_some("public.moving"), limit_s=200, what="some ranges to be loaded")
            server.kill()
            server.start()
            held.touch()
            arm("")
            wait_for(lambda: len(shop.loads("public.moving")) > 1, limit_s=200, what="a new snapshot")
            wait_for(lambda: shop.is_covered(*NAMES), limit_s=300, what="all tables to be loaded")
        found = verify(shop)
        assert found.not_covered == {}
        problems = {name: (one.examples, one.problems) for name, one in found.tables.items()}
        assert problems == dict.fromkeys(NAMES, ((), ()))
        kept = [commits for commits in shop.loads("public.moving").values() if commits and commits[0]]
        assert kept, "what had been loaded was not kept"

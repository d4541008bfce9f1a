"""A random workload, captured and mirrored while it goes on: verify finds every table equal, again and again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.database import Database
from tests.spark.random_workload import TABLES, RandomWorkload, create
from tests.spark.shop import Shop, beside, open_shop
from tests.spark.test_verify import verify
from tests.waiting import wait_for


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("rounds", "transactions"), [(2, 150), pytest.param(20, 600, marks=pytest.mark.heavy)], ids=["quick", "long"]
)
def test_random_changes_are_mirrored_exactly(
    rounds: int, transactions: int, database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    shop: Shop = open_shop(database, spark, tmp_path)
    create(database)
    workload = RandomWorkload(database, seed)
    workload.run(transactions // 3)
    names = [f"public.{name}" for name in TABLES]
    with shop.capturing(), shop.mirroring("public.customers"):
        wait_for(lambda: shop.is_covered(*names), limit_s=300, what="all tables to be loaded")
        found = []
        for _ in range(rounds):
            with beside(lambda stop: workload.run(transactions)):
                found.append(verify(shop))
        found.append(verify(shop))
        said = shop.mirror_errors()
    assert said == {}, f"seed {seed}"
    for verified in found:
        wrong = {name: comparison for name, comparison in verified.tables.items() if not comparison.equal}
        assert (wrong, verified.not_covered) == ({}, {}), f"seed {seed}"
        assert set(names) <= verified.tables.keys()
    assert len({verified.lsn for verified in found}) == rounds + 1
    assert any(comparison.source_rows > 10 for comparison in found[-1].tables.values())

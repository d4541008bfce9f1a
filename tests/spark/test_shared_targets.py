"""Tables of two schemas whose mirrors would be one: with one namespace for all, or with the name of the points."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.spark.targets import target_of
from tests.database import Database
from tests.spark.shop import open_shop


@pytest.mark.timeout(600)
def test_mirror_table_belongs_to_one_table_and_the_other_is_parked_with_what_to_change(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.execute(
        "CREATE SCHEMA audit",
        "CREATE TABLE audit.orders (id int PRIMARY KEY, who text)",
        "INSERT INTO audit.orders VALUES (1, 'me')",
    )
    shop = open_shop(database, spark, tmp_path, source='tables = ["public.*", "audit.*"]')
    with shop.capturing(), shop.mirroring("public.customers", "public.empty", "audit.orders"):
        assert set(shop.mirror_errors()) == {"public.orders"}
    database.execute("CREATE TABLE audit.customers (id int PRIMARY KEY)", "INSERT INTO audit.customers VALUES (7)")
    database.execute("UPDATE customers SET name = 'changed' WHERE id < 5", "UPDATE orders SET note = 'changed'")
    with shop.capturing(), shop.mirroring("public.customers", "public.empty", "audit.orders"):
        check_told(shop.mirror_errors(), shop.config.mirror.namespace)
    assert spark.table(target_of(shop.config, "audit.orders")).columns == ["id", "who"]


def check_told(errors: dict[str, str], namespace: str) -> None:
    assert errors.keys() == {"public.orders", "audit.customers"}
    assert (
        f"would be mirrored into `lake`.`{namespace}`.`orders`, which is that of audit.orders"
        in errors["public.orders"]
    )
    assert "which is that of public.customers" in errors["audit.customers"]
    assert all("[mirror] namespace" in told for told in errors.values())


@pytest.mark.timeout(600)
def test_table_with_the_name_of_the_points_is_parked(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    database.execute("CREATE TABLE points (id int PRIMARY KEY)", "INSERT INTO points VALUES (1)")
    shop = open_shop(database, spark, tmp_path)
    mirror = shop.config.mirror.model_copy(update={"namespace": "pgtide"})
    shop.config = shop.config.model_copy(update={"mirror": mirror}).at(shop.config.file)
    with shop.capturing(), shop.mirroring("public.customers"):
        assert "which is that of the points" in shop.mirror_errors()["public.points"]

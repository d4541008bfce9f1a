"""Rows in the log as reads: the data source shows them, and the mirror, which has loaded them, passes over them."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from pgtide.log.reads import noted_reads
from pgtide.spark import register
from tests.database import Database
from tests.spark.shop import Shop, open_shop
from tests.waiting import wait_for

ALL = ("public.customers", "public.orders", "public.empty")


def wait_until_read(shop: Shop) -> None:
    def finished() -> bool:
        return [note.finished for note in noted_reads(shop.config.log_location).values()] == [True] * len(ALL)

    wait_for(finished, what="all tables to be read")
    shop.wait_until_captured()


def changes(shop: Shop, table: str) -> DataFrame:
    register(shop.spark)
    return shop.spark.read.format("pgtide").option("path", str(shop.config.log_path)).option("table", table).load()


def test_mirror_passes_over_reads_and_the_data_source_shows_them(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    shop = open_shop(database, spark, tmp_path, snapshot="reads_in_log = true")
    with shop.capturing():
        database.execute("UPDATE orders SET note = 'changed' WHERE id <= 10", "DELETE FROM orders WHERE id > 2990")
        shop.mirror_until_equal(*ALL)  # it loads the tables while they are read
        wait_until_read(shop)
    counts = {row[0]: row[1] for row in changes(shop, "public.orders").groupBy("_change_type").count().collect()}
    assert counts == {"read": 3000, "update_postimage": 10, "delete": 10}
    debezium = shop.spark.read.format("pgtide").options(path=str(shop.config.log_path), envelope="debezium").load()
    assert debezium.where("op = 'r'").count() == 3020

    # As if they had not been read: the rows come once more, behind a truncate, to a mirror that has them.
    (shop.config.log_path / "control" / "reads.json").unlink()
    with shop.mirroring_from_here() as wait_until_equal, shop.capturing():
        wait_until_read(shop)
        database.execute("DELETE FROM orders WHERE id > 2980", "UPDATE orders SET note = 'after' WHERE id < 5")
        wait_until_equal(*ALL)
    written = spark.sql(
        f"SELECT sum(CAST(summary['added-records'] AS int)) FROM lake.{shop.config.mirror.namespace}.orders.snapshots"
    ).collect()[0][0]
    assert written <= 3000 + 10 + 4, "the mirror has written rows that it had"
    assert [row[0] for row in changes(shop, "public.empty").select("_change_type").collect()] == ["truncate"]
    found = changes(shop, "public.orders")
    since = found.where("_change_type = 'truncate'").select("_offset").collect()[0][0]
    found.where(f"_offset > {since}").createOrReplaceTempView("changes_since")
    latest = spark.sql("SELECT id, max(struct(_offset, _change_type, customer, note)) FROM changes_since GROUP BY id")
    left = [(row[0], *row[1][2:]) for row in latest.collect() if row[1][1] != "delete"]
    assert sorted(left) == database.rows("SELECT * FROM orders ORDER BY id")

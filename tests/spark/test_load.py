"""The first load: with a real source and a real capture, the mirror has every row once, whatever happens meanwhile."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.capture.pipeline import Capture
from pgtide.config import Config, load_config
from pgtide.failpoints import arm
from pgtide.log.control import offered_snapshot
from pgtide.spark import at
from pgtide.spark.mirror import Mirror
from tests.database import Database
from tests.waiting import wait_for


@dataclass
class Shop:
    """A source with tables, and everything to mirror it."""

    database: Database
    spark: SparkSession
    config: Config

    @contextmanager
    def capturing(self) -> Iterator[None]:
        stop = threading.Event()
        capture = Capture(self.config)
        failed: list[BaseException] = []

        def run() -> None:
            try:
                capture.run(stop)
            except BaseException as error:  # noqa: BLE001 - raised below, in the test
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: capture.streaming.is_set() or failed, what="the capture to stream")
            yield
        finally:
            stop.set()
            capture.wake()
            thread.join()
        if failed:
            raise failed[0]

    def mirror_until_equal(self, *tables: str, where: str = "true") -> None:
        stop = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                Mirror(self.spark, self.config).run(stop)
            except BaseException as error:  # noqa: BLE001 - raised below, in the test
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(
                lambda: failed or self.differences(*tables, where=where) == [],
                limit_s=90,
                what="the mirror to be equal",
            )
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]

    def differences(self, *tables: str, where: str = "true") -> list[str]:
        """Tables whose rows at the latest point are not those of the source, as far as these are to be mirrored."""
        try:
            point = at(self.spark, config=self.config)
        except Exception as error:  # noqa: BLE001 - there may be no point yet, or no table of points
            return [str(error)]
        different = []
        for table in tables:
            if table not in point.versions:
                different.append(table)
                continue
            mirror = sorted(tuple(row) for row in point.table(table).collect())
            if mirror != sorted(self.database.rows(f"SELECT * FROM {table} WHERE {where}")):
                different.append(table)
        return different


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    namespace = f"load_{uuid.uuid4().hex[:12]}"
    file = tmp_path / "pgtide.toml"
    file.write_text(
        f'[source]\ndsn = "{database.dsn}"\nslot = "s_{database.name}"\n'
        f'[mirror]\nnamespace = "{namespace}"\ntrigger_seconds = 0.1\n'
    )
    database.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer int, note text)",
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 20) n",
        "INSERT INTO orders SELECT n, n % 20 + 1, repeat('x', n % 50) FROM generate_series(1, 3000) n",
    )
    return Shop(database, spark, load_config(file))


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
    monkeypatch.setattr("pgtide.spark.source_rows._RANGE_BYTES", 5 * 8192)
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)
    with shop.capturing():
        shop.mirror_until_equal(*ALL)
    marked = shop.spark.sql(
        f"SELECT summary['pgtide.ranges'] ranges FROM lake.{shop.config.mirror.namespace}.orders.snapshots "
        "WHERE summary['pgtide.ranges'] IS NOT NULL"
    ).count()  # fmt: skip
    assert marked > 1, "ranges are committed as they are finished"


def test_load_goes_on_where_it_was_broken_off(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgtide.spark.source_rows._RANGE_BYTES", 2 * 8192)
    with shop.capturing():
        arm("load.range.appended=raise@5")  # later than the other tables have ranges: it hits orders
        try:
            shop.mirror_until_equal(*ALL)
        finally:
            arm("")
        commits = shop.spark.sql(
            "SELECT summary['pgtide.load'] load, from_json(summary['pgtide.ranges'], 'array<string>') ranges "
            f"FROM lake.{shop.config.mirror.namespace}.orders.snapshots"
        ).collect()
        assert len({row["load"] for row in commits if row["load"]}) == 1, "it was begun anew"
        ranges = [name for row in commits for name in row["ranges"] or []]
        assert len(ranges) == len(set(ranges)) > 4
        shop.database.execute("UPDATE orders SET note = 'later' WHERE id % 7 = 0")
        shop.mirror_until_equal(*ALL)


def test_table_truncated_after_the_snapshot_is_loaded_under_a_new_one(shop: Shop) -> None:
    with shop.capturing():
        shop.database.execute("TRUNCATE orders", "INSERT INTO orders VALUES (1, 1, 'after')")
        shop.mirror_until_equal(*ALL)


def test_load_asks_for_a_new_snapshot_when_the_old_one_died(shop: Shop) -> None:
    with shop.capturing():
        first = offered_snapshot(shop.config.log_path)
        assert first is not None
    shop.database.execute("DELETE FROM orders WHERE id <= 5", "INSERT INTO customers VALUES (22, 'late')")
    with shop.capturing():
        shop.mirror_until_equal(*ALL)


def test_rows_that_the_publication_filters_out_are_not_loaded(shop: Shop) -> None:
    shop.database.execute("CREATE PUBLICATION mine FOR TABLE orders WHERE (id <= 100 AND customer <> 7)")
    text = shop.config.file.read_text()
    mine = '[source]\npublication = "mine"\npublication_mode = "existing"\ntables = ["public.orders"]'
    shop.config.file.write_text(text.replace("[source]", mine))
    filtered = Shop(shop.database, shop.spark, load_config(shop.config.file))
    with filtered.capturing():
        filtered.mirror_until_equal("public.orders", where="id <= 100 AND customer <> 7")

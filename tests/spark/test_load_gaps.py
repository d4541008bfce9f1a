"""What a load must not mistake for the table: rows read before the table was away, partitions that have come or gone,
a mirror table that was dropped while it was written, a snapshot that is gone or whose changes are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pgtide.errors import LogRangeError
from pgtide.log.control import SnapshotOffer, offered_snapshot, request_reload
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.schema import TableShape
from pgtide.snapshot.copy_range import SnapshotGone
from pgtide.spark.apply import MirrorTable
from pgtide.spark.load import _told_again
from pgtide.spark.targets import target_of
from tests.arming import holding
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
    everything = shop.config
    with shop.capturing(), shop.mirroring_held("public.orders", tmp_path / "held"):
        pass
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
    shop.database.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE parted_{n} PARTITION OF parted FOR VALUES FROM ({n}000) TO ({n + 1}000)" for n in range(3)),
        "INSERT INTO parted SELECT n, repeat('x', 100) FROM generate_series(0, 2999) n",
        "CREATE TABLE apart (id int PRIMARY KEY, note text)",
        "INSERT INTO apart SELECT n, 'apart' FROM generate_series(5000, 5999) n",
    )
    with shop.capturing(), shop.mirroring_held("public.parted", tmp_path / "held") as (wait_until_equal, let_go):
        shop.database.execute(
            "DROP TABLE parted_0",
            "TRUNCATE parted_1",
            "INSERT INTO parted VALUES (1500, 'after')",
            "ALTER TABLE parted ATTACH PARTITION apart FOR VALUES FROM (5000) TO (6000)",
        )
        let_go()
        wait_until_equal("public.parted", *ALL)
        assert shop.spark.table(target_of(shop.config, "public.parted")).count() == 1 + 1000 + 1000


@pytest.mark.timeout(600)
def test_mirror_table_that_is_dropped_while_it_is_written_is_loaded_anew(shop: Shop, tmp_path: Path) -> None:
    target = target_of(shop.config, "public.orders")
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal(*ALL)
        with held_in_the_write_of(shop, "UPDATE orders SET note = 'changed' WHERE id <= 10", tmp_path / "held"):
            shop.spark.sql(f"DROP TABLE {target}")
        wait_for(lambda: shop.spark.catalog.tableExists(target), limit_s=60, what="the table to be made again")
        wait_for(lambda: shop.spark.table(target).count() > 10, limit_s=60, what="all rows, not the changes alone")
        wait_for(lambda: is_equal(shop), limit_s=60, what="the mirror to be equal")


@pytest.mark.timeout(600)
def test_table_without_key_that_outlives_its_snapshot_is_begun_anew_and_says_what_helps(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    snapshot = shop.config.snapshot.model_copy(update={"max_age_minutes": 0.1})
    shop.config = shop.config.model_copy(update={"snapshot": snapshot}).at(shop.config.file)
    shop.database.execute(
        "CREATE TABLE visits (page text)",
        "INSERT INTO visits SELECT repeat('p', n % 50) FROM generate_series(1, 3000) n",
    )
    with shop.capturing(), shop.mirroring_held("public.visits", held) as (wait_until_equal, _):
        wait_for(lambda: offered_snapshot(shop.config.log_location) is None, limit_s=60, what="the snapshot to go")
        with holding("load.table.begun", tmp_path / "again"):
            held.touch()
            wait_for(lambda: "public.visits" in shop.mirror_errors(), limit_s=60, what="the next attempt")
            told = shop.mirror_errors()["public.visits"]
            assert "public.visits has no key" in told
            assert "snapshot.max_age_minutes (0.1), raise it" in told
            # In one commit, so that the next snapshot lives long enough.
            monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 100)
        wait_until_equal("public.visits", *ALL)


@pytest.mark.timeout(600)
def test_load_whose_changes_are_no_longer_in_the_log_is_begun_anew(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.log.writer.LogWriter._is_due", lambda _: True)  # each block is a segment of its own
    with shop.capturing(), shop.mirroring_held("public.orders", tmp_path / "held") as (wait_until_equal, let_go):
        first = offered_snapshot(shop.config.log_location)
        for number in range(3):
            shop.database.execute(f"UPDATE orders SET note = 'changed {number}' WHERE id % 3 = {number}")
            shop.wait_until_captured()
        remove(shop.config.log_path, plan_removal(shop.config.log_path, retention_s=0, max_bytes=1))
        assert first is not None
        with pytest.raises(LogRangeError):
            LogReader(shop.config.log_path).position_after(first.lsn)
        let_go()
        wait_until_equal(*ALL)


@pytest.mark.timeout(600)
def test_changes_that_are_taken_from_a_running_mirror_park_their_table_and_the_others_go_on(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.log.writer.LogWriter._is_due", lambda _: True)  # each block is a segment of its own
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal(*ALL)
        with held_in_the_write_of(shop, "UPDATE orders SET note = 'applied' WHERE id = 1", tmp_path / "held"):
            for statement in ("UPDATE orders SET note = 'lost' WHERE id = 2", "UPDATE customers SET name = 'goes on'"):
                shop.database.execute(statement)
                shop.wait_until_captured()
            remove(shop.config.log_path, plan_removal(shop.config.log_path, retention_s=0, max_bytes=1))
        wait_for(lambda: "public.orders" in shop.mirror_errors(), limit_s=60, what="orders to be parked")
        assert "pgtide snapshot start public.orders --type bulk" in shop.mirror_errors()["public.orders"]
        wait_until_equal("public.customers", "public.empty")
        request_reload(shop.config.log_location, ["public.orders"])
        wait_until_equal(*ALL)


@contextmanager
def held_in_the_write_of(shop: Shop, statement: str, gate: Path) -> Iterator[None]:
    """In the block the mirror has merged what the statement did, and goes no further."""
    with holding("mirror.merged", gate):
        shop.database.execute(statement)
        wait_for(Path(f"{gate}.held").exists, limit_s=60, what="the write")
        yield


def is_equal(shop: Shop) -> bool:
    """The latest point may still name a version of the table that is gone."""
    try:
        return shop.differences(*ALL) == []
    except AnalysisException:
        return False


@pytest.mark.parametrize("standby", [True, False])
def test_table_without_key_whose_snapshot_is_gone_is_told_what_a_standby_needs_if_there_is_one(standby: bool) -> None:
    table = MirrorTable(TableShape(1, "public", "notes", "d", ()), "lake.public.notes")
    offer = SnapshotOffer("00000003-1", "5:5:", 1, ("public.notes",), "", standby)
    told = _told_again(table, SnapshotGone("The snapshot is gone."), offer, 60)
    assert "snapshot.max_age_minutes (60), raise it" in told
    assert ("hot_standby_feedback = on" in told) == standby

"""Tables that come, go and are loaded anew while others stream: with a real source, a real capture, a real mirror."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from pgtide.failpoints import ENVIRONMENT_VARIABLE
from pgtide.log.control import TableHistory, request_reload, requested_reloads
from pgtide.sinks import Mark
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.iceberg_marks import BESIDE
from pgtide.sinks.iceberg_table import IcebergTable
from pgtide.spark import at
from pgtide.spark.gap import has_gap
from pgtide.spark.mirror import Mirror
from pgtide.spark.targets import target_of
from tests.arming import armed
from tests.spark.shop import Shop, beside
from tests.waiting import wait_for


def test_a_gap_is_seen_by_the_lsn_of_the_load() -> None:
    mark = Mark("log", "shape", 7, load="00000003-1@0/200")
    assert not has_gap(mark, TableHistory("public.t", 0, 0x200), 0x100)
    assert has_gap(mark, TableHistory("public.t", 0, 0x201), 0x100)
    assert has_gap(mark, TableHistory("public.t", 0, None), 0x100)
    assert not has_gap(mark, None, 0x100)
    never_loaded = Mark("log", "shape", 7)
    assert not has_gap(never_loaded, TableHistory("public.t", 0, 0x100), 0x100)
    assert has_gap(never_loaded, TableHistory("public.t", 0, 0x101), 0x100)


@pytest.mark.timeout(600)
def test_tables_come_go_and_come_back_while_the_mirror_runs(shop: Shop) -> None:
    """One mirror all along; the capture is started anew with other tables, as the configuration is read at a start."""
    everything = shop.config
    shop.config = shop.with_tables("public.customers", "public.empty")
    with ExitStack() as running:
        with shop.capturing():
            failed = running.enter_context(beside(Mirror(shop.spark, shop.config).run))
            equal(shop, failed, "public.customers")
        shop.config = everything
        shop.database.execute("INSERT INTO customers VALUES (30, 'meanwhile')", "DELETE FROM orders WHERE id <= 7")
        with shop.capturing():
            shop.database.execute("UPDATE orders SET note = 'new' WHERE id % 3 = 0")
            equal(shop, failed, "public.customers", "public.orders")
        shop.config = shop.with_tables("public.orders", "public.empty")
        with shop.capturing():
            shop.database.execute("DELETE FROM customers WHERE id < 10", "INSERT INTO orders VALUES (9000, 1, 'on')")
            equal(shop, failed, "public.orders")
            wait_for(lambda: failed() or shop.states()["public.customers"] == "removed", what="the removal to be seen")
            shop.database.execute("INSERT INTO orders VALUES (9001, 1, 'on')")
            equal(shop, failed, "public.orders")
            assert "public.customers" in at(shop.spark, config=everything).not_covered
            target = target_of(everything, "public.customers")
            assert shop.spark.table(target).count() == 21, "its rows stay as they were"
        shop.config = everything
        with shop.capturing():
            shop.database.execute("INSERT INTO customers VALUES (31, 'back')")
            equal(shop, failed, "public.customers", "public.orders", "public.empty")
            assert set(shop.states().values()) == {"streaming"}


@pytest.mark.timeout(600)
def test_a_table_that_is_loaded_anew_is_never_seen_empty_or_half(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the load fails at first, and is tried again."""
    shop.read_in_ranges_of(2 * 8192)
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    target = target_of(shop.config, "public.orders")
    with shop.capturing(), shop.mirroring("public.customers", "public.orders", "public.empty"):
        # Somebody has damaged the mirror: only a load mends that.
        before = IcebergSink(shop.spark).recorded(target)
        shop.spark.sql(f"UPDATE {target} SET note = 'damaged' WHERE id <= 100")
        seen: set[int] = set()
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.5):
                seen.add(shop.spark.table(target).count())

        reader = threading.Thread(target=look)
        reader.start()
        try:
            with armed("load.range.appended=raise@2"):
                request_reload(shop.config.log_location, ["public.orders"])
                shop.database.execute("UPDATE orders SET note = 'meanwhile' WHERE id % 2 = 0")
                wait_for(lambda: shop.load_error("public.orders"), limit_s=60, what="the load to fail")
            equal(shop, lambda: False, "public.customers", "public.orders")
        finally:
            over.set()
            reader.join()
        assert seen == {3000}
        after = IcebergSink(shop.spark).recorded(target)
        assert before is not None
        assert after is not None
        assert before.mark is not None
        assert after.mark is not None
        assert before.mark.load != after.mark.load, "it was not loaded anew"
        assert IcebergTable(shop.spark, target).branches() == []
        assert requested_reloads(shop.config.log_location) == ()


@pytest.mark.timeout(600)
def test_a_table_that_is_altered_or_rewritten_while_it_is_loaded_anew_has_all_values(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old rows follow at their place in the order, and what was read before is read again."""
    shop.read_in_ranges_of(2 * 8192)
    monkeypatch.setattr("pgtide.spark.table_load._RANGES_PER_CONNECTION", 1)
    target, tables = target_of(shop.config, "public.orders"), ("public.customers", "public.orders", "public.empty")
    with shop.capturing(), shop.mirroring(*tables):
        before = IcebergSink(shop.spark).recorded(target)
        held = tmp_path / "held"
        with armed(f"load.range.appended=hold:{held}"), ExitStack() as ended:
            ended.callback(held.touch)
            request_reload(shop.config.log_location, ["public.orders"])
            wait_for(Path(f"{held}.held").exists, limit_s=60, what="some of the table to be loaded")
            shop.database.execute(
                "UPDATE orders SET note = 'before' WHERE id <= 5",
                "ALTER TABLE orders ADD c int DEFAULT 5, ADD tags text[] DEFAULT '{a,b}'",
                "UPDATE orders SET note = 'after', c = 6 WHERE id = 10",
            )
            equal(shop, lambda: False, *tables)
            shop.database.execute(
                "ALTER TABLE orders ALTER customer TYPE bigint",
                "UPDATE orders SET customer = 1::bigint << 40 WHERE id = 11",
                "ALTER TABLE orders ALTER c TYPE int USING c + id",
            )
            wait_for(lambda: "public.orders" in shop.mirror_errors(), limit_s=60, what="values that were never sent")
            wait_for(lambda: not shop.is_covered("public.orders"), limit_s=60, what="a point without the table")
        equal(shop, lambda: False, *tables)
        after = IcebergSink(shop.spark).recorded(target)
    assert before is not None
    assert after is not None
    assert before.mark is not None
    assert after.mark is not None
    assert before.mark.load != after.mark.load, "it was not loaded anew"


@pytest.mark.timeout(600)
def test_table_that_is_renamed_gets_a_mirror_of_its_new_name_and_the_old_one_stays(shop: Shop) -> None:
    """With a change of a row after the renaming, and without."""
    with shop.capturing():
        with shop.mirroring("public.customers", "public.orders", "public.empty"):
            shop.database.execute(
                "ALTER TABLE empty RENAME TO idle",
                "ALTER TABLE customers RENAME TO clients",
                "INSERT INTO clients VALUES (30, 'new')",
            )
            equal(shop, lambda: False, "public.clients", "public.orders", "public.idle")
            assert shop.spark.table(target_of(shop.config, "public.customers")).count() == 20
            assert at(shop.spark, config=shop.config).not_covered == ("public.customers", "public.empty")
        shop.database.execute("INSERT INTO clients VALUES (31, 'newer')")
        shop.mirror_until_equal("public.clients", "public.orders", "public.idle")


DRIVER = """
import sys, threading
from pathlib import Path
from pgtide import local
from pgtide.config import load_config
from pgtide.spark.mirror import Mirror
config = load_config(Path(sys.argv[1]))
session = local.spark(warehouse=config.warehouse)
Mirror(session, config).run(threading.Event())
"""


@pytest.mark.timeout(600)
@pytest.mark.heavy
def test_a_load_anew_that_is_killed_goes_on_and_ends(shop: Shop) -> None:
    points = ("load.beside.begun", "load.range.appended", "load.taken_over")
    shop.read_in_ranges_of(8192)
    target = target_of(shop.config, "public.orders")
    with shop.capturing():
        shop.mirror_until_equal("public.customers", "public.orders", "public.empty")
        shop.spark.sql(f"DELETE FROM {target} WHERE id <= 100")
        request_reload(shop.config.log_location, ["public.orders"])
        for number, point in enumerate(points):
            shop.database.execute(f"UPDATE orders SET note = 'round {number}' WHERE id % 3 = {number}")
            killed_at(point, shop)
            loads = {table: list(shop.loads(table)) for table in ("public.customers", "public.orders", "public.empty")}
            rows = shop.spark.table(target).count()
            assert rows == (3000 if point == "load.taken_over" else 2900), f"neither the old rows nor the new: {loads}"
            has_branch = BESIDE in IcebergTable(shop.spark, target).branches()
            assert has_branch == (point != "load.taken_over")
        shop.mirror_until_equal("public.customers", "public.orders", "public.empty")


def killed_at(point: str, shop: Shop) -> None:
    """Runs a mirror that dies at this point; again if something else killed it, as for lack of memory."""
    command = [sys.executable, "-c", DRIVER, str(shop.config.file)]
    environment = os.environ | {ENVIRONMENT_VARIABLE: f"{point}=kill"}
    for _ in range(3):
        done = subprocess.run(command, env=environment, timeout=300, check=False, stderr=subprocess.PIPE, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        if f"killed at {point}" in done.stderr:
            return
    raise AssertionError(f"killed three times, but never at {point}:\n{done.stderr}")


def equal(shop: Shop, failed: Callable[[], bool], *tables: str) -> None:
    shop.wait_until_equal(*tables, failed=failed)
    assert not failed()

"""Tables that come or are loaded anew while something fails: the lake, what is loaded beside, the log, the capture."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.errors import LogCorruptError
from pgtide.log.control import request_reload, requested_reloads
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.iceberg_marks import BESIDE
from pgtide.spark.mirror import Mirror
from pgtide.spark.targets import target_of
from tests.arming import armed
from tests.database import Database
from tests.spark.lake_faults import metadata_folder, not_readable
from tests.spark.shop import Shop, beside, open_shop
from tests.waiting import wait_for

OTHERS = ("public.customers", "public.orders", "public.empty")


def metadata_of(shop: Shop, table: str) -> Path:
    return metadata_folder(shop.spark, shop.config.mirror.namespace, table.partition(".")[2])


def load_of(shop: Shop, table: str) -> str | None:
    """The snapshot under which the rows that readers see were loaded."""
    version = IcebergSink(shop.spark).recorded(target_of(shop.config, table))
    return version.mark.load if version and version.mark else None


@pytest.mark.timeout(600)
def test_new_tables_that_the_lake_cannot_take_are_parked_with_the_reason_and_come_by_themselves(shop: Shop) -> None:
    """Of one the lake cannot tell what there is, for the other there is no room; for a running mirror and a new one."""
    everything, report = shop.config, shop.config.log_path / "readers" / "mirror.json"
    torn, blocked = "public.torn", "public.blocked"
    for table in (torn, blocked):
        shop.database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)", f"INSERT INTO {table} VALUES (1), (2)")
    hint, file_in_the_way = metadata_of(shop, torn) / "version-hint.text", metadata_of(shop, blocked).parent
    hint.parent.mkdir(parents=True)
    hint.write_text("1")  # of a table that is copied here, whose other files have not come yet
    file_in_the_way.touch()

    def check_told() -> None:
        wait_for(lambda: {shop.states().get(torn), shop.states().get(blocked)} == {"parked"}, what="both to be parked")
        assert "Metadata file for version 1 is missing" in shop.mirror_errors()[torn]
        assert str(file_in_the_way) in shop.mirror_errors()[blocked]
        assert shop.mirror_errors().keys() == {torn, blocked}

    shop.config = shop.with_tables(*OTHERS)
    with ExitStack() as capturing:
        with ExitStack() as mirroring:
            with shop.capturing():
                wait_until_equal = mirroring.enter_context(shop.mirroring_from_here())
                wait_until_equal(*OTHERS)
            shop.config = everything
            capturing.enter_context(shop.capturing())
            shop.database.execute("INSERT INTO customers VALUES (50, 'meanwhile')")
            check_told()
            wait_until_equal(*OTHERS)
        report.unlink()
        with shop.mirroring_from_here() as wait_until_equal:
            shop.database.execute("INSERT INTO customers VALUES (51, 'later')")
            check_told()
            wait_until_equal(*OTHERS)
            hint.unlink()
            file_in_the_way.unlink()
            wait_until_equal(*OTHERS, torn, blocked)
            assert shop.mirror_errors() == {}


@pytest.mark.timeout(600)
def test_tables_whose_lake_tables_cannot_be_read_are_loaded_anew_when_they_can_be(shop: Shop) -> None:
    """One because somebody asks for it, the other because it was rewritten in the source."""
    asked, rewritten = "public.customers", "public.orders"
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal(*OTHERS)
        before = {table: load_of(shop, table) for table in OTHERS}
        with not_readable(metadata_of(shop, asked), metadata_of(shop, rewritten)):
            request_reload(shop.config.log_location, [asked])
            shop.database.execute("ALTER TABLE orders ALTER customer TYPE int USING customer + id::int")
            shop.database.execute("INSERT INTO empty VALUES (1)")
            wait_for(lambda: shop.load_error(asked), what="why it cannot be loaded anew")
            assert "Metadata file for version" in (shop.load_error(asked) or "")
            assert requested_reloads(shop.config.log_location) == (asked,), "the wish stays"
            wait_for(lambda: "Metadata file" in shop.mirror_errors().get(rewritten, ""), what="the other to be parked")
            wait_until_equal("public.empty")
        wait_until_equal(*OTHERS)
        after = {table: load_of(shop, table) for table in OTHERS}
        assert {table for table in OTHERS if before[table] != after[table]} == {asked, rewritten}
        assert requested_reloads(shop.config.log_location) == ()
        assert set(shop.states().values()) == {"streaming"}


def wait_until_held(gate: Path) -> None:
    wait_for(Path(f"{gate}.held").exists, what=f"a load to be held by {gate.name}")


@pytest.mark.timeout(600)
def test_change_that_does_not_fit_what_is_loaded_beside_has_the_table_read_again_and_it_goes_on_meanwhile(
    shop: Shop, tmp_path: Path
) -> None:
    """Somebody has taken a row out of what is loaded, and the next change keeps that row's large value."""
    orders, loaded, again = "public.orders", tmp_path / "loaded", tmp_path / "again"
    shop.database.execute(
        "ALTER TABLE orders ALTER note SET STORAGE EXTERNAL",
        "UPDATE orders SET note = repeat('large', 2000) WHERE id = 7",
    )
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal(*OTHERS)
        before = load_of(shop, orders)
        with armed(f"load.table.closed=hold:{loaded}@1,load.table.begun=hold:{again}@2"), ExitStack() as ended:
            ended.callback(loaded.touch)
            ended.callback(again.touch)
            request_reload(shop.config.log_location, [orders])
            wait_until_held(loaded)
            shop.spark.sql(f"DELETE FROM {target_of(shop.config, orders)}.`branch_{BESIDE}` WHERE id = 7")
            shop.database.execute("UPDATE orders SET customer = 9 WHERE id = 7")
            wait_until_equal(*OTHERS)
            loaded.touch()
            wait_for(lambda: shop.load_error(orders), what="why it could not be loaded anew")
            assert "the mirror does not have that value" in (shop.load_error(orders) or "")
            assert shop.mirror_errors() == {}
            wait_until_held(again)
            shop.database.execute("UPDATE orders SET customer = 8 WHERE id = 8")
            wait_until_equal(*OTHERS)
            assert shop.states()[orders] == "streaming"
            assert load_of(shop, orders) == before
        wait_for(lambda: load_of(shop, orders) != before, what="it to be loaded anew")
        wait_until_equal(*OTHERS)
        wait_for(lambda: shop.load_error(orders) is None, what="the trouble to be over")


@pytest.mark.timeout(600)
def test_table_that_is_away_while_it_is_loaded_anew_is_read_again(shop: Shop, tmp_path: Path) -> None:
    """What was loaded lacks what happened while it was away; nothing that was sent can bring it up to date."""
    everything, orders, loaded = shop.config, "public.orders", tmp_path / "loaded"
    with ExitStack() as ended:
        with shop.capturing():
            wait_until_equal = ended.enter_context(shop.mirroring_from_here())
            wait_until_equal(*OTHERS)
            ended.enter_context(armed(f"load.table.closed=hold:{loaded}@1"))
            ended.callback(loaded.touch)
            request_reload(shop.config.log_location, [orders])
            wait_until_held(loaded)
        shop.config = shop.with_tables("public.customers", "public.empty")
        with shop.capturing():
            shop.database.execute(
                "UPDATE orders SET note = 'unsent' WHERE id % 2 = 0", "DELETE FROM orders WHERE id < 9"
            )
            wait_for(lambda: shop.states()[orders] == "removed", what="the mirror to see that it is away")
        shop.config = everything
        with shop.capturing():
            wait_for(lambda: shop.states()[orders] == "loading", what="the mirror to see that it is back")
            loaded.touch()
            wait_until_equal(*OTHERS)


@pytest.mark.timeout(600)
def test_log_that_is_damaged_while_tables_are_loaded_ends_the_mirror_with_that_and_not_all_are_tried(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    shop = open_shop(database, spark, tmp_path, snapshot="connections = 1")
    tables = [*OTHERS, *(f"public.more{number}" for number in range(4))]
    database.execute(*(f"CREATE TABLE {table} (id int PRIMARY KEY)" for table in tables[3:]))
    with pytest.raises(LogCorruptError, match="checksum"):
        damage_while_loading(shop, tmp_path / "begun")
    sink = IcebergSink(spark)
    begun = [table for table in tables if sink.recorded(target_of(shop.config, table)) is not None]
    assert 1 <= len(begun) < len(tables), "the next may begin before it is known why the first has failed"
    left = [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("pgtide-load", "pgtide-joining"))
    ]
    assert left == []
    assert shop.mirror_errors() == {}, "it is no table's own trouble"


def damage_while_loading(shop: Shop, begun: Path) -> None:
    with (
        shop.capturing(),
        beside(Mirror(shop.spark, shop.config).run) as failed,
        armed(f"load.table.begun=hold:{begun}@1"),
        ExitStack() as ended,
    ):
        ended.callback(begun.touch)
        wait_until_held(begun)
        shop.database.execute("INSERT INTO customers VALUES (50, 'new')")
        shop.wait_until_captured()
        damage(shop.config.log_path)
        begun.touch()
        wait_for(failed, what="the mirror to end by itself")


def damage(log: Path) -> None:
    """Changes a byte in the header of the newest block."""
    segment = max((log / "segments").glob("*.seg"))
    with segment.open("r+b") as file:
        place = file.read().rindex(b"PTB1") + 8
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))

"""A table with soft deletes that is loaded anew: what the source has no more stays, for nobody else has it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.config import Config, load_config
from pgtide.log.control import request_reload
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.iceberg_table import IcebergTable
from pgtide.spark.request_point import Limits
from pgtide.spark.targets import target_of
from pgtide.spark.verify import Verifier, known_tables
from tests.arming import armed
from tests.database import Database
from tests.spark.shop import Shop, open_shop
from tests.spark.test_joining import killed_at
from tests.waiting import wait_for

CUSTOMERS, VISITS = "public.customers", "public.visits"


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    """Customers and, without a key, visits."""
    opened = open_shop(database, spark, tmp_path, source='tables = ["public.customers", "public.visits"]')
    database.execute(
        "CREATE TABLE visits (page text, ratio float8)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "INSERT INTO visits SELECT 'page ' || n % 2, 'NaN' FROM generate_series(1, 10) n",
    )
    file = opened.config.file
    file.write_text(file.read_text().replace("[mirror]\n", "[mirror]\nsoft_delete = true\n"))
    opened.config = load_config(file)
    return opened


def without_customers(config: Config) -> Config:
    source = config.source.model_copy(update={"tables": [VISITS]})
    return config.model_copy(update={"source": source}).at(config.file)


def marked(shop: Shop, table: str, column: str) -> list[object]:
    rows = shop.spark.table(target_of(shop.config, table)).where("_is_deleted").select(column).collect()
    return sorted(row[0] for row in rows)


def load_of(shop: Shop, table: str) -> str | None:
    version = IcebergSink(shop.spark).recorded(target_of(shop.config, table))
    return version.mark.load if version and version.mark else None


@pytest.mark.timeout(600)
def test_rows_that_were_deleted_before_during_and_after_a_gap_stay_marked(shop: Shop, tmp_path: Path) -> None:
    everything, held = shop.config, tmp_path / "held"
    with shop.capturing(), shop.mirroring_from_here():
        wait_for(lambda: shop.is_covered(CUSTOMERS, VISITS), limit_s=120, what="the first load")
        shop.database.execute(
            "DELETE FROM customers WHERE id <= 3",
            "DELETE FROM visits WHERE ctid IN (SELECT min(ctid) FROM visits GROUP BY page)",
        )
        wait_for(lambda: marked(shop, CUSTOMERS, "id") == [1, 2, 3], limit_s=60, what="deleted customers")
        wait_for(lambda: marked(shop, VISITS, "page") == ["page 0", "page 1"], limit_s=60, what="deleted visits")
    first = load_of(shop, CUSTOMERS), load_of(shop, VISITS)
    shop.config = without_customers(everything)
    with shop.capturing():
        shop.database.execute(
            "DELETE FROM customers WHERE id IN (4, 5)", "INSERT INTO customers VALUES (1, 'back'), (30, 'new')"
        )
        shop.wait_until_captured()
    shop.config = everything
    with shop.capturing(), armed(f"load.table.closed=hold:{held}"):
        request_reload(shop.config.log_location, [VISITS])
        with shop.mirroring_from_here():
            try:
                wait_for(Path(f"{held}.held").exists, limit_s=120, what="something to be loaded")
                shop.database.execute(
                    "DELETE FROM customers WHERE id = 6",
                    "DELETE FROM visits WHERE ctid IN (SELECT min(ctid) FROM visits WHERE page = 'page 1')",
                )
                shop.wait_until_captured()
            finally:
                held.touch()
            wait_for(lambda: load_of(shop, CUSTOMERS) != first[0], limit_s=120, what="customers to be loaded anew")
            wait_for(lambda: load_of(shop, VISITS) != first[1], limit_s=120, what="visits to be loaded anew")
            wait_for(lambda: shop.is_covered(CUSTOMERS, VISITS), limit_s=60, what="a point")
            wait_for(lambda: 6 in marked(shop, CUSTOMERS, "id"), limit_s=60, what="what came during the load")
            assert marked(shop, CUSTOMERS, "id") == [2, 3, 4, 5, 6]
            assert marked(shop, CUSTOMERS, "name") == [f"customer {n}" for n in (2, 3, 4, 5, 6)]
            wait_for(lambda: len(marked(shop, VISITS, "page")) > 2, limit_s=60, what="a visit that went meanwhile")
            assert marked(shop, VISITS, "page") == ["page 0", "page 1", "page 1"]
            verifier = Verifier(shop.spark, shop.config, Limits(mirror_s=60), threading.Event(), lambda what: None)
            found = verifier.verify(known_tables(shop.config, []))
            assert found.equal, found
            assert set(found.tables) == {CUSTOMERS, VISITS}
    for table in (CUSTOMERS, VISITS):
        assert IcebergTable(shop.spark, target_of(shop.config, table)).branches() == []


@pytest.mark.timeout(600)
@pytest.mark.heavy
def test_killed_before_it_takes_over_it_has_deleted_rows_once(shop: Shop) -> None:
    with shop.capturing():
        with shop.mirroring_from_here():
            wait_for(lambda: shop.is_covered(CUSTOMERS, VISITS), limit_s=120, what="the first load")
            shop.database.execute("DELETE FROM customers WHERE id <= 3", "DELETE FROM visits WHERE page = 'page 1'")
            wait_for(lambda: len(marked(shop, CUSTOMERS, "id")) == 3, limit_s=60, what="deleted customers")
            wait_for(lambda: len(marked(shop, VISITS, "page")) == 5, limit_s=60, what="deleted visits")
        first = load_of(shop, CUSTOMERS), load_of(shop, VISITS)
        request_reload(shop.config.log_location, [CUSTOMERS, VISITS])
        killed_at("load.deleted.kept", shop)
        shop.database.execute("DELETE FROM customers WHERE id = 4", "INSERT INTO customers VALUES (1, 'back')")
        with shop.mirroring_from_here():
            wait_for(lambda: load_of(shop, CUSTOMERS) != first[0], limit_s=120, what="customers to be loaded anew")
            wait_for(lambda: load_of(shop, VISITS) != first[1], limit_s=120, what="visits to be loaded anew")
            wait_for(lambda: marked(shop, CUSTOMERS, "id") == [2, 3, 4], limit_s=60, what="the changes since")
            assert marked(shop, VISITS, "page") == ["page 1"] * 5
            assert shop.spark.table(target_of(shop.config, CUSTOMERS)).count() == 20
            assert shop.spark.table(target_of(shop.config, VISITS)).count() == 10

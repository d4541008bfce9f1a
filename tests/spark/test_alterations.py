"""Tables that are altered while they are mirrored: the mirror follows at the same place in the order, or says why."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.spark.request_point import Limits
from pgtide.spark.verify import Verified, Verifier, known_tables
from tests.database import Database
from tests.spark.shop import Shop, open_shop


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    return open_shop(database, spark, tmp_path)


def verified(shop: Shop, *tables: str) -> Verified:
    """Compares at an LSN that the running mirror is asked to stop at."""
    limits = Limits(mirror_s=120)
    found = Verifier(shop.spark, shop.config, limits, threading.Event(), lambda what: None).verify(
        known_tables(shop.config, tables)
    )
    assert found.not_covered == {}
    return found


DEFAULTS = """
ALTER TABLE customers
    ADD n int DEFAULT 5, ADD big bigint DEFAULT 5000000000, ADD small smallint DEFAULT 3, ADD flag bool DEFAULT true,
    ADD label text DEFAULT 'it''s "so"', ADD code char(5) DEFAULT 'ab', ADD price numeric(10, 2) DEFAULT 1.50,
    ADD loose numeric DEFAULT 1.5000, ADD ratio float8 DEFAULT 0.1, ADD odd float8 DEFAULT 'NaN',
    ADD approximate real DEFAULT 0.1, ADD day date DEFAULT '2024-02-29', ADD plain timestamp DEFAULT '2024-02-29 12:00',
    ADD stamp timestamptz DEFAULT '2024-02-29 12:00:00.000001+02', ADD far timestamptz DEFAULT 'infinity',
    ADD clock time DEFAULT '12:00:00.5', ADD span interval DEFAULT '1 month 2 days 3 seconds',
    ADD u uuid DEFAULT '00000000-0000-0000-0000-000000000001', ADD j jsonb DEFAULT '{"a": [1, null]}',
    ADD bytes bytea DEFAULT '\\x00ff', ADD numbers int[] DEFAULT '{1,NULL}', ADD words text[] DEFAULT '{}',
    ADD r int4range DEFAULT '[1,5)', ADD nothing int, ADD unset int DEFAULT NULL"""


def test_added_columns_wider_types_and_dropped_constraints_are_followed_in_order(shop: Shop) -> None:
    database = shop.database
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, n int NOT NULL, f real, p numeric(6, 2), v varchar(5), k smallint)",
        "INSERT INTO items SELECT n, n, n / 10.0, n / 100.0, 'v' || n, n FROM generate_series(1, 20) n",
        "CREATE TABLE visits (page text, n int)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "INSERT INTO visits SELECT 'page ' || n % 3, n % 2 FROM generate_series(1, 30) n",
    )
    with shop.capturing(), shop.mirroring("customers"):
        database.execute(
            DEFAULTS,
            "INSERT INTO customers (id, name) VALUES (100, 'new')",
            "UPDATE customers SET n = NULL, label = 'own' WHERE id = 1",
            # Rows from before and after an ALTER in one transaction.
            "BEGIN; INSERT INTO customers (id) VALUES (101); ALTER TABLE customers ADD late text DEFAULT 'late'; "
            "INSERT INTO customers (id, late) VALUES (102, 'own'); UPDATE customers SET name = 'both' WHERE id = 101; "
            "COMMIT",
            "ALTER TABLE items ALTER n TYPE bigint, ALTER f TYPE float8, ALTER p TYPE numeric(12, 2), "
            "ALTER v TYPE text, ALTER k TYPE int, ALTER n DROP NOT NULL",
            "INSERT INTO items VALUES (100, 5000000000, 0.1, 1234567890.25, 'longer than five', 100000)",
            "INSERT INTO items (id) VALUES (101)",
            "UPDATE items SET n = n + 5000000000 WHERE id <= 3",
            "ALTER TABLE visits ADD seen bool DEFAULT false",
            "DELETE FROM visits WHERE ctid IN (SELECT min(ctid) FROM visits GROUP BY page, n)",
            "UPDATE visits SET seen = true WHERE ctid = (SELECT min(ctid) FROM visits)",
        )
        found = verified(shop, "customers", "items", "visits")
        assert found.equal, found.tables

"""The first load of tables of every kind, by a role that may read and replicate and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.database import Database
from tests.replication.roles import role
from tests.spark.shop import Shop, open_shop
from tests.spark.test_verify import verify
from tests.waiting import wait_for

LARGE = "(SELECT string_agg(md5((n * 100000 + i)::text), '') FROM generate_series(1, {}) i)"  # 32 bytes each

TABLES = [
    "CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (1000) TO (2000) PARTITION BY LIST (id)",
    "CREATE TABLE parted_2_rest PARTITION OF parted_2 DEFAULT",
    "CREATE TABLE parted_empty PARTITION OF parted FOR VALUES FROM (2000) TO (3000)",
    "INSERT INTO parted SELECT n, 'v' || n FROM generate_series(1, 1999, 7) n",
    "CREATE TABLE keyless (page text, n int)",
    "ALTER TABLE keyless REPLICA IDENTITY FULL",
    "INSERT INTO keyless SELECT 'page ' || n % 3, n % 5 FROM generate_series(1, 300) n",
    "CREATE TABLE dead (id int PRIMARY KEY, v text) WITH (autovacuum_enabled = off)",
    "INSERT INTO dead SELECT n, repeat('dead', 50) FROM generate_series(1, 3000) n",
    "DELETE FROM dead WHERE id % 10 <> 0",
    f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(f'c{n} text' for n in range(400))})",
    "INSERT INTO wide (id, c0, c399) SELECT n, repeat('x', n), 'last' FROM generate_series(1, 20) n",
    "CREATE TABLE toasted (id int PRIMARY KEY, body text, small int)",
    "ALTER TABLE toasted ALTER body SET STORAGE EXTERNAL",
    f"INSERT INTO toasted SELECT n, {LARGE.format(50_000)}, n FROM generate_series(1, 4) n",
    "CREATE TABLE computed (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) STORED)",
    "INSERT INTO computed (id, a) SELECT n, n * n FROM generate_series(1, 50) n",
    "CREATE TABLE listed (id int PRIMARY KEY, secret text, a int)",
    "INSERT INTO listed SELECT n, 'secret', n FROM generate_series(1, 50) n",
    "CREATE TABLE filtered (id int PRIMARY KEY, a int)",
    "INSERT INTO filtered SELECT n, n % 10 FROM generate_series(1, 100) n",
]
NAMES = ("parted", "keyless", "dead", "wide", "toasted", "computed", "listed", "filtered", "orders", "empty")


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Iterator[Shop]:
    """Read by a role that has SELECT and REPLICATION, through somebody else's publication."""
    database.execute(*TABLES)
    with role(database, "REPLICATION") as name:
        lines = 'publication_mode = "existing"\ntables = ["public.*", "!public.customers"]\n'
        opened = open_shop(database, spark, tmp_path, dsn=f"{database.dsn} user={name}", source=lines)
        published = [
            {"listed": "listed (id, a)", "filtered": "filtered WHERE (id > 20)"}.get(table, table) for table in NAMES
        ]
        database.execute(
            f"CREATE PUBLICATION pgtide FOR TABLE {', '.join(published)} WITH (publish_via_partition_root = true)",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}",
        )
        yield opened


@pytest.mark.timeout(600)
def test_tables_of_every_kind_are_loaded_and_followed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.read_in_ranges_of(20 * 8192)
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 1 << 20)
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        shop.database.execute(
            "UPDATE parted SET id = id + 1000 WHERE id BETWEEN 1 AND 100",  # to another partition
            "DELETE FROM keyless WHERE n = 3",
            "UPDATE dead SET v = 'alive' WHERE id % 100 = 0",
            "UPDATE toasted SET small = -small",
            "UPDATE computed SET a = -a",
            "UPDATE listed SET secret = 'changed'",
            "UPDATE filtered SET id = id + 1000 WHERE id BETWEEN 10 AND 12",  # comes into what is published
            "INSERT INTO wide (id) VALUES (1000)",
        )
        wait_until_equal("public.parted", "public.empty")
        found = verify(shop)
    expected = {f"public.{name}" for name in NAMES}
    assert found.not_covered == {}
    assert {name: (one.examples, one.problems) for name, one in found.tables.items()} == dict.fromkeys(
        expected, ((), ())
    )
    assert found.tables["public.filtered"].mirror_rows < 100
    assert "secret" not in shop.spark.table(f"lake.{shop.config.mirror.namespace}.listed").columns


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_values_of_a_hundred_megabytes_are_loaded(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    shop = open_shop(database, spark, tmp_path)
    database.execute(
        "CREATE TABLE huge (id int PRIMARY KEY, body text)",
        "ALTER TABLE huge ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO huge SELECT n, repeat(md5(n::text), 3 * 1024 * 1024 + n) FROM generate_series(1, 2) n",
    )
    with shop.capturing(), shop.mirroring_from_here():
        wait_for(lambda: shop.is_covered("public.huge"), limit_s=600, what="the table to be loaded")
        rows = spark.sql(
            f"SELECT id, length(body), md5(CAST(body AS binary)) FROM lake.{shop.config.mirror.namespace}.huge"
        ).collect()
    assert sorted(map(tuple, rows)) == database.rows("SELECT id, length(body), md5(body) FROM huge ORDER BY id")

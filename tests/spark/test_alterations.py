"""Tables that are altered while they are mirrored: the mirror follows at the same place in the order, or says why."""

from __future__ import annotations

import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgtide.log.storage import storage_at
from pgtide.spark.request_point import Limits
from pgtide.spark.targets import target_of
from pgtide.spark.verify import Verified, Verifier, known_tables
from tests.database import Database
from tests.spark.shop import Shop, open_shop
from tests.waiting import wait_for


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setattr("pgtide.capture.alterations.INTERVAL_S", 0.2)
    return open_shop(database, spark, tmp_path)


def verified(shop: Shop, *tables: str) -> Verified:
    """Compares at an LSN that the running mirror is asked to stop at, once all these tables are covered there.

    One that was altered in two ways between two looks at the catalog may be on its way to be loaded anew.
    """
    for _ in range(10):
        verifier = Verifier(shop.spark, shop.config, Limits(mirror_s=120), threading.Event(), lambda what: None)
        found = verifier.verify(known_tables(shop.config, tables))
        if not found.not_covered:
            return found
    raise AssertionError(found.not_covered)


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
    with shop.capturing(), shop.mirroring("public.customers"):
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


def columns(shop: Shop, table: str) -> list[str]:
    return shop.spark.table(target_of(shop.config, f"public.{table}")).columns


def error(shop: Shop, table: str) -> str:
    progress = storage_at(shop.config.log_location).read("readers/mirror.json")
    return json.loads(progress)["tables"][f"public.{table}"]["error"] or ""


def test_renamed_dropped_and_rewritten_columns_are_followed_or_told(shop: Shop) -> None:
    database = shop.database
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, a text, b text, c int, v varchar(9))",
        "INSERT INTO items SELECT n, 'a' || n, 'b' || n, n, 'v' FROM generate_series(1, 20) n",
        "CREATE TABLE visits (page text, n int, x int)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "INSERT INTO visits SELECT 'page ' || n % 3, n % 2, n FROM generate_series(1, 30) n",
    )
    with shop.capturing(), shop.mirroring("public.customers"):
        database.execute(
            "ALTER TABLE items RENAME a TO z; ALTER TABLE items RENAME b TO a; ALTER TABLE items RENAME z TO b",
            "UPDATE items SET a = 'new a', b = 'new b' WHERE id = 1",
            "ALTER TABLE items DROP c",
            "INSERT INTO items VALUES (100, 'x', 'y', 'z')",
            "ALTER TABLE items ADD c text DEFAULT 'again'",
            "INSERT INTO items VALUES (101)",
            "DELETE FROM items WHERE id = 2",
            "ALTER TABLE visits DROP x",
            "DELETE FROM visits WHERE ctid IN (SELECT min(ctid) FROM visits GROUP BY page, n)",
            "ALTER TABLE visits RENAME n TO m",
            "UPDATE visits SET m = 7 WHERE ctid = (SELECT min(ctid) FROM visits)",
        )
        found = verified(shop, "items", "visits")
        assert found.equal, found.tables
        assert columns(shop, "items") == ["id", "b", "a", "c_dropped_4", "v", "c"]
        # Without a change of any row.
        database.execute("ALTER TABLE items ADD quiet int[] DEFAULT '{1,2}', ADD n int DEFAULT 3, DROP v")
        wait_for(lambda: "quiet" in columns(shop, "items"), limit_s=60, what="the mirror to follow")
        found = verified(shop, "items")
        assert found.equal, found.tables
        # Rewritten without a word: loaded anew by itself.
        database.execute("ALTER TABLE items ALTER n TYPE int USING n + id", "UPDATE customers SET name = 'goes on'")
        wait_for(lambda: values(shop, "items") == database.rows("SELECT id, n FROM items ORDER BY id"), limit_s=90)
        found = verified(shop, "items", "customers")
        assert found.equal, found.tables
        # Another type than the mirror can follow: parked, until somebody does what the error says.
        database.execute("ALTER TABLE items ALTER n TYPE text", "UPDATE items SET n = 'text' WHERE id = 1")
        wait_for(lambda: "DROP TABLE" in error(shop, "items"), limit_s=60, what="the table to be parked")
        assert verified(shop, "customers").equal
        shop.spark.sql(error(shop, "items").rpartition(": ")[2])
        wait_for(lambda: values(shop, "items") == database.rows("SELECT id, n FROM items ORDER BY id"), limit_s=90)
        found = verified(shop, "items", "customers")
        assert found.equal, found.tables


def test_rows_that_come_and_go_with_partitions_and_renamed_labels_are_followed(shop: Shop) -> None:
    database = shop.database
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'glad')",
        "CREATE TABLE parted (id int PRIMARY KEY, n int, mood mood) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE parted_{n} PARTITION OF parted FOR VALUES FROM ({n}00) TO ({n + 1}00)" for n in range(3)),
        "INSERT INTO parted SELECT n, n, 'sad' FROM generate_series(0, 299) n",
        "CREATE TABLE apart AS SELECT n AS id, n, 'glad'::mood AS mood FROM generate_series(500, 599) n",
        "ALTER TABLE apart ALTER id SET NOT NULL",
    )
    with shop.capturing(), shop.mirroring("public.parted"):
        loaded = len(shop.loads("public.parted"))
        database.execute(
            "CREATE TABLE parted_3 PARTITION OF parted FOR VALUES FROM (300) TO (400)",
            "ALTER TYPE mood ADD VALUE 'mad'",
            "INSERT INTO parted SELECT n, n, 'mad' FROM generate_series(300, 399) n",
        )
        assert verified(shop, "parted").equal
        assert len(shop.loads("public.parted")) == loaded
        database.execute(
            "DROP TABLE parted_0",
            "TRUNCATE parted_1; INSERT INTO parted VALUES (150)",
            "ALTER TABLE parted DETACH PARTITION parted_2",
            "ALTER TABLE parted ATTACH PARTITION apart FOR VALUES FROM (500) TO (600)",
        )
        wait_for(lambda: values(shop, "parted") == database.rows("SELECT id, n FROM parted ORDER BY id"), limit_s=90)
        database.execute("ALTER TYPE mood RENAME VALUE 'glad' TO 'merry'")
        moods = database.rows("SELECT id, mood::text FROM parted ORDER BY id")
        wait_for(lambda: values(shop, "parted", "mood") == moods, limit_s=90, what="the label to be followed")
        assert verified(shop, "parted").equal


def values(shop: Shop, table: str, column: str = "n") -> list[tuple[Any, ...]]:
    """Of the column, as the mirror has it now."""
    try:
        rows = shop.spark.table(target_of(shop.config, f"public.{table}")).select("id", column).collect()
    except (PySparkException, Py4JJavaError):  # it is being dropped, or made: files may go before the name does
        return []
    return sorted(tuple(row) for row in rows)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.heavy if seed > 1 else ()) for seed in range(1, 9)]
)
def test_random_alterations_between_random_changes_end_with_equal_tables(shop: Shop, seed: int) -> None:
    database, chosen = shop.database, random.Random(seed)
    database.execute("CREATE TABLE items (id int PRIMARY KEY, c0 int, c1 text)")
    live, number = {"c0": "int", "c1": "text"}, itertools.count(2)
    wider = {"int": "bigint", "smallint": "int", "real": "float8", "numeric(6,2)": "numeric(9,2)", "varchar(9)": "text"}

    def alteration() -> str:
        name = chosen.choice(sorted(live))
        match chosen.randrange(5):
            case 0:
                new, of = f"c{next(number)}", chosen.choice([*wider, "int[]"])
                live[new] = of
                default = "'{7}'" if of == "int[]" else "'7'"
                return f"ADD {new} {of}" + chosen.choice(["", f" DEFAULT {default}", f" DEFAULT {default} NOT NULL"])
            case 1 if len(live) > 2:
                del live[name]
                return f"DROP {name}"
            case 2:
                new = f"c{next(number)}"
                live[new] = live.pop(name)
                return f"RENAME {name} TO {new}"
            case 3 if live[name] in wider:
                live[name] = wider[live[name]]
                return f"ALTER {name} TYPE {live[name]}"
            case _:
                return f"ALTER {name} DROP NOT NULL"

    def change(connection: psycopg.Connection[Any], key: int) -> None:
        values = {name: "{1,2}" if of == "int[]" else str(chosen.randrange(100)) for name, of in live.items()}
        listed, quoted = ", ".join(values), ", ".join(f"'{value}'" for value in values.values())
        assigned = ", ".join(f"{name} = '{value}'" for name, value in values.items())
        statement = chosen.choice(
            [
                f"INSERT INTO items (id, {listed}) VALUES ({key}, {quoted}) ON CONFLICT (id) DO UPDATE SET {assigned}",
                f"UPDATE items SET {assigned} WHERE id = {key}",
                f"DELETE FROM items WHERE id = {key}",
                f"UPDATE items SET id = {key + 1} + (SELECT max(id) FROM items) WHERE id = {key}",
            ]
        )
        connection.execute(statement.encode())

    with shop.capturing(), shop.mirroring("public.customers"):
        with database.connect() as connection:
            for _ in range(10):
                for _ in range(chosen.randrange(8)):
                    change(connection, chosen.randrange(20))
                connection.execute(f"ALTER TABLE items {alteration()}".encode())
                for _ in range(chosen.randrange(4)):
                    change(connection, chosen.randrange(20))
                if chosen.random() < 0.7:
                    connection.commit()
            for key in range(20):
                change(connection, key)  # some of them last, so that the stream has the last shape
        found = mended(shop, "items")
        assert found.equal, (seed, found.tables)


def mended(shop: Shop, table: str) -> Verified:
    """Compares; a table that has to be loaded anew, because too much happened between two looks, is."""
    for _ in range(5):
        found = Verifier(shop.spark, shop.config, Limits(mirror_s=120), threading.Event(), lambda what: None).verify(
            known_tables(shop.config, [table])
        )
        if not found.not_covered:
            return found
        wait_for(lambda: not error(shop, table) or "load it anew" in error(shop, table), limit_s=90, what="a load")
        if not error(shop, table):
            continue
        shop.spark.sql(f"DROP TABLE IF EXISTS {target_of(shop.config, f'public.{table}')}")
        wait_for(lambda: not error(shop, table), limit_s=90, what="the table to be loaded anew")
    raise AssertionError(error(shop, table))

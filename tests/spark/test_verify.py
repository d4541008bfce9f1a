"""Verify, with a real source, capture and mirror that all go on: what is equal is found equal, what is not is shown."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from pgtide.config import load_config
from pgtide.errors import ConfigurationError, NotRunningError, TransientError
from pgtide.log.control import barriers
from pgtide.spark import at
from pgtide.spark import verify as verify_module
from pgtide.spark.request_point import Limits, Tell, check_running, publish_at
from pgtide.spark.verify import Verified, Verifier, known_tables
from tests.database import Database
from tests.spark.shop import Shop, beside, open_shop

TYPES = """
CREATE TABLE things (
    id int, part text, flag bool, small smallint, approximate real, ratio float8, price numeric(12, 2), loose numeric,
    stamp timestamptz, plain timestamp, day date, clock time, span interval, u uuid, j jsonb, bytes bytea,
    numbers int[], words text[], r int4range, body text, PRIMARY KEY (id, part))"""
THING = """
INSERT INTO things SELECT
    n, 'part ' || n % 3, n % 2 = 0, n, n / 3.0, CASE n % 4 WHEN 0 THEN 'NaN'::float8 WHEN 1 THEN '-0'::float8 ELSE
    n / 7.0 END, n / 100.0, n / 3.0, timestamptz '2024-01-01' + n * interval '1 day 0.000001 s', '2024-02-29 12:00',
    date '2024-01-01' + n, '12:00:00.5', n * interval '1 month 1 second', gen_random_uuid(),
    jsonb_build_object('n', n), decode('00ff', 'hex'), ARRAY[n, NULL], ARRAY['a', NULL, ''], int4range(n, n + 5),
    repeat('large ' || n, 2000)
FROM generate_series({}) n"""


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    """With a table of many types and values large enough for TOAST, and one without a key."""
    opened = open_shop(database, spark, tmp_path)
    database.execute(
        TYPES,
        "ALTER TABLE things ALTER body SET STORAGE EXTERNAL",
        THING.format("1, 40"),
        "INSERT INTO things (id, part) VALUES (0, '')",
        "CREATE TABLE visits (page text, n int)",
        "INSERT INTO visits SELECT 'page ' || n % 3, n % 5 FROM generate_series(1, 100) n",
    )
    return opened


ALL = {f"public.{name}" for name in ("customers", "orders", "empty", "things", "visits")}


def verify(shop: Shop, *tables: str, limits: Limits = Limits(mirror_s=60)) -> Verified:  # noqa: B008
    verifier = Verifier(shop.spark, shop.config, limits, threading.Event(), lambda what: None)
    return verifier.verify(known_tables(shop.config, tables))


@contextmanager
def writing(database: Database) -> Iterator[None]:
    """One transaction after the other, over several tables."""

    def write(stop: threading.Event) -> None:
        with database.connect() as connection:
            for number in itertools.count(10_000):
                if stop.wait(0.01):
                    return
                with connection.transaction():
                    connection.execute("INSERT INTO orders VALUES (%s, 1, 'new')", [number])
                    connection.execute("UPDATE customers SET name = %s WHERE id = 1", [f"name {number}"])
                    connection.execute("UPDATE things SET small = small + 1 WHERE id <= 5")
                    connection.execute("DELETE FROM orders WHERE id = %s", [number - 10])
                    connection.execute("INSERT INTO visits VALUES ('page', %s)", [number % 3])

    with beside(write) as failed:
        yield
        assert not failed()


def test_mirrors_are_found_equal_while_writes_go_on(shop: Shop) -> None:
    with shop.capturing(), shop.mirroring("public.customers"), writing(shop.database):
        found = verify(shop)
    seen = {name: (comparison.examples, comparison.problems) for name, comparison in found.tables.items()}
    assert seen == dict.fromkeys(ALL, ((), ()))
    assert found.equal
    assert found.not_covered == {}
    assert found.tables["public.things"].source_rows == found.tables["public.things"].mirror_rows == 41
    assert at(shop.spark, found.lsn, shop.config).lsn == found.lsn, "the point stays, for whoever wants to look"
    assert barriers(shop.config.log_path) == []


def test_planted_corruption_is_found_and_shown(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.database.execute("CREATE TABLE broken (id int PRIMARY KEY)")
    lake = f"lake.{shop.config.mirror.namespace}"
    shop.spark.sql(f"CREATE NAMESPACE {lake}")
    shop.spark.sql(f"CREATE TABLE {lake}.broken USING iceberg AS SELECT 7 AS id")
    stale = shop.database.rows("SELECT body FROM things WHERE id = 5")[0][0]
    shop.database.execute(
        "UPDATE things SET body = repeat('new', 5000) WHERE id = 5",
        "UPDATE things SET body = '' WHERE id = 6",
    )
    with shop.capturing(), shop.mirroring("public.customers"):
        shop.spark.sql(
            f"UPDATE {lake}.things SET ratio = CASE id WHEN 1 THEN 0.0 ELSE ratio END, "
            "day = CASE id WHEN 1 THEN day + 1 ELSE day END, "
            f"body = CASE id WHEN 5 THEN '{stale}' WHEN 6 THEN NULL ELSE body END WHERE id IN (1, 5, 6)"
        )
        shop.spark.sql(f"DELETE FROM {lake}.things WHERE id = 2")
        shop.spark.sql(f"INSERT INTO {lake}.things (id, part) VALUES (77, 'nowhere')")
        shop.spark.sql(f"INSERT INTO {lake}.visits SELECT * FROM {lake}.visits WHERE page = 'page 1' AND n = 1")
        monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)  # read by executors, in ranges
        shop.read_in_ranges_of(8192)
        found = verify(shop)
    assert not found.equal
    assert sorted(name for name, comparison in found.tables.items() if not comparison.equal) == [
        "public.things",
        "public.visits",
    ]
    assert list(found.not_covered) == ["public.broken"]
    assert not replace(found, tables={"public.orders": found.tables["public.orders"]}).equal, "one was not compared"
    things = found.tables["public.things"]
    assert (things.source_rows, things.mirror_rows) == (41, 41)
    assert (things.missing, things.extra, things.differing) == (1, 1, 3)
    shown = {int(example.key["id"] or -1): example for example in things.examples}
    assert {number: example.kind for number, example in shown.items()} == {
        1: "differing", 2: "missing", 5: "differing", 6: "differing", 77: "extra",
    }  # fmt: skip
    assert shown[1].source is not None
    assert shown[1].mirror is not None
    assert shown[1].source.keys() == {"ratio", "day"}
    assert (shown[1].source["ratio"], shown[1].mirror["ratio"]) == ("-0.0", "0.0")
    assert (shown[6].source, shown[6].mirror) == ({"body": ""}, {"body": None})
    assert shown[5].source is not None
    assert shown[5].mirror is not None
    assert (shown[5].source["body"] or "").startswith("newnew")
    assert (shown[5].mirror["body"] or "").startswith("large 5large 5")
    assert shown[2].source is not None
    assert (shown[2].source["part"], shown[2].source["numbers"]) == ("part 2", "[2,null]")
    visits = found.tables["public.visits"]
    (repeated,) = visits.examples
    assert (repeated.kind, repeated.mirror, repeated.rows) == ("extra", {"page": "page 1", "n": "1"}, visits.extra)


def test_only_what_the_publication_lets_through_is_loaded_and_compared(shop: Shop) -> None:
    shop.database.execute("CREATE PUBLICATION mine FOR TABLE orders (id, note) WHERE (id <= 100)")
    text = shop.config.file.read_text()
    mine = '[source]\npublication = "mine"\npublication_mode = "existing"\ntables = ["public.orders"]'
    shop.config.file.write_text(text.replace("[source]", mine))
    filtered = Shop(shop.database, shop.spark, load_config(shop.config.file))
    only = {"where": "id <= 100", "columns": "id, note"}
    with filtered.capturing(), filtered.mirroring("public.orders", **only):
        shop.database.execute(
            "UPDATE orders SET id = id + 1000000 WHERE id <= 10", "DELETE FROM orders WHERE id = 3000"
        )
        found = verify(filtered)
    assert found.equal
    assert found.tables["public.orders"].source_rows == found.tables["public.orders"].mirror_rows == 90


def test_what_passes_by_itself_is_tried_again_with_a_new_snapshot(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)

    def disturbed(config: object, lsn: int, limits: Limits, stop: threading.Event, tell: Tell) -> bool:
        call = next(calls)
        if call == 1:  # the mirror goes beyond the snapshot before it is asked
            shop.database.execute("INSERT INTO customers VALUES (99, 'late')")
            shop.wait_until_equal("public.customers")
        published = publish_at(shop.config, lsn, limits, stop, tell)
        assert published == (call != 1)
        if call == 2:  # under this snapshot the table now looks empty
            shop.database.execute("TRUNCATE orders")
        return published

    monkeypatch.setattr(verify_module, "publish_at", disturbed)
    with shop.capturing(), shop.mirroring("public.customers"):
        found = verify(shop, "customers", "orders")
    assert next(calls) == 4
    assert found.equal
    assert found.lsns["public.customers"] < found.lsns["public.orders"] == found.lsn
    assert (found.tables["public.customers"].source_rows, found.tables["public.orders"].source_rows) == (21, 0)


def test_a_table_that_is_altered_while_verify_waits_is_found_equal(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a new column, which the snapshot does not have; by another name of a column; shortly before, unseen as yet."""
    rounds = itertools.count(1)

    def altered(config: object, lsn: int, limits: Limits, stop: threading.Event, tell: Tell) -> bool:
        published = publish_at(shop.config, lsn, limits, stop, tell)
        if published and next(rounds) == 1:
            shop.database.execute(
                "ALTER TABLE customers ADD COLUMN later int DEFAULT 7",
                "ALTER TABLE orders RENAME COLUMN note TO remark",
            )
        return published

    monkeypatch.setattr(verify_module, "publish_at", altered)
    with shop.capturing(), shop.mirroring("public.customers", "public.empty"):
        shop.database.execute("ALTER TABLE empty ADD COLUMN before int", "DROP TABLE visits")
        found = verify(shop, "customers", "orders", "empty", "visits")
    seen = {name: (comparison.examples, comparison.problems) for name, comparison in found.tables.items()}
    assert seen == dict.fromkeys(("public.customers", "public.orders", "public.empty"), ((), ()))
    assert (found.not_covered, found.gone) == ({}, ["public.visits"])
    assert found.equal
    assert found.lsns["public.customers"] < found.lsns["public.orders"], "it needed no other snapshot"


def test_each_thing_that_is_missing_is_named(shop: Shop) -> None:
    quick = Limits(capture_s=0.1, mirror_s=1.0, point_s=1.0, snapshot_s=1.0)
    with shop.capturing():
        with pytest.raises(ConfigurationError, match=r"no table nonsense.*\n.*public\.orders"):
            known_tables(shop.config, ["nonsense"])
        with pytest.raises(NotRunningError, match="no mirror runs on the log in"):
            check_running(shop.config, quick, threading.Event())
        with pytest.raises(NotRunningError, match="no mirror runs on the log in"):
            verify(shop, limits=quick)
        with shop.database.connect() as other:
            other.autocommit = False
            other.execute("INSERT INTO customers VALUES (500, 'open')")
            with pytest.raises(TransientError, match=f"server process {other.info.backend_pid} ") as waiting:
                verify(shop, limits=quick)
            assert "pg_terminate_backend" in waiting.value.remedy
            other.rollback()
    with pytest.raises(NotRunningError, match="the capture does not run") as nobody:
        check_running(shop.config, quick, threading.Event())
    assert nobody.value.exit_code == 2
    assert barriers(shop.config.log_path) == []
    with psycopg.connect(shop.database.dsn) as connection:
        slots = connection.execute("SELECT slot_name FROM pg_replication_slots WHERE temporary").fetchall()
    assert slots == []

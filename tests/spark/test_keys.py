"""Keys of unusual types and values: a mirror follows them, or refuses them by name before anything is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from pgtide.errors import TableError
from pgtide.local import LocalPostgres
from pgtide.log.reader import LogRows
from pgtide.replication.connect import connect
from pgtide.snapshot.copy_range import StartAgain
from pgtide.snapshot.table_ranges import cut
from pgtide.spark.keys import UnusableKey
from pgtide.spark.new_pair import distinct_keys
from pgtide.spark.source_rows import errors_of_workers, rows_here, source_table
from tests.database import Database, create_database, drop_database
from tests.snapshot.exported import exported_snapshot
from tests.spark.logs import offset_rows, table_shape, update
from tests.spark.shop import Shop, open_shop
from tests.spark.test_verify import verify
from tests.waiting import wait_for


def loaded(database: Database, table: str) -> list[dict[str, Any]]:
    """Its rows as a load reads them."""
    with exported_snapshot(database, table) as (snapshot, oid), connect(database.dsn, timeout_s=10) as reader:
        source = source_table(reader, oid, snapshot, ())
        rows = rows_here(reader, source, cut(reader, source, 1 << 20))
    assert rows is not None
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


@pytest.mark.parametrize(
    ("type_name", "value", "held"),
    [
        ("date", "infinity", "9999-12-31"),
        ("timestamp", "0044-03-15 12:00:00 BC", "0001-01-01 00:00:00"),
        ("timestamptz", "10000-01-01 00:00:00+00", "9999-12-31 00:00:00+00"),
        ("numeric(8,2)", "NaN", "0"),
        ("daterange", "[2024-01-01,infinity)", "[2024-01-01,)"),
        ("int[]", "{{1,2}}", "{1,2}"),
    ],
)
def test_load_refuses_keys_that_the_lake_cannot_hold_and_such_values_only_there(
    database: Database, type_name: str, value: str, held: str
) -> None:
    database.execute(
        f"CREATE TABLE t (id int, k {type_name}, other {type_name}, PRIMARY KEY (id, k))",
        f"INSERT INTO t VALUES (1, '{held}', '{value}')",
    )
    assert len(loaded(database, "t")) == 1
    database.execute(f"INSERT INTO t VALUES (1, '{value}', '{held}')")
    with pytest.raises(UnusableKey, match=r"public\.t\.k: a key has a value that the lake's type cannot hold") as error:
        loaded(database, "t")
    assert "Correct the row in the source" in error.value.remedy


def test_what_is_loaded_is_not_brought_over_a_key_that_cannot_be_held() -> None:
    """The row may be mended by now: the table is read again, and refused then if it is not."""
    shape = table_shape(key=("id", "region"))
    rows = offset_rows(shape, [update(shape, old_key={"id": 1, "region": None}, id=1, region="mended")])
    rows = rows.append_column("_old._text.c2", pa.array(["infinity"]))
    with pytest.raises(StartAgain, match="a key has a value"):
        distinct_keys(shape, [LogRows(shape, rows)])


def test_error_of_a_worker_keeps_its_remedy() -> None:
    raised = str(UnusableKey("public.t.k: not held.", remedy="Mend it."))
    text = f"\n  An exception was thrown\nTraceback (most recent call last):\npgtide.spark.keys.UnusableKey: {raised}\n"
    with pytest.raises(UnusableKey) as error, errors_of_workers("public.t"):
        raise PythonException(text)
    assert str(error.value) == raised
    with pytest.raises(TableError) as without, errors_of_workers("public.t"):
        raise PythonException("pgtide.errors.TableError: it broke\n\nJVM stacktrace:\nat java")
    assert str(without.value) == "public.t: it broke"


TABLES = [
    "CREATE TYPE place AS (town text, since date)",
    "CREATE TABLE spans (room int, during tstzrange, body text, n int DEFAULT 0, PRIMARY KEY (room, during))",
    "ALTER TABLE spans ALTER body SET STORAGE EXTERNAL",
    """INSERT INTO spans
    SELECT n % 5, tstzrange(day, CASE WHEN n % 3 > 0 THEN day + interval '1 day' END), repeat('large ' || n, 1000)
    FROM generate_series(1, 30) n,
         LATERAL (SELECT timestamptz '2024-01-01 UTC' + n * interval '1 day 0.000001 s' AS day) d""",
    "INSERT INTO spans VALUES (1, 'empty', 'empty'), (1, '(,)', 'all')",
    "CREATE TABLE lists (k text[] PRIMARY KEY, v int)",
    "INSERT INTO lists VALUES ('{}', 0), ('{a}', 1), ('{a,NULL}', 2), ('{NULL}', 3), ('{\"a, b\"}', 4), ('{a,b}', 5)",
    "CREATE TABLE places (k place PRIMARY KEY, v int)",
    "INSERT INTO places VALUES ('(a,2024-02-29)', 1), ('(a,)', 2), ('(,)', 3), ('(b,2024-02-29)', 4)",
    "CREATE EXTENSION hstore",
    "CREATE TABLE tagged (tags hstore PRIMARY KEY, v int)",
    "CREATE TABLE ends (id int, valid_to date, v text, PRIMARY KEY (id, valid_to))",
    "INSERT INTO ends VALUES (1, 'infinity', 'clamped'), (1, '9999-12-31', 'last'), (2, '2024-01-01', 'some')",
]
NESTED = ("spans", "lists", "places")


@pytest.fixture
def shop(server_of: Callable[[int], LocalPostgres], spark: SparkSession, tmp_path: Path) -> Iterator[Shop]:
    """On a server that has hstore."""
    database = create_database(server_of(17))
    opened = open_shop(database, spark, tmp_path)
    database.execute(*TABLES)
    yield opened
    drop_database(database)


def parked(shop: Shop, table: str) -> str:
    return str(shop.told().get(table, {}).get("error") or "")


@pytest.mark.timeout(600)
def test_nested_keys_are_followed_and_such_that_the_lake_cannot_hold_park_their_table(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.spark.source_rows._DRIVER_BYTES", 0)  # errors come from executors
    cannot = "public.ends.valid_to: a key has a value that the lake's type cannot hold.\nCorrect the row"
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal("public.customers")
        for day in ("2 days", "3 days"):
            shop.database.execute(
                "UPDATE spans SET n = n + 1 WHERE room < 3",  # the body stays as it was
                f"UPDATE spans SET during = tstzrange(lower(during), lower(during) + interval '{day}') WHERE room = 3",
                "DELETE FROM spans WHERE upper_inf(during) AND room = 4",
                "UPDATE lists SET k = k || '{c}'::text[], v = v + 10 WHERE v % 10 < 4",
                "DELETE FROM lists WHERE k = '{\"a, b\"}'",
                "INSERT INTO lists VALUES ('{\"a, b\"}', 9)",
                "UPDATE places SET k = ('c', (k).since)::place WHERE (k).town = 'a' AND v = 2",
                "UPDATE places SET v = v + 10",
            )
            found = verify(shop, *(f"public.{name}" for name in NESTED))
            assert found.not_covered == {}
            assert {name: (one.examples, one.problems) for name, one in found.tables.items()} == {
                f"public.{name}": ((), ()) for name in NESTED
            }
            monkeypatch.setattr("pgtide.spark.apply.DRIVER_ROWS", 0)  # then once more, folded by executors
        wait_for(lambda: parked(shop, "public.ends").startswith(cannot), limit_s=60, what="the load to be refused")
        assert "tagged.tags: Spark cannot compare keys of type hstore.\nChoose another key" in parked(
            shop, "public.tagged"
        )
        assert not shop.is_covered("public.ends")
        assert not shop.is_covered("public.tagged")
        shop.database.execute("UPDATE ends SET valid_to = '2030-01-01', v = 'mended' WHERE v = 'clamped'")
        wait_until_equal("public.ends")
        shop.database.execute("INSERT INTO ends VALUES (3, '-infinity', 'refused')")
        wait_for(lambda: parked(shop, "public.ends").startswith(cannot), limit_s=60, what="the change to be refused")
        assert parked(shop, "public.ends").endswith("pgtide snapshot start public.ends --type bulk")

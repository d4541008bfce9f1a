"""`pgtide verify` and `pgtide points` as programs, beside a pipeline that runs and after it has ended."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.cli.verify import as_object, as_text
from pgtide.spark.comparison import Comparison, Difference
from pgtide.spark.verify import Verified
from tests.cli.program import run
from tests.database import Database
from tests.spark.shop import open_shop


@pytest.mark.timeout(600)
def test_verify_and_points_tell_programs_and_people_what_is_so(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    shop = open_shop(database, spark, tmp_path)
    with shop.capturing(), shop.mirroring("public.customers"):
        spark.sql(f"UPDATE lake.{shop.config.mirror.namespace}.customers SET name = '' WHERE id = 3")
        done = run("verify", "customers", "public.orders", "--json", folder=tmp_path)
        refused = run("verify", "--catch-up", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "public.orders: 3,000 rows, equal" in done.stderr, "progress is told while it goes on"
    found = json.loads(done.stdout)
    assert (found["equal"], found["not_covered"], list(found["tables"])) == (
        False, [], ["public.customers", "public.orders"],
    )  # fmt: skip
    assert found["tables"]["public.orders"] == {
        "source_rows": 3000, "mirror_rows": 3000, "missing": 0, "extra": 0, "differing": 0, "examples": [],
        "problems": [], "lsn": found["lsn"],
    }  # fmt: skip
    assert found["tables"]["public.customers"]["examples"] == [
        {"kind": "differing", "key": {"id": "3"}, "source": {"name": "customer 3"}, "mirror": {"name": ""}, "rows": 1}
    ]
    assert (refused.returncode, "a capture runs already" in refused.stderr) == (2, True)

    with ThreadPoolExecutor(1) as beside:  # starts Spark while the next ones wait for a capture
        listing = beside.submit(run, "points", "list", "--limit", "2", "--json", folder=tmp_path)
        alone = run("verify", folder=tmp_path)
        unknown = run("verify", "nonsense", folder=tmp_path)
        listed = listing.result()
    assert alone.returncode == 2
    assert "the capture does not run" in alone.stderr
    assert "pgtide verify --catch-up" in alone.stderr
    assert (unknown.returncode, "no table nonsense" in unknown.stderr) == (2, True)

    assert listed.returncode == 0, listed.stderr
    newest, before = json.loads(listed.stdout)
    assert newest["lsn"] == found["lsn"]
    assert newest["offset"] >= before["offset"]
    assert newest["tables"].keys() == {"public.customers", "public.orders", "public.empty"}
    assert newest["not_covered"] == []
    assert newest["tables"]["public.customers"] != before["tables"]["public.customers"]

    database.execute("INSERT INTO orders VALUES (5000, 1, NULL)", "DELETE FROM orders WHERE id = 1")
    caught_up = run("verify", "--catch-up", "orders", folder=tmp_path)
    assert caught_up.returncode == 0, caught_up.stderr
    assert caught_up.stdout.startswith("Equal at ")
    assert caught_up.stdout.endswith(": 1 table, 3,000 rows.\n")


AGAIN = "see below what to do, then verify again"
EQUAL = Comparison(5, 5, missing=0, extra=0, differing=0)
DIFFERENT = replace(EQUAL, differing=1, examples=(Difference("differing", {"id": "3"}, {"n": "1"}, {"n": "x" * 300}),))


@pytest.mark.parametrize(
    ("tables", "not_covered", "equal", "first_line"),
    [
        ({"a": EQUAL, "b": EQUAL}, {}, True, "Equal at 0/10: 2 tables, 10 rows."),
        (
            {"a": EQUAL},
            {"b": "it is parked. See why: pgtide status"},
            False,
            f"NOT proven equal at 0/10: 1 table was not compared; {AGAIN} (1 table, 5 rows: equal).",
        ),
        (
            {},
            {"a": "parked", "b": "locked"},
            False,
            f"NOT proven equal at 0/10: 2 tables were not compared; {AGAIN}.",
        ),
        ({"a": DIFFERENT, "b": EQUAL}, {}, False, "NOT equal at 0/10: 1 table of 2 differs."),
        (
            {"a": DIFFERENT},
            {"b": "parked"},
            False,
            f"NOT equal at 0/10: 1 table of 1 differs, and 1 table was not compared; {AGAIN}.",
        ),
        ({}, {}, False, "NOT equal at 0/10: there was no table to compare."),
    ],
)
def test_nothing_is_called_equal_that_was_not_compared(
    tables: dict[str, Comparison], not_covered: dict[str, str], equal: bool, first_line: str
) -> None:
    verified = Verified(16, tables, dict.fromkeys(tables, 16), not_covered, gone=["c"])
    told = as_object(verified)
    assert (told["equal"], told["not_covered"], told["gone"]) == (equal, sorted(not_covered), ["c"])
    first, *others = as_text(verified)
    assert first == first_line
    assert [line for line in others if "was not compared" in line] == [
        f"{name} was not compared: {reason}" for name, reason in sorted(not_covered.items())
    ]
    assert ("Long values are cut; all of them: pgtide verify --json" in others) == (tables.get("a") is DIFFERENT)

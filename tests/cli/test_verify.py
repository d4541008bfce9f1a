"""`pgtide verify` and `pgtide points` as programs, beside a pipeline that runs and after it has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

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

    alone = run("verify", folder=tmp_path)
    assert alone.returncode == 2
    assert "the capture does not run" in alone.stderr
    assert "pgtide verify --catch-up" in alone.stderr
    unknown = run("verify", "nonsense", folder=tmp_path)
    assert (unknown.returncode, "no table nonsense" in unknown.stderr) == (2, True)

    listed = run("points", "list", "--limit", "2", "--json", folder=tmp_path)
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

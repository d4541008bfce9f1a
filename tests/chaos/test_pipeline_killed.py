"""The whole pipeline, killed at the kill points of load and mirror in turn: in the end every table equals its source.

One chain of runs over one database, under traffic from before the first start: each run is `pgtide run` as a child
that dies at its point, the next one goes on from what that left.  Starting Spark takes most of the time, so most
points have their turn here only in the heavy run; tests/spark kills at each of the mirror's on a log written by hand.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import pgtide
from pgtide import failpoints, local
from tests.capture.test_crashes import kill_points as capture_points
from tests.capture.test_crashes import traffic
from tests.database import Database, create_database
from tests.redo.test_crashes import OWN as REDO
from tests.spark.seeded_writes import NAMES, TABLES, writing

# In the order in which a first start and the batches after it reach them.
LOAD = (
    "mirror.table.created",
    "load.table.begun",
    "load.range.appended",
    "load.carried.over",  # each run has a snapshot of its own
    "load.table.closed",
    "load.finished",
)
BATCH = (
    "mirror.branch.created",
    "mirror.merged",
    "mirror.forwarded",
    "mirror.point.ready",
    "mirror.point.published",
    "mirror.reported",
)
# Reached when a table that has rows is loaded anew: test_joining.py and test_soft_reload.py kill at each of them.
ANEW = ("load.beside.begun", "load.deleted.kept", "load.taken_over")
# Reached when a round of upkeep is due: tests/spark kills at each of them.
UPKEEP = ("mirror.points.pruned", "mirror.upkeep.compacted", "mirror.upkeep.expired")
# Reached when a table was altered: the same.
ALTER = ("mirror.altering", "mirror.altered")

_DEATH_LIMIT_S = 300


def all_points() -> set[str]:
    for module in pkgutil.walk_packages(pgtide.__path__, "pgtide."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return set(failpoints.declared())


def configured(database: Database, folder: Path) -> Path:
    file = folder / "pgtide.toml"
    file.write_text(
        f'[source]\ndsn = "{database.dsn}"\nslot = "{database.name}"\n[log]\npath = "log"\n'
        '[mirror]\nwarehouse = "lake"\ntrigger_seconds = 0.1\n'
        "[snapshot]\nrange_bytes = 8192\nconnections = 2\n"  # four ranges to a commit, more to a table
    )
    return file


def run_pgtide(config: Path, *arguments: str, points: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-m", "pgtide", "run", "--config", str(config), *arguments],
        env=os.environ | {failpoints.ENVIRONMENT_VARIABLE: points},
        capture_output=True,
        text=True,
        timeout=_DEATH_LIMIT_S,
        check=False,
    )
    if points:
        assert done.returncode == -signal.SIGKILL, f"{points} was not reached:\n{done.stderr}"
    else:
        assert done.returncode == 0, done.stderr
    return done.returncode


def source(database: Database, table: str) -> list[tuple[Any, ...]]:
    return database.rows(f"SELECT id, n, note FROM {table} ORDER BY id")


def mirror(spark: SparkSession, warehouse: Path, table: str) -> list[tuple[Any, ...]]:
    rows = spark.read.format("iceberg").load(str(warehouse / "public" / table)).select("id", "n", "note")
    return [tuple(row) for row in rows.orderBy("id").collect()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("load.range.appended", "load.carried.over"), id="load"),
        pytest.param((*LOAD, *BATCH), id="load and mirror", marks=pytest.mark.heavy),
    ],
)
def test_pipeline_killed_at_point_after_point(
    points: tuple[str, ...], database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    for table in "ab":
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int, note text)",
            f"INSERT INTO {table} SELECT -i, i, repeat('before', 20) FROM generate_series(1, 500) i",
        )
    config = configured(database, tmp_path)
    with traffic(database, pause_s=0.02):
        for point in points:
            run_pgtide(config, points=f"{point}=kill")
    run_pgtide(config, "--until-caught-up")
    for table in "ab":
        assert mirror(spark, tmp_path / "lake", table) == source(database, table), table


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_load_under_seeded_writes_killed_at_every_point_and_with_its_server(
    tmp_path: Path, spark: SparkSession
) -> None:
    """After every second kill of the pipeline the server is killed as well; writes go on from before until after."""
    with local.postgres() as server:
        database = create_database(server)
        database.execute(*TABLES)
        config = configured(database, tmp_path)
        with writing(database, seed=20261116):
            for number, point in enumerate(LOAD):
                run_pgtide(config, points=f"{point}=kill")
                if number % 2:
                    server.kill()
                    server.start()
        run_pgtide(config, "--until-caught-up")
        for name in NAMES:
            table = name.partition(".")[2]
            rows = spark.read.format("iceberg").load(str(tmp_path / "lake" / "public" / table)).collect()
            assert sorted(map(tuple, rows)) == sorted(database.rows(f"SELECT * FROM {table}")), name


def test_every_kill_point_is_visited_by_a_crash_test() -> None:
    assert all_points() == {*capture_points(), *LOAD, *ANEW, *BATCH, *REDO, *UPKEEP, *ALTER}

"""pgbench at a fixed rate, captured and mirrored while processes die: at every point that was published, the sums of
its four tables agree in the lake, and in the end the mirror is found equal to the source."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide.config import Config, load_config
from pgtide.log.reader import LogReader
from pgtide.spark.mirror import Mirror
from pgtide.spark.request_point import Limits
from pgtide.spark.verify import Verified, Verifier, known_tables
from tests.capture.running import CaptureProcess
from tests.chaos import pgbench
from tests.database import Database
from tests.spark.shop import beside
from tests.waiting import wait_for

SOME_CHANGES = 2 * 4 * pgbench.RATE_PER_S  # two seconds' worth, four to a transaction


def configured(database: Database, spark: SparkSession, folder: Path) -> Config:
    warehouse = spark.conf.get("spark.sql.catalog.lake.warehouse")
    file = folder / "pgtide.toml"
    file.write_text(
        f'[source]\ndsn = "{database.dsn}"\nslot = "{database.name}"\n'
        f'[mirror]\nwarehouse = "{warehouse}"\nnamespace = "{database.name}"\ntrigger_seconds = 0.1\n'
    )
    return load_config(file)


def verified(spark: SparkSession, config: Config) -> Verified:
    verifier = Verifier(spark, config, Limits(mirror_s=120), threading.Event(), lambda what: None)
    return verifier.verify(known_tables(config, ()))


def ended(process: subprocess.Popen[Any]) -> bool:
    return process.poll() is not None


def reported(config: Config) -> dict[str, Any]:
    file = config.log_path / "readers" / "mirror.json"
    return json.loads(file.read_text()) if file.exists() else {"point": None, "tables": {}}


def point_offset(config: Config) -> int:
    """Of the newest point that the mirror has reported; -1 if there is none."""
    point = reported(config)["point"]
    return int(point["offset"]) if point else -1


def covers_all(config: Config) -> bool:
    """Also those of which the log did not know yet when the mirror began."""
    streaming = {name for name, table in reported(config)["tables"].items() if table["state"] == "streaming"}
    return point_offset(config) >= 0 and streaming == pgbench.SUMMED.keys()


def parked(config: Config) -> dict[str, str]:
    return {name: table["error"] for name, table in reported(config)["tables"].items() if table["error"]}


def new_points(config: Config, count: int) -> Callable[[], bool]:
    """Whether the mirror has reported that many points since now."""
    seen = {point_offset(config)}

    def enough() -> bool:
        seen.add(point_offset(config))
        return len(seen) > count

    return enough


def log_grown(config: Config, changes: int) -> Callable[[], bool]:
    """Whether the log has that many changes more than now."""
    reader = LogReader(config.log_location)
    end_offset = reader.end().end_offset
    return lambda: reader.end().end_offset >= end_offset + changes


def check_books(spark: SparkSession, config: Config, database: Database) -> None:
    """Everything that must be true of the points, after the traffic has ended and the mirror has caught up."""
    read = pgbench.books(spark, config)
    assert pgbench.unbalanced(read) == {}
    newest = next(iter(read.values()))
    transactions, total = database.rows("SELECT count(*), sum(delta) FROM pgbench_history")[0]
    assert newest["public.pgbench_history"] == (transactions, total)
    on_the_way = {
        tables["public.pgbench_history"] for tables in read.values() if tables.keys() == pgbench.SUMMED.keys()
    }
    assert len(on_the_way) >= 4, "points that cover all tables were published on the way"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [20, pytest.param(180, marks=pytest.mark.heavy)])
def test_every_point_balances_while_captures_are_killed(
    seconds: int, database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pgbench.initialise(database)
    config = configured(database, spark, tmp_path)
    capture = CaptureProcess(config)
    wait_for((config.log_path / "log.json").exists, what="the log")
    try:
        with beside(Mirror(spark, config).run) as failed:
            wait_for(lambda: failed() or covers_all(config), limit_s=180, what="the load")
            kills, enough_points, began_s = 0, new_points(config, 4), time.monotonic()
            with pgbench.running(database) as traffic:
                while time.monotonic() - began_s < seconds or kills < 2 or not enough_points():
                    grown = log_grown(config, SOME_CHANGES)
                    wait_for(
                        lambda: failed() or ended(traffic) or grown(),  # noqa: B023
                        limit_s=60,
                        what="the log to grow",
                    )
                    assert not failed()
                    assert parked(config) == {}
                    assert not ended(traffic), traffic.stdout and traffic.stdout.read()
                    capture.kill()
                    kills += 1
                    capture = CaptureProcess(config)
            found = verified(spark, config)
        check_books(spark, config, database)
        assert found.equal, found
        assert found.tables.keys() == pgbench.SUMMED.keys()
    finally:
        capture.kill()


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_point_balances_while_the_whole_pipeline_is_killed(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    """Capture and driver are one process here, killed each time after it has published a few points."""
    pgbench.initialise(database)
    config = configured(database, spark, tmp_path)
    command = [sys.executable, "-m", "pgtide", "run", "--config", str(config.file)]
    kills, began_s = 0, time.monotonic()
    with (tmp_path / "run.out").open("ab") as output, pgbench.running(database) as traffic:
        while time.monotonic() - began_s < 180 or kills < 5:
            with subprocess.Popen(command, stdout=output, stderr=output) as pipeline:
                try:
                    advanced = new_points(config, kills % 4 + 1)
                    wait_for(
                        lambda: ended(traffic) or ended(pipeline) or advanced(),  # noqa: B023
                        limit_s=300,
                        what="points",
                    )
                    assert not ended(pipeline), (tmp_path / "run.out").read_text()
                    assert not ended(traffic), traffic.stdout and traffic.stdout.read()
                finally:
                    pipeline.kill()
            kills += 1
    capture = CaptureProcess(config)
    try:
        with beside(Mirror(spark, config).run):
            found = verified(spark, config)
    finally:
        capture.stop()
    check_books(spark, config, database)
    assert found.equal, found

"""The numbers of a running capture, over HTTP and in `status`, and the warning when the WAL limit is near."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from pgtide import local
from pgtide.capture import watch
from pgtide.capture.reference import metrics_page
from pgtide.config import Capture as CaptureSection
from pgtide.config import Config
from tests.arming import armed
from tests.capture.running import capturing, configuration, wait_until_captured
from tests.cli.program import run
from tests.database import Database, create_database
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY, note text)"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measured(database: Database, folder: Path) -> Config:
    config = configuration(database, folder)
    return config.model_copy(update={"capture": CaptureSection(metrics_port=free_port())}).at(config.file)


def metrics(config: Config) -> dict[str, float]:
    shown = urllib.request.urlopen(f"http://127.0.0.1:{config.capture.metrics_port}/metrics").read().decode()
    lines = [line.rsplit(" ", 1) for line in shown.splitlines() if not line.startswith("#")]
    return {name.removeprefix("pgtide_"): float(value) for name, value in lines}


def metrics_when(config: Config, condition: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
    def found() -> dict[str, float]:
        now = metrics(config)
        return now if condition(now) else {}

    return wait_for(found, what=what)


def server_time_s(database: Database) -> float:
    return float(database.rows("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0])


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of the counters: several captures of one test run share the process."""
    return {name: after[name] - before[name] for name in after if name.endswith(("_total", "_count", "_sum"))}


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgtide.capture.watch.INTERVAL_S", 0.05)


def test_rows_bytes_transactions_and_flushes_are_counted(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = measured(database, tmp_path)
    with capturing(config):
        before, began_s = metrics(config), server_time_s(database)
        database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 100) i", "DELETE FROM t WHERE id < 11")
        wait_until_captured(database, config)
        after = metrics_when(
            config,
            lambda now: now["capture_last_commit_timestamp_seconds"] > began_s and now["capture_lag_bytes"] == 0,
            "the numbers to follow",
        )
    grown = growth(before, after)
    assert grown["capture_rows_total"] == 110
    assert grown["capture_transactions_total"] == 2
    assert grown["capture_bytes_total"] > 110 * 10
    assert 1 <= grown["capture_flush_seconds_count"] <= 2
    assert grown["capture_flush_seconds_sum"] > 0
    assert after["capture_streaming"] == 1
    assert after["capture_durable_lsn"] > 0
    assert after["capture_lag_seconds"] == 0
    assert after["slot_retained_wal_bytes"] >= 0
    assert after["slot_safe_wal_bytes"] == -1
    assert after["capture_last_commit_timestamp_seconds"] < server_time_s(database)


def test_lag_grows_while_the_log_cannot_be_written_and_goes_when_it_can(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = measured(database, tmp_path)
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1)")
        wait_until_captured(database, config)
        with armed("log.block.written=fail:ENOSPC"):
            database.execute("INSERT INTO t VALUES (2)")
            lagging = metrics_when(config, lambda now: now["capture_lag_seconds"] > 0.5, "the lag to be shown")
        assert lagging["capture_lag_bytes"] > 0
        wait_for(lambda: metrics(config)["capture_lag_seconds"] == 0, what="the lag to go")


def test_lag_after_a_restart_counts_from_the_last_durable_commit(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = measured(database, tmp_path)
    name, began_s = "capture_last_commit_timestamp_seconds", server_time_s(database)
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1)")
        committed = metrics_when(config, lambda now: now[name] > began_s, "the commit")[name]
    watch.last_commit.set(0)  # as in a process of its own
    with capturing(config):
        known_again = metrics_when(config, lambda now: now[name] > 0, "a commit to be known again")[name]
    assert known_again == committed


def test_status_shows_what_the_running_capture_says(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = measured(database, tmp_path)
    (tmp_path / "pgtide.toml").write_text(
        f'[source]\ndsn = {json.dumps(database.dsn)}\nslot = "{database.name}"\n[log]\npath = "log"\n'
        f"[capture]\nmetrics_port = {config.capture.metrics_port}\n"
    )
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1)")
        wait_until_captured(database, config)
        found = json.loads(run("status", "--json", folder=tmp_path).stdout)
        shown = run("status", folder=tmp_path).stdout
    assert found["capture"]["rows"] >= 1
    assert found["capture"]["transactions"] >= 1
    assert found["capture"]["bytes"] > 0
    assert found["capture"]["flush_seconds_mean"] > 0
    assert found["source"]["safe_wal_bytes"] is None
    assert "ms per flush" in shown


def test_a_wal_limit_that_is_near_is_said_once_and_measured(tmp_path: Path) -> None:
    with local.postgres(max_slot_wal_keep_size="128MB") as server:
        database = create_database(server)
        database.execute(TABLE)
        config = measured(database, tmp_path)
        with capturing(config) as states, database.connect(autocommit=False) as holder:
            wait_for(lambda: metrics(config)["slot_safe_wal_bytes"] > 0, what="the limit to be known")
            assert not [state for state in states if "WAL limit" in state.detail]
            holder.execute("INSERT INTO t VALUES (1)")  # open: the server keeps all WAL since then

            def said() -> bool:
                database.execute("SELECT pg_logical_emit_message(false, 'x', 'x')", "SELECT pg_switch_wal()")
                return any("the WAL limit is near" in state.detail for state in states)

            wait_for(said, what="the warning")
            found = metrics(config)
            assert found["slot_safe_wal_bytes"] < (128 << 20) / 4 + (16 << 20)
            assert found["slot_retained_wal_bytes"] > 64 << 20
            assert len([state for state in states if "WAL limit" in state.detail]) == 1


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == metrics_page(), "run: python -m pgtide.capture.reference > docs/reference/metrics.md"

"""Status: all keys are always there, whatever is missing, and trouble shows in the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.cli.program import run, start
from tests.database import Database
from tests.waiting import wait_for

KEYS = {
    "source": {"wal_end_lsn", "confirmed_flush_lsn", "retained_wal_bytes", "slot_state", "safe_wal_bytes"},
    "capture": {
        "snapshot_trouble",
        "rows",
        "bytes",
        "transactions",
        "flushes",
        "flush_seconds_mean",
        "lag_bytes",
        "lag_seconds",
    },
    "log": {"durable_lsn", "last_commit_lsn", "end_offset", "segments", "bytes"},
    "lag": {"log_bytes", "log_seconds", "mirror_bytes", "mirror_seconds"},
    "points": {"latest_lsn", "error"},
    "tables": set(),
    "readers": set(),
    "snapshots": set(),
    "history": set(),
}


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    configure(tmp_path, database, database.dsn)
    return database


def configure(folder: Path, database: Database, dsn: str) -> None:
    (folder / "pgtide.toml").write_text(f'[source]\ndsn = {json.dumps(dsn)}\nslot = "slot_{database.name}"\n')


def status(folder: Path, *, exit_code: int = 0) -> dict[str, Any]:
    done = run("status", "--json", folder=folder)
    assert done.returncode == exit_code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for key, inner in KEYS.items():
        assert inner <= found[key].keys()
    return found


def test_before_anything_was_started_all_keys_are_there(tmp_path: Path, shop: Database) -> None:
    found = status(tmp_path)
    assert found["source"]["slot_state"] == "missing"
    assert found["source"]["wal_end_lsn"]
    assert found["log"]["durable_lsn"] is None
    assert found["lag"]["log_bytes"] is None
    assert not (tmp_path / "pgtide-data").exists()


def test_an_unreachable_server_is_told_and_the_rest_shown(tmp_path: Path, shop: Database) -> None:
    configure(tmp_path, shop, make_conninfo(shop.dsn, port=1, password="hunter2"))
    found = status(tmp_path, exit_code=1)
    assert found["source"]["slot_state"] == "unknown"
    assert "refused" in found["source"]["error"]
    assert "hunter2" not in json.dumps(found)


def test_a_running_capture_is_shown_with_its_lag(tmp_path: Path, shop: Database) -> None:
    capture = start("capture", folder=tmp_path)
    try:
        wait_for(lambda: status(tmp_path)["source"]["slot_state"] == "active", what="the capture to stream")
        shop.execute("INSERT INTO orders SELECT generate_series(1, 100)")
        found = wait_for(
            lambda: (now := status(tmp_path))["log"]["end_offset"] == 100 and now["lag"]["log_bytes"] == 0 and now,
            what="the rows in the log",
        )
        assert found["log"]["segments"] == 1
        assert found["log"]["bytes"] > 0
        assert found["lag"]["log_seconds"] == 0
        assert found["lag"]["mirror_bytes"] is None
    finally:
        capture.terminate()
        capture.communicate(timeout=30)


def write_mirror(folder: Path, **content: Any) -> None:
    readers = folder / "pgtide-data/log/readers"
    readers.mkdir(parents=True, exist_ok=True)
    (readers / "mirror.json").write_text(json.dumps(content))


def test_what_the_mirror_says_of_itself_is_shown(tmp_path: Path, shop: Database) -> None:
    streaming = {"state": "streaming", "rows_applied": 7, "applied_offset": 9, "error": None}
    write_mirror(
        tmp_path,
        offset=9,
        tables={"public.orders": streaming, "public.new": {"state": "loading"}},
        point={"lsn": "0/1500000", "offset": 9, "commit_timestamp": "2026-01-01T00:00:00+00:00"},
    )
    found = status(tmp_path)
    assert found["tables"]["public.orders"] == streaming
    assert found["tables"]["public.new"] == {
        "state": "loading", "rows_applied": None, "applied_offset": None, "error": None,
    }  # fmt: skip
    assert found["points"]["latest_lsn"] == "0/1500000"
    assert found["snapshots"].keys() == {"public.new"}
    assert found["readers"]["mirror"]["offset"] == 9


def test_a_parked_table_shows_in_text_and_exit_code(tmp_path: Path, shop: Database) -> None:
    parked = {"state": "parked", "rows_applied": 7, "applied_offset": 9, "error": "column [x] is too wide"}
    write_mirror(tmp_path, offset=9, tables={"public.orders": parked}, point=None)
    done = run("status", folder=tmp_path)
    assert done.returncode == 1
    for word in ("public.orders", "parked", "column [x] is too wide", "slot missing"):
        assert word in done.stdout


def test_trouble_of_upkeep_is_shown_and_needs_nobody(tmp_path: Path, shop: Database) -> None:
    write_mirror(tmp_path, offset=9, tables={}, point=None, upkeep={"errors": {"public.orders": "disk [1] full"}})
    done = run("status", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "public.orders: compaction or expiry failed, and will be tried again: disk [1] full" in done.stdout

"""The capture's own clock goes backwards while it runs: what arrives, and in which order, does not change."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.capture.running import capturing, changes, configuration, replayed, source_rows, wait_until_captured
from tests.database import Database

HOUR_NS = 3600 * 10**9


def test_with_a_clock_that_goes_backwards_everything_arrives_once_and_in_order(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = configuration(database, tmp_path)
    looks = itertools.count()
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000 * 10**9 - next(looks) * HOUR_NS)
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9)
    for start in range(2):
        with capturing(config):
            for number in range(5):
                key = 10 * start + number
                database.execute(
                    f"INSERT INTO t VALUES ({key})", f"SELECT pg_logical_emit_message(false, 'm', '{key}')"
                )
                reader = wait_until_captured(database, config)
    assert next(looks) > 20, "the clock was looked at"
    assert replayed(reader, "public.t") == source_rows(database, "t")
    messages = changes(reader, "pgtide.messages")
    assert [row["content"] for row in messages] == [str(key).encode() for key in (*range(5), *range(10, 15))]
    assert len({row["_commit_timestamp"] for row in messages}) == 10, "each has the time at which it was received"
    rows = sorted(changes(reader, "public.t") + messages, key=lambda row: int(row["_offset"]))
    assert [row["_offset"] for row in rows] == list(range(20))
    lsns = [row["_commit_lsn"] for row in rows]
    assert lsns == sorted(lsns)

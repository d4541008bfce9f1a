"""Two captures on one log: one that was stopped comes back when another has taken over, and does no harm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pgtide.config import Config
from pgtide.log.reader import LogReader
from tests.capture.running import (
    CaptureProcess,
    capturing,
    changes,
    configuration,
    replayed,
    source_rows,
    wait_until_captured,
)
from tests.capture.test_crashes import TABLES, slot_is_active, traffic
from tests.database import Database
from tests.waiting import wait_for

BACKENDS = """SELECT active_pid FROM pg_replication_slots WHERE database = current_database() AND active UNION ALL
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


@pytest.fixture
def prepared(database: Database) -> Database:
    for table in TABLES:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n int, note text)")
    return database


def end_connections(database: Database) -> None:
    """As an administrator would who wants the slot free; the stopped capture cannot notice."""
    database.rows(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) AS backends (pid)")
    wait_for(lambda: not database.rows(BACKENDS), what="slot and lock to be free")


def check_equal(database: Database, reader: LogReader) -> None:
    for table in TABLES:
        assert replayed(reader, f"public.{table}") == source_rows(database, table)
    offsets = sorted(row["_offset"] for table in TABLES for row in changes(reader, f"public.{table}"))
    assert offsets == list(range(len(offsets)))


@contextmanager
def first_capture(config: Config, database: Database, failpoints: str = "") -> Iterator[CaptureProcess]:
    with capturing(config):
        pass
    process = CaptureProcess(config, failpoints)
    try:
        wait_for(lambda: slot_is_active(database), what="the first capture to stream")
        yield process
    finally:
        process.kill()


def wait_for_the_end(process: CaptureProcess) -> str:
    """What it said; it must have ended by itself, with an error."""
    code = wait_for(process.returncode, what="the first capture to end")
    said = process.output.read_text()
    assert code == 1, said
    assert "Traceback" not in said
    return said


def test_a_capture_that_was_stopped_and_continued_gives_way_to_the_one_that_took_over(
    prepared: Database, tmp_path: Path
) -> None:
    config = configuration(prepared, tmp_path)
    with first_capture(config, prepared) as first, traffic(prepared):
        wait_for(lambda: LogReader(config.log_path).end().end_offset > 20, what="changes in the log")
        os.kill(first.pid, signal.SIGSTOP)
        end_connections(prepared)
        with capturing(config):
            wait_until_captured(prepared, config)
            os.kill(first.pid, signal.SIGCONT)
            said = wait_for_the_end(first)
            wait_until_captured(prepared, config)
    assert "another capture has taken over the log" in said
    with capturing(config):
        check_equal(prepared, wait_until_captured(prepared, config))


@pytest.mark.parametrize("point", ["log.block.fsynced", "log.marker.moved"])
def test_a_capture_that_was_stopped_while_it_wrote_finds_that_the_log_is_anothers(
    point: str, prepared: Database, tmp_path: Path
) -> None:
    """The other has ended again by then: lock and slot are free, and only the log itself tells."""
    config = configuration(prepared, tmp_path)
    go_on = tmp_path / "go-on"
    with first_capture(config, prepared, f"{point}=hold:{go_on}@3") as first:
        with traffic(prepared):
            wait_for(Path(f"{go_on}.held").exists, what="the first capture to come there")
            os.kill(first.pid, signal.SIGSTOP)
            end_connections(prepared)
            with capturing(config):
                taken = wait_until_captured(prepared, config).end().end_offset
        go_on.touch()
        os.kill(first.pid, signal.SIGCONT)
        said = wait_for_the_end(first)
    assert "another capture has taken over the log" in said
    assert LogReader(config.log_path).end().end_offset >= taken
    with capturing(config):
        check_equal(prepared, wait_until_captured(prepared, config))

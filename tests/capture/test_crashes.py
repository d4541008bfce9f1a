"""SIGKILL at every kill point of the capture, and a log that cannot be written: nothing lost, nothing twice."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import pgtide.capture.pipeline  # noqa: F401 - declares the kill points
from pgtide import failpoints
from pgtide.config import Config
from tests.arming import armed
from tests.capture.running import (
    CaptureProcess,
    capturing,
    changes,
    configuration,
    replayed,
    source_rows,
    wait_until_captured,
)
from tests.database import Database
from tests.waiting import wait_for

TABLES = ("a", "b")
OWN = ("log.", "capture.", "slot.", "start.", "spool.")

FIRST_START = ("slot.", "start.")

# Reached once in the life of a process.
ONCE = ("log.epoch.taken", "log.recovered", "log.segment.created")

# Reached only by a start that finds something to recover.
RECOVERY = ("log.recovery.copied", "log.recovery.named")

# Visited elsewhere: by test_streaming, which has transactions large enough, by test_two_phase, and by
# tests/cli/test_log.py.
LARGE = ("log.large.adopted", "log.large.written")
PREPARED = (
    "spool.prepared.synced",
    "spool.prepared.kept",
    "spool.commit.noted",
    "spool.prepared.ended",
    "spool.prepared.forgotten",
)
RETENTION = ("log.retention.recorded",)

# Visited by test_fence, where a table is published later.
FENCE = ("capture.fence.noted", "capture.fence.opened")

# Visited by test_alterations, where a table is altered.
ALTERATIONS = ("capture.alteration.noted",)

# Visited by test_reads, where tables are read into the log.
READS = ("capture.reads.begun", "capture.reads.range", "capture.reads.written", "capture.reads.noted")

# Visited by test_s3: those of the log on an object store.
ON_OBJECT_STORE = ("log.object.", "log.merge.")


def kill_points() -> list[str]:
    return [point for point in failpoints.declared() if point.startswith(OWN)]


def is_ordinary(point: str) -> bool:
    elsewhere = RECOVERY + LARGE + PREPARED + RETENTION + FENCE + ALTERATIONS + READS
    return not point.startswith(FIRST_START + ON_OBJECT_STORE) and point not in elsewhere


@contextmanager
def in_the_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=work, args=[stop])
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def unpublished_traffic(database: Database) -> AbstractContextManager[None]:
    """WAL that the slot has to pass without anything to deliver."""

    def write(stop: threading.Event) -> None:
        with database.connect() as connection:
            while not stop.wait(0.05):
                connection.execute("CREATE TABLE other.passing ()")
                connection.execute("DROP TABLE other.passing")

    database.execute("CREATE SCHEMA other")
    return in_the_background(write)


def traffic(database: Database, pause_s: float = 0.002) -> AbstractContextManager[None]:
    """Transactions over two tables, one after the other, until the end of the block."""

    def write(stop: threading.Event) -> None:
        with database.connect(autocommit=False) as connection:
            number = connection.execute("SELECT coalesce(max(id), 0) FROM a").fetchone()
            assert number is not None
            first = int(number[0])
            for step in itertools.count(first + 1):
                connection.execute("INSERT INTO a VALUES (%s, 1, 'new')", [step])
                connection.execute("INSERT INTO b VALUES (%s, %s, repeat('long', %s))", [step, step, step % 50])
                connection.execute("UPDATE a SET n = n + 1 WHERE id = %s", [step - 1])
                connection.execute("DELETE FROM b WHERE id = %s", [step - 5])
                connection.commit()
                if stop.wait(pause_s):
                    return

    return in_the_background(write)


@pytest.fixture
def prepared(database: Database) -> Database:
    for table in TABLES:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n int, note text)")
    return database


def check_log_equals_source(database: Database, folder: Path, config: Config | None = None) -> None:
    """A capture that is not disturbed catches up; then the changes alone must give the source's rows."""
    config = config or configuration(database, folder)
    process = CaptureProcess(config)
    wait_for(lambda: slot_is_active(database), what="the capture to stream")
    reader = wait_until_captured(database, config)
    process.stop()
    for table in TABLES:
        assert replayed(reader, f"public.{table}") == source_rows(database, table)
    offsets = sorted(row["_offset"] for table in TABLES for row in changes(reader, f"public.{table}"))
    assert offsets == list(range(len(offsets)))


@pytest.mark.parametrize("point", [point for point in kill_points() if point.startswith(FIRST_START)])
def test_first_start_killed_at(point: str, prepared: Database, tmp_path: Path) -> None:
    config = configuration(prepared, tmp_path, initial="bulk" if point == "start.snapshot.offered" else "none")
    for _ in range(2):  # the second start finds what the first has left, and dies at the same place if it comes there
        process = CaptureProcess(config, f"{point}=kill")
        wait_for(lambda: process.returncode() is not None or slot_is_active(prepared), what="death or streaming")  # noqa: B023
        process.kill()
    process = CaptureProcess(config)
    wait_for(lambda: slot_is_active(prepared), what="the capture to stream")
    with traffic(prepared):
        wait_until_captured(prepared, config)
    process.stop()
    check_log_equals_source(prepared, tmp_path)
    assert prepared.rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(1,)]


@pytest.mark.parametrize("point", [point for point in kill_points() if is_ordinary(point)])
def test_capture_killed_at(point: str, prepared: Database, tmp_path: Path) -> None:
    config = configuration(prepared, tmp_path)
    with capturing(config):
        pass
    disturbance = unpublished_traffic if point == "log.marker.idle" else traffic
    with disturbance(prepared):
        for count in (1, 3):
            process = CaptureProcess(config, f"{point}=kill@{count}")
            if count == 1 or not point.startswith(ONCE):
                process.wait_for_death()
            process.kill()
    check_log_equals_source(prepared, tmp_path)


def slot_is_active(database: Database) -> bool:
    """Whether the slot is read; while it is being made it has a process, too."""
    return bool(
        database.rows(
            "SELECT 1 FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid "
            "WHERE s.database = current_database() AND r.state IN ('catchup', 'streaming')"
        )
    )


@pytest.mark.parametrize("point", RECOVERY)
def test_capture_killed_while_it_recovers(point: str, prepared: Database, tmp_path: Path) -> None:
    config = configuration(prepared, tmp_path)
    with capturing(config):
        pass
    with traffic(prepared):
        CaptureProcess(config, "log.block.fsynced=kill@3").wait_for_death()
        CaptureProcess(config, f"{point}=kill").wait_for_death()
    check_log_equals_source(prepared, tmp_path)


@pytest.mark.parametrize("point", ["log.block.written", "log.segment.created", "log.marker.moved"])
def test_capture_goes_on_by_itself_after_the_disk_was_full(point: str, prepared: Database, tmp_path: Path) -> None:
    config = configuration(prepared, tmp_path)
    with armed(f"{point}=fail:ENOSPC@1"), capturing(config):
        with traffic(prepared):
            wait_until_captured(prepared, config)
        reader = wait_until_captured(prepared, config)
    for table in TABLES:
        assert replayed(reader, f"public.{table}") == source_rows(prepared, table)


def test_the_special_points_are_points() -> None:
    assert {*RECOVERY, *LARGE, *PREPARED, *RETENTION, *FENCE, *READS, *ONCE} < set(kill_points())

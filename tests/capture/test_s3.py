"""The capture with its log on S3: killed at every point, held up, without its store; nothing lost, nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pgtide import failpoints
from pgtide.cli.running import capture_status
from pgtide.config import Capture, Config, Log
from pgtide.local import LocalS3
from pgtide.log.check import check_log
from pgtide.log.control import offered_snapshot, request_snapshot, requested_snapshot
from pgtide.log.objects.merge import RUN, merge
from pgtide.log.objects.writer import ObjectLogWriter
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.log.storage import storage_at
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
from tests.capture.test_crashes import (
    ON_OBJECT_STORE,
    TABLES,
    check_log_equals_source,
    kill_points,
    slot_is_active,
    traffic,
    unpublished_traffic,
)
from tests.database import Database
from tests.log.building import contents, new_log, shape, transaction
from tests.waiting import wait_for

MERGE = ("log.merge.stored",)

# In an order in which each finds what it needs: after a kill at "created" there is something to find.
FIRST_START = ("start.slot.noted", "start.log.identified")
IN_TURN = (
    "log.object.taken", "log.object.recovered", "log.object.created", "log.object.found", "log.object.marked",
    "log.object.idle", "log.object.large",
)  # fmt: skip


@pytest.fixture
def prepared(database: Database) -> Database:
    """Two tables, in a database whose transactions are streamed from 64 kB on."""
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    for table in TABLES:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n int, note text)")
    return database


def on_s3(database: Database, folder: Path, bucket: str, *, two_phase: bool = False) -> Config:
    """A small memory, so that large transactions are spooled; a short interval, so that tests are quick."""
    config = configuration(database, folder, log=Log(path=f"{bucket}/log", flush_interval_ms=20), two_phase=two_phase)
    return config.model_copy(update={"capture": Capture(transaction_memory_bytes=1 << 16)}).at(config.file)


def check_equal(reader: LogReader, database: Database) -> None:
    for table in TABLES:
        assert replayed(reader, f"public.{table}") == source_rows(database, table)


def test_every_point_of_the_log_on_an_object_store_is_visited_here() -> None:
    assert {point for point in kill_points() if point.startswith(ON_OBJECT_STORE)} <= {*IN_TURN, *MERGE}


def test_capture_killed_at_point_after_point(prepared: Database, tmp_path: Path, bucket: str) -> None:
    config = on_s3(prepared, tmp_path, bucket)
    for point in FIRST_START:
        CaptureProcess(config, f"{point}=kill").wait_for_death()
    for point in IN_TURN:
        with unpublished_traffic(prepared) if point == "log.object.idle" else traffic(prepared, pause_s=0.02):
            process = CaptureProcess(config, f"{point}=kill")
            if point == "log.object.large":
                prepared.execute("INSERT INTO a SELECT -i, 0, repeat('x', 400) FROM generate_series(1, 2000) i")
            process.wait_for_death()
    check_log_equals_source(prepared, tmp_path, config)
    assert check_log(config.log_location).problems == []
    assert not list(config.spool_path.iterdir()), "nothing is open any more"


def test_a_large_transaction_that_is_sent_whole_is_in_the_log_whole(
    prepared: Database, tmp_path: Path, bucket: str
) -> None:
    prepared.execute(f"ALTER DATABASE {prepared.name} SET logical_decoding_work_mem = '256MB'")
    config = on_s3(prepared, tmp_path, bucket)
    with capturing(config):
        prepared.execute(
            "INSERT INTO a SELECT i, i, repeat(md5(i::text), 12) FROM generate_series(1, 60000) i",
            "INSERT INTO b VALUES (1, 1, 'after')",
        )
        reader = wait_until_captured(prepared, config)
    assert len(storage_at(config.log_location).entries("large")) > 1, "it came in pieces"
    check_equal(reader, prepared)
    assert reader.transactions(0, reader.end().end_offset)["changes"].to_pylist() == [60000, 1]


def test_a_capture_that_was_held_up_and_replaced_stops_and_has_done_no_harm(
    prepared: Database, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGTIDE_SOURCE__CONNECT_TIMEOUT_SECONDS", "3")
    config = on_s3(prepared, tmp_path, bucket)
    gate = tmp_path / "go-on"
    held = CaptureProcess(config, f"log.object.created=hold:{gate}@2")
    wait_for(lambda: slot_is_active(prepared), what="the first to stream")
    for number in (1, 2):
        prepared.execute(f"INSERT INTO a VALUES ({number}, 0, 'x')")
        wait_for(
            lambda: len(storage_at(config.log_location).entries("segments")) >= number,  # noqa: B023
            what="an object of the first",
        )
    os.kill(held.pid, signal.SIGSTOP)
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    prepared.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
    (tmp_path / "second").mkdir()
    second_config = on_s3(prepared, tmp_path / "second", bucket)
    second = CaptureProcess(second_config)
    prepared.execute("INSERT INTO a VALUES (3, 0, 'by the second')")
    wait_until_captured(prepared, config)
    before = contents_of(config)
    gate.touch()
    os.kill(held.pid, signal.SIGCONT)
    assert wait_for(held.returncode, what="the first to stop") == 1
    assert "another capture" in held.output.read_text()
    assert contents_of(config)[: len(before)] == before
    prepared.execute("INSERT INTO b VALUES (1, 0, 'after')")
    reader = wait_until_captured(prepared, config)
    second.stop()
    check_equal(reader, prepared)


def contents_of(config: Config, reader: LogReader | None = None) -> list[tuple[int, int]]:
    reader = reader or LogReader(config.log_location)
    rows = [
        row for table in TABLES if f"public.{table}" in reader.shapes() for row in changes(reader, f"public.{table}")
    ]
    return sorted((row["_offset"], row["id"]) for row in rows)


def test_a_store_that_is_down_for_a_while_is_waited_for(
    prepared: Database, tmp_path: Path, bucket: str, object_store: LocalS3
) -> None:
    config = on_s3(prepared, tmp_path, bucket)
    streams = "SELECT active_pid FROM pg_replication_slots WHERE database = current_database()"
    with capturing(config) as states:
        prepared.execute("INSERT INTO a VALUES (1, 0, 'before')")
        wait_until_captured(prepared, config)
        connection = prepared.rows(streams)
        object_store.stop()
        try:
            prepared.execute("INSERT INTO a VALUES (2, 0, 'meanwhile')")
            wait_for(lambda: any("does not answer" in state.detail for state in states), what="it to be said")
        finally:
            object_store.start()
        prepared.execute("INSERT INTO b VALUES (1, 0, 'after')")
        reader = wait_until_captured(prepared, config)
        assert prepared.rows(streams) == connection, "the connection was kept"
    check_equal(reader, prepared)


def test_a_store_that_is_down_does_not_hold_up_the_end(
    prepared: Database, tmp_path: Path, bucket: str, object_store: LocalS3
) -> None:
    config = on_s3(prepared, tmp_path, bucket)
    process = CaptureProcess(config)
    wait_for(lambda: slot_is_active(prepared), what="the capture to stream")
    object_store.stop()
    try:
        prepared.execute("INSERT INTO a VALUES (1, 0, 'x')")
        wait_for(lambda: "does not answer" in process.output.read_text(), what="it to be said")
        process.stop()
    finally:
        object_store.start()
    check_log_equals_source(prepared, tmp_path, config)


@pytest.mark.parametrize(
    "point", ["log.object.created", "log.object.marked", "log.object.large", "log.object.recovered"]
)
def test_capture_goes_on_by_itself_after_a_failed_request(
    point: str, prepared: Database, tmp_path: Path, bucket: str
) -> None:
    config = on_s3(prepared, tmp_path, bucket)
    with armed(f"{point}=fail:EIO@2" if point != "log.object.recovered" else f"{point}=fail:EIO@1"), capturing(config):
        for number in range(3):
            prepared.execute(f"INSERT INTO a VALUES ({number}, 0, 'x')")
            prepared.execute(
                f"INSERT INTO b SELECT {number} * 1000 + i, 0, repeat('x', 400) FROM generate_series(1, 300) i"
            )
            reader = wait_until_captured(prepared, config)
    check_equal(reader, prepared)


def test_a_prepared_transaction_waits_in_the_local_spool_across_a_restart(
    prepared: Database, tmp_path: Path, bucket: str
) -> None:
    config, name = on_s3(prepared, tmp_path, bucket, two_phase=True), f"of {prepared.name}"
    with capturing(config), prepared.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO a SELECT i, 0, repeat('x', 400) FROM generate_series(1, 2000) i")
        session.execute(f"PREPARE TRANSACTION '{name}'")
        wait_for(lambda: list(config.spool_path.glob("*.prepared")), what="the transaction to be kept")
    with capturing(config):
        assert LogReader(config.log_location).end().end_offset == 0
        prepared.execute(f"COMMIT PREPARED '{name}'")
        reader = wait_until_captured(prepared, config)
        wait_for(lambda: not list(config.spool_path.iterdir()), what="the spool to be empty")
    check_equal(reader, prepared)
    assert check_log(config.log_location).problems == []


def test_status_on_the_same_machine_knows_how_the_capture_is(prepared: Database, tmp_path: Path, bucket: str) -> None:
    config = on_s3(prepared, tmp_path, bucket)
    assert capture_status(config).state == "not running"
    with capturing(config):
        wait_for(lambda: capture_status(config).state == "streaming", what="the capture to say that it streams")
    assert (capture_status(config).state, capture_status(config).detail) == ("not running", "it was asked to")


def test_notes_and_snapshots_are_handed_over_through_the_store(prepared: Database, tmp_path: Path, bucket: str) -> None:
    config = configuration(prepared, tmp_path, initial="bulk", log=Log(path=f"{bucket}/log"))
    with capturing(config):
        first = offered_snapshot(config.log_location)
        assert first is not None
        request_snapshot(config.log_location, ("public.a",))
        wait_for(lambda: requested_snapshot(config.log_location) is None, what="the request to be served")
        second = offered_snapshot(config.log_location)
        assert second is not None
        assert (second.tables, second.name != first.name) == (("public.a",), True)


def test_a_capture_merges_its_objects_while_readers_read(
    prepared: Database, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.log.objects.merge.RUN", 4)
    monkeypatch.setattr("pgtide.capture.tidy._STORE_INTERVAL_S", 0.1)
    # As they are to each other in earnest: all names are looked at several times while what was merged is there.
    monkeypatch.setattr("pgtide.log.objects.layout.GRACE_S", 2.0)
    monkeypatch.setattr("pgtide.log.objects.layout._LIST_ALL_EVERY_S", 0.3)
    config = on_s3(prepared, tmp_path, bucket)
    with capturing(config) as states:
        reader = LogReader(config.log_location)
        seen: dict[int, int] = {}

        def levels() -> set[str]:
            rows = contents_of(config, reader)
            assert all(seen.setdefault(offset, key) == key for offset, key in rows)
            assert len(rows) >= len(seen), "something that was there is gone"
            return {str(extent.name).partition("-")[2] for extent in LogReader(config.log_location).extents()}

        with traffic(prepared, pause_s=0.02):
            wait_for(lambda: any(name.endswith("-2.seg") for name in levels()), what="objects to be merged twice")
        reader = wait_until_captured(prepared, config)
    assert not [state for state in states if "tidied" in state.detail]
    check_equal(reader, prepared)
    assert check_log(config.log_location).problems == []


def test_a_merge_that_is_killed_changes_nothing_for_readers_and_is_repeated(bucket: str) -> None:
    store = new_log(storage_at(f"{bucket}/log"))
    writer = ObjectLogWriter(store)
    for number in range(RUN + 1):
        writer.write([transaction(200 + number, [(shape(), number, f"n{number}")])])
    before, reader = contents(store), LogReader(store)
    planned = reader.plan(0, RUN + 1)
    program = (
        "import sys; from pgtide.log.objects.merge import merge; from pgtide.log.storage import storage_at; "
        "merge(storage_at(sys.argv[1]))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, store.location],
        env=os.environ | {failpoints.ENVIRONMENT_VARIABLE: f"{MERGE[0]}=kill"},
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(store.entries("segments")) == RUN + 2
    assert contents(store) == before
    assert merge(store) == 0, "it is there already"
    an_hour_later = max(entry.modified_s for entry in store.entries("segments")) + 3600
    remove(store, plan_removal(store, retention_s=9e9, max_bytes=0, now_s=an_hour_later))
    assert len(store.entries("segments")) == 2
    assert contents(store) == before
    assert sum(reader.read(piece).rows.num_rows for piece in planned) == RUN + 1, "an older plan can still be read"

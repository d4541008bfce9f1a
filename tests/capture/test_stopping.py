"""Starting and stopping in awkward moments: nobody else's slot, capture or server is touched, and it ends at once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from pgtide import local
from pgtide.capture.attend import CaptureState
from pgtide.capture.pipeline import Capture
from pgtide.config import Config
from pgtide.errors import LogError, SlotError
from pgtide.log.control import request_snapshot
from pgtide.replication.channels import LibpqChannel, SocketChannel
from tests.arming import armed
from tests.capture.running import capturing, changes, configuration, wait_until_captured
from tests.database import Database, create_database
from tests.stalling import forwarding
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY, note text)"
CTRL_C_LIMIT_S = 2.0
SLOTS = "SELECT slot_name, restart_lsn::text FROM pg_replication_slots WHERE database = current_database()"


class Running:
    """A capture in a thread that may be stopped before it streams."""

    def __init__(self, config: Config) -> None:
        self.states: list[CaptureState] = []
        self.failure: BaseException | None = None
        self.capture = Capture(config, self.states.append)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.capture.run(self._stop)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failure = error

    def stop(self) -> float:
        """Ends it; how many seconds that took."""
        began = time.monotonic()
        self._stop.set()
        self.capture.wake()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return time.monotonic() - began

    def ended(self) -> bool:
        return not self._thread.is_alive()


def test_starting_again_and_again_never_drops_a_slot_of_somebody_else(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    database.rows(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
    before = database.rows(SLOTS)
    for _ in range(2):
        running = Running(configuration(database, tmp_path))
        wait_for(running.ended, what="the start to be refused")
        assert isinstance(running.failure, SlotError)
    assert database.rows(SLOTS) == before


def test_stopping_a_second_capture_leaves_the_first_one_alone(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config):
        second = Running(config)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_lock%' AND pid <> pg_backend_pid()"
        wait_for(lambda: database.rows(waiting), what="the second to ask for the lock")
        assert second.stop() < CTRL_C_LIMIT_S
        database.execute("INSERT INTO t VALUES (1)")
        reader = wait_until_captured(database, config)
    assert len(changes(reader, "public.t")) == 1


def test_an_open_transaction_that_the_slot_waits_for_is_named_and_stop_ends_the_wait(
    database: Database, tmp_path: Path
) -> None:
    database.execute(TABLE)
    with database.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO t VALUES (1)")
        running = Running(configuration(database, tmp_path))
        wait_for(lambda: database.rows(SLOTS), what="the slot to be in the making")
        who = f"the slot is made when open transactions have ended: server process {writer.info.backend_pid} "
        wait_for(lambda: any(who in state.detail for state in running.states), what="the writer to be named")
        assert running.stop() < CTRL_C_LIMIT_S
    wait_for(lambda: not database.rows(SLOTS), what="the unfinished slot to go")


@pytest.mark.parametrize("channel", [LibpqChannel, SocketChannel])
def test_stop_while_the_server_prepares_to_stream(
    channel: type[LibpqChannel | SocketChannel], database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.replication.stream.open_channel", channel)
    database.execute(TABLE)
    with forwarding(database.server.port, silent_at=b"START_REPLICATION") as forwarder:
        dsn = make_conninfo(database.dsn, port=forwarder.port)
        running = Running(configuration(database, tmp_path, dsn=dsn))
        wait_for(forwarder.silent.is_set, what="the capture to ask for the stream")
        assert running.stop() < CTRL_C_LIMIT_S
    assert running.failure is None


def test_stop_while_it_connects_again_to_a_host_that_answers_nothing(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    with forwarding(database.server.port) as forwarder:
        dsn = make_conninfo(database.dsn, port=forwarder.port)
        running = Running(configuration(database, tmp_path, dsn=dsn, connect_timeout_seconds=600))
        wait_for(running.capture.streaming.is_set, what="the capture to stream")
        forwarder.silent.set()
        forwarder.close_connections()
        wait_for(lambda: forwarder.accepted_in_silence, what="the capture to connect again")
        assert running.stop() < CTRL_C_LIMIT_S
    assert running.failure is None


def test_a_full_disk_is_said_and_does_not_hold_up_the_end(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    running = Running(configuration(database, tmp_path))
    wait_for(running.capture.streaming.is_set, what="the capture to stream")
    with armed("log.block.written=fail:ENOSPC"):
        database.execute("INSERT INTO t VALUES (1)")
        wait_for(lambda: any("cannot be written" in state.detail for state in running.states), what="it to be said")
        assert running.stop() < CTRL_C_LIMIT_S


@pytest.mark.parametrize("point", ["log.epoch.taken", "log.recovered"])
def test_a_disk_that_is_full_when_the_log_is_opened_is_waited_for(
    point: str, database: Database, tmp_path: Path
) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with armed(f"{point}=fail:ENOSPC@1"), capturing(config):
        database.execute("INSERT INTO t VALUES (1)")
        assert len(changes(wait_until_captured(database, config), "public.t")) == 1


def test_a_lone_large_row_can_be_read_at_once(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1, repeat('x', 10_000_000))")
        reader = wait_until_captured(database, config)
    assert reader.boundary(0, 10, 1 << 30) == 1
    assert reader.position_after(reader.identity.start_lsn) == 0


def test_a_server_that_was_promoted_is_not_followed(tmp_path: Path) -> None:
    with local.postgres() as server:
        database = create_database(server)
        database.execute(TABLE)
        config = configuration(database, tmp_path)
        running = Running(config)
        wait_for(running.capture.streaming.is_set, what="the capture to stream")
        server.stop("fast")
        signal_file = server.data / "standby.signal"
        signal_file.touch()
        owner = server.data.stat()
        os.chown(signal_file, owner.st_uid, owner.st_gid)
        server.start()
        with server.connect() as connection:
            connection.execute("SELECT pg_promote()")
        wait_for(running.ended, what="the capture to stop")
        assert isinstance(running.failure, LogError)
        assert "timeline 2" in running.failure.what


def test_a_snapshot_that_cannot_be_made_is_said(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SlotError("all replication slots are in use")

    database.execute(TABLE)
    config = configuration(database, tmp_path)
    monkeypatch.setattr("pgtide.capture.keeper.new_snapshot", refuse)
    with capturing(config) as states:
        request_snapshot(config.log_path, ("public.t",))
        wait_for(lambda: any("slots are in use" in state.detail for state in states), what="it to be said")

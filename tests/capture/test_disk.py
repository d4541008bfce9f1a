"""A log that cannot be written: the capture stops reading, keeps its connection, says so, and goes on by itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pgtide.config import Config
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn
from tests.capture.running import capturing, changes, configuration, replayed, source_rows, wait_until_captured
from tests.capture.test_crashes import TABLES, traffic
from tests.cli.program import PROGRAM, environment, run
from tests.database import Database
from tests.disk import heeding_permissions, make_read_only, small_disk
from tests.waiting import wait_for

WAL_SENDER_TIMEOUT_S = 3
MEMORY_BYTES = 1 << 16


class Running:
    """`pgtide capture` as a child whose words are read from a pipe: a full disk does not silence it."""

    def __init__(self, config: Config, *, heed_permissions: bool = False) -> None:
        self._config = config
        config.file.write_text(
            f'[source]\ndsn = "{config.source.dsn}"\nslot = "{config.source.slot}"\n'
            f'[log]\npath = "{config.log_path}"\n[snapshot]\ninitial = "none"\n'
            f"[capture]\ntransaction_memory_bytes = {MEMORY_BYTES}\n"
        )
        command = [*PROGRAM, "capture", "--config", str(config.file)]
        self._process = subprocess.Popen(
            heeding_permissions(command) if heed_permissions else command,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)

    def wait_for_words(self, words: str) -> None:
        wait_for(lambda: words in self.said or self._process.poll() is not None, what=f"{words!r} in:\n{self.said}")
        assert words in self.said, self.said

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("status", "--json", folder=self._config.file.parent).stdout)
        return found

    def stop(self) -> None:
        self._process.terminate()
        code = self._process.wait(20)
        self._reader.join()
        assert code == 0, self.said


@contextmanager
def running(config: Config, **options: Any) -> Iterator[Running]:
    process = Running(config, **options)
    try:
        yield process
        process.stop()
    finally:
        process._process.kill()
        process._process.wait()


@pytest.fixture
def prepared(database: Database) -> Database:
    """A database that ends a connection which is silent for some seconds, and streams transactions from 64 kB on."""
    database.execute(
        f"ALTER DATABASE {database.name} SET wal_sender_timeout = '{WAL_SENDER_TIMEOUT_S}s'",
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE a (id int PRIMARY KEY, note text)",
    )
    return database


def walsender(database: Database) -> tuple[int, float, int]:
    """Its process id, when the capture answered last (the server's clock, seconds), and what was acknowledged."""
    rows = database.rows(
        "SELECT r.pid, extract(epoch FROM reply_time)::float8, s.confirmed_flush_lsn::text"
        " FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid"
        " WHERE s.database = current_database()"
    )
    assert rows, "the connection is gone"
    pid, replied, confirmed = rows[0]
    return pid, replied, parse_lsn(confirmed)


def wait_past_the_timeout(database: Database, since: float) -> int:
    """Waits until the capture has answered long after the server would have given it up; the walsender's process id."""
    return wait_for(
        lambda: (now := walsender(database))[1] > since + 1.5 * WAL_SENDER_TIMEOUT_S and now[0],
        what="answers beyond wal_sender_timeout",
    )


def insert(database: Database, first: int, rows: int) -> None:
    """About 1 kB a row that cannot be compressed, in one transaction."""
    noise = "(SELECT string_agg(md5(random()::text || i::text || j::text), '') FROM generate_series(1, 32) j)"
    database.execute(f"INSERT INTO a SELECT i, {noise} FROM generate_series({first}, {first + rows - 1}) i")


def check_equal(database: Database, reader: LogReader) -> None:
    assert replayed(reader, "public.a") == source_rows(database, "a")
    offsets = [row["_offset"] for row in changes(reader, "public.a")]
    assert len(set(offsets)) == len(offsets)


@pytest.mark.parametrize(("rows", "part"), [(40, "log"), (3000, "spool")])
def test_on_a_full_disk_the_connection_is_kept_and_it_goes_on_when_there_is_room(
    rows: int, part: str, prepared: Database, tmp_path: Path
) -> None:
    """Small transactions are written to the log at once, large ones are spooled first: either may find no room."""
    with small_disk(tmp_path / "disk") as disk:
        config = configuration(prepared, tmp_path)
        config = config.model_copy(update={"log": config.log.model_copy(update={"path": str(disk.folder / "log")})})
        config = config.at(tmp_path / "pgtide.toml")
        with running(config) as capture:
            capture.wait_for_words("streaming")
            insert(prepared, 1, 100)
            durable_lsn = wait_until_captured(prepared, config).end().durable_lsn
            before, replied, _ = walsender(prepared)
            disk.fill(capture.pid)
            insert(prepared, 1001, rows)
            capture.wait_for_words(f"the {part} in ")
            assert "cannot be written" in capture.said
            told = capture.status()["capture"]
            assert told["state"] == "waiting"
            assert f"the {part} in " in told["detail"]
            assert wait_past_the_timeout(prepared, max(replied, walsender(prepared)[1])) == before
            waiting = LogReader(config.log_path).end()
            assert (waiting.end_offset, walsender(prepared)[2] <= waiting.durable_lsn) == (100, True)
            assert waiting.durable_lsn >= durable_lsn
            disk.free(capture.pid)
            reader = wait_until_captured(prepared, config)
            assert walsender(prepared)[0] == before, "the connection was kept"
            wait_for(lambda: capture.status()["capture"]["state"] == "streaming", what="streaming in status")
        check_equal(prepared, reader)
        assert capture.said.count("cannot be written") == 1, "said once"


def test_while_folders_are_read_only_it_waits_and_then_goes_on(prepared: Database, tmp_path: Path) -> None:
    config = configuration(prepared, tmp_path)
    with running(config, heed_permissions=True) as capture:
        capture.wait_for_words("streaming")
        insert(prepared, 1, 10)
        wait_until_captured(prepared, config)
        before, _, _ = walsender(prepared)
        make_read_only(config.log_path, read_only=True)
        prepared.execute("ALTER TABLE a ADD COLUMN more int", "INSERT INTO a VALUES (11, 'with a new shape', 1)")
        capture.wait_for_words("cannot be written: Permission denied")
        assert capture.status()["capture"]["state"] == "waiting"
        assert LogReader(config.log_path).end().end_offset == 10
        make_read_only(config.log_path, read_only=False)
        reader = wait_until_captured(prepared, config)
        assert walsender(prepared)[0] == before
    assert [(row["_offset"], row["id"]) for row in changes(reader, "public.a")][-1] == (10, 11)


def test_a_start_on_a_read_only_folder_waits_until_it_can_be_written(prepared: Database, tmp_path: Path) -> None:
    config = configuration(prepared, tmp_path)
    with capturing(config):
        pass
    insert(prepared, 1, 10)
    make_read_only(config.log_path, read_only=True)
    with running(config, heed_permissions=True) as capture:
        capture.wait_for_words("cannot be written: Permission denied")
        make_read_only(config.log_path, read_only=False)
        check_equal(prepared, wait_until_captured(prepared, config))


@pytest.mark.parametrize("name", ["fdatasync", "fsync"])
def test_a_failing_fsync_loses_nothing_and_nothing_comes_twice(
    name: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before a failed fsync is not trusted, and not even asked for again: it is written anew."""
    # Notes on tables are made again quietly if they fail: they would take the failures that are meant for the log.
    monkeypatch.setattr("pgtide.capture.alterations.record_alterations", lambda location, noted: None)
    for table in TABLES:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n int, note text)")
    config = configuration(database, tmp_path)
    with capturing(config) as states:
        failed: list[int] = []
        real = getattr(os, name)

        def failing(descriptor: int) -> None:
            if len(failed) < 4:
                failed.append(descriptor)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(descriptor)

        with traffic(database):
            monkeypatch.setattr(os, name, failing)
            wait_for(lambda: len(failed) == 4, what="fsyncs to fail")
            wait_until_captured(database, config)
        reader = wait_until_captured(database, config)
    for table in TABLES:
        assert replayed(reader, f"public.{table}") == source_rows(database, table)
    offsets = sorted(row["_offset"] for table in TABLES for row in changes(reader, f"public.{table}"))
    assert offsets == list(range(len(offsets)))
    assert any("Input/output error" in state.detail for state in states)

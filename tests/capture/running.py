"""Runs a capture in this process or as a child, and compares its log with the source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pgtide.capture.attend import CaptureState
from pgtide.capture.pipeline import Capture
from pgtide.change import Op
from pgtide.config import Config, Log, Snapshot, Source
from pgtide.errors import LogError
from pgtide.failpoints import ENVIRONMENT_VARIABLE
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn
from tests.database import Database
from tests.waiting import wait_for


def configuration(
    database: Database,
    folder: Path,
    initial: Literal["bulk", "none"] = "none",
    slot_suffix: str = "",
    log: Log | None = None,
    reads_in_log: bool = False,
    **source: Any,
) -> Config:
    config = Config(
        source=Source(**{"dsn": database.dsn, "slot": database.name + slot_suffix, **source}),
        log=log or Log(path="log"),
        snapshot=Snapshot(initial=initial, reads_in_log=reads_in_log, range_bytes=2 * 8192),
    )
    return config.at(folder / "pgtide.toml")


@contextmanager
def capturing(config: Config) -> Iterator[list[CaptureState]]:
    """A capture in a thread of this process; its failure fails the test."""
    states: list[CaptureState] = []
    failure: list[BaseException] = []
    capture, stop = Capture(config, states.append), threading.Event()

    def run() -> None:
        try:
            capture.run(stop)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failure.append(error)
            states.append(CaptureState("stopped", str(error)))

    thread = threading.Thread(target=run)
    with capture.serving():
        thread.start()
        try:
            wait_for(lambda: capture.streaming.is_set() or failure, what="the capture to stream")
            if not failure:
                yield states
        finally:
            stop.set()
            capture.wake()
            thread.join(20)
    if failure:
        raise failure[0]
    assert not thread.is_alive()


def wait_until_captured(database: Database, config: Config) -> LogReader:
    """Waits until the log is durable up to the server's WAL end."""
    target = parse_lsn(database.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    def captured() -> LogReader | None:
        try:
            reader = LogReader(config.log_location)
        except LogError:
            return None
        return reader if reader.end().durable_lsn >= target else None

    reader = wait_for(captured, what="the log to reach the WAL's end")
    assert reader is not None
    return reader


def wait_until_let_go(database: Database) -> None:
    """Waits until the server has noticed that nobody reads the database's slots any more."""
    query = "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND active"
    wait_for(lambda: not database.rows(query), what="the slot to be let go")


def changes(reader: LogReader, table: str) -> list[dict[str, Any]]:
    """All changes of a table in the log, by offset, with the columns' own names."""
    shape = reader.shapes()[table]
    rows: list[dict[str, Any]] = []
    for piece in reader.plan(reader.first_offset(), reader.end().end_offset, shape.relation_oid):
        found = reader.read(piece)
        names = {column.storage_name: column.name for column in found.shape.columns}
        for row in found.rows.to_pylist():
            rows.append({"_old": 0} | {names.get(key, key): value for key, value in row.items()})
    return sorted(rows, key=lambda row: row["_offset"])


def replayed(reader: LogReader, table: str, key: str = "id") -> dict[Any, dict[str, Any]]:
    """The table as its changes alone make it, from nothing; fails for a change that cannot be."""
    state: dict[Any, dict[str, Any]] = {}
    for row in changes(reader, table):
        values = {name: value for name, value in row.items() if not name.startswith("_")}
        if row["_op"] in (Op.INSERT, Op.READ):
            assert values[key] not in state, f"there twice: {row}"
            state[values[key]] = values
        elif row["_op"] == Op.UPDATE:
            old = row.get("_old.c1") if row.get("_old") else None
            before = state.pop(values[key] if old is None else old)
            unchanged = row.get("_unchanged") or b"\0"
            bits = int.from_bytes(unchanged, "little")
            state[values[key]] = {
                name: before[name] if bits >> place & 1 else value for place, (name, value) in enumerate(values.items())
            }
        elif row["_op"] == Op.DELETE:
            del state[values[key]]
        elif row["_op"] == Op.TRUNCATE:
            state.clear()
    return state


def source_rows(database: Database, table: str, key: str = "id") -> dict[Any, dict[str, Any]]:
    with database.connect() as connection:
        cursor = connection.execute(f"SELECT * FROM {table}".encode())
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return {row[key]: row for row in rows}


class CaptureProcess:
    """`pgtide capture` as a child, to be killed."""

    def __init__(self, config: Config, failpoints: str = "") -> None:
        file = config.file
        if not file.exists():
            file.write_text(
                f'[source]\ndsn = "{config.source.dsn}"\nslot = "{config.source.slot}"\n'
                f"two_phase = {str(config.source.two_phase).lower()}\n"
                f'[log]\npath = "{config.log.path}"\nflush_interval_ms = {config.log.flush_interval_ms}\n'
                f'[snapshot]\ninitial = "{config.snapshot.initial}"\n'
                f"reads_in_log = {str(config.snapshot.reads_in_log).lower()}\n"
                f"range_bytes = {config.snapshot.range_bytes}\n"
                f"[capture]\ntransaction_memory_bytes = {config.capture.transaction_memory_bytes}\n"
            )
        self.output = file.parent / "capture.out"
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pgtide", "capture", "--config", str(file)],
                env=os.environ | {ENVIRONMENT_VARIABLE: failpoints},
                stdout=output,
                stderr=output,
            )

    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_death(self) -> None:
        """Waits until a kill point has ended the process."""
        code = wait_for(self._process.poll, what="the kill point to be reached")
        assert code == -signal.SIGKILL, self.output.read_text()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(20)
        assert code == 0, self.output.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

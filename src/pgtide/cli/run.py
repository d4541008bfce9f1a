"""`run`, `capture` and `mirror`: the parts as threads, and a clean end.

The main thread only waits and takes signals: the first one asks the parts to end, the second ends the process at once.
Spark in particular must not start in the main thread, where it would take SIGINT for itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from pgtide.config import Config
from pgtide.errors import LogError

if TYPE_CHECKING:
    from pgtide.replication.preflight import SourceFacts

_POLL_S = 0.1
_END_LIMIT_S = 1.0  # people are promised two seconds, and Python and the JVM need some of them to go


def run_capture(config: Config) -> None:
    from pgtide.capture.pipeline import Capture

    capture = Capture(config, lambda state: _say("capture", state.phase, state.detail))
    with _stopped_by_signals() as stop, capture.serving():
        _introduce(config, stop)
        _run_parts(stop, {"capture": lambda: capture.run(stop)}, wake=capture.wake)


def run_mirror(config: Config, *, until_caught_up: bool) -> None:
    from pgtide.log.reader import LogReader

    reader = LogReader(config.log_path)  # says that there is no log before Spark takes its seconds to start
    until_offset = reader.end().end_offset if until_caught_up else None
    with _stopped_by_signals() as stop:
        done = threading.Event()
        _run_parts(stop, {"mirror": lambda: _mirror(config, until_offset, stop, done)})
    if until_caught_up and not done.is_set():
        raise KeyboardInterrupt


def run_both(config: Config, *, until_caught_up: bool) -> None:
    from pgtide.capture.pipeline import Capture

    capture = Capture(config, lambda state: _say("capture", state.phase, state.detail))
    with _stopped_by_signals() as stop, capture.serving():
        facts = _introduce(config, stop)
        wal_end_lsn = _wal_end_lsn(config, facts) if until_caught_up else 0
        done = threading.Event()

        def mirror() -> None:
            end_offset = _wait_for_log(config, wal_end_lsn, stop)
            if end_offset is not None:
                _mirror(config, end_offset if until_caught_up else None, stop, done)

        _run_parts(stop, {"capture": lambda: capture.run(stop), "mirror": mirror}, wake=capture.wake)
    if until_caught_up and not done.is_set():
        raise KeyboardInterrupt


def _mirror(config: Config, until_offset: int | None, stop: threading.Event, done: threading.Event) -> None:
    """Runs the mirror in a session of its own; `done` tells that it has reached `until_offset`."""
    from pgtide.local.spark import build_session
    from pgtide.spark.mirror import Mirror

    _say("mirror", "starting Spark")
    session = build_session(
        master=config.spark.master, conf=config.spark.conf, warehouse=config.warehouse, catalog=config.mirror.catalog
    )
    try:
        if stop.is_set():
            return
        _say("mirror", "running")
        Mirror(session, config).run(stop, until_offset)
        if not stop.is_set():
            done.set()
    finally:
        session.stop()


def _introduce(config: Config, stop: threading.Event) -> SourceFacts:
    """Says what was found, and what cannot be mirrored as one might expect."""
    from pgtide.replication.preflight import check_source

    facts = check_source(config, stop)
    version = f"{facts.server_version // 10000}.{facts.server_version % 10000}"
    _say("source", f"Postgres {version}, database {facts.database}, {len(facts.tables)} tables")
    for table in facts.tables:
        if not table.usable_identity:
            remedy = "give it a primary key or REPLICA IDENTITY FULL"
            _say("source", f"{table.qualified_name}: only inserts and truncates, it has no replica identity", remedy)
    return facts


def _wal_end_lsn(config: Config, facts: SourceFacts) -> int:
    from pgtide.lsn import parse_lsn
    from pgtide.replication.connect import postgres_errors

    with (
        postgres_errors("reading the end of the WAL"),
        facts.server.connect(timeout_s=config.source.connect_timeout_seconds) as connection,
    ):
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def _wait_for_log(config: Config, durable_lsn: int, stop: threading.Event) -> int | None:
    """Waits until the log is there and durable up to here, and returns its end; None if stopped before."""
    from pgtide.log.reader import LogReader

    while not stop.wait(_POLL_S):
        try:
            end = LogReader(config.log_path).end()
        except LogError:
            continue  # the capture has not made it yet; if it cannot, it says so and stops us
        if end.durable_lsn >= durable_lsn:
            return end.end_offset
    return None


def _run_parts(
    stop: threading.Event, parts: dict[str, Callable[[], None]], wake: Callable[[], None] = lambda: None
) -> None:
    """Runs the parts side by side; the first that ends or fails ends the others.

    A part that does not end in time (Spark in the middle of its start) is left behind: whatever it was doing, ending
    there is the same to it as a crash, and crashes do no harm.
    """
    failures: list[BaseException] = []

    def guarded(part: Callable[[], None]) -> None:
        try:
            part()
        except KeyboardInterrupt:
            pass  # it was waiting for something when `stop` was set
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failures.append(error)
        finally:
            stop.set()

    threads = [threading.Thread(target=guarded, args=[part], name=name, daemon=True) for name, part in parts.items()]
    for thread in threads:
        thread.start()
    while not stop.wait(_POLL_S):
        pass
    wake()
    deadline = time.monotonic() + _END_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; a second signal ends the process at once.

    The handler only writes to a pipe, and a thread sets the event: a handler runs in the main thread, which may at
    this moment be inside `stop.wait()` and hold the lock that `stop.set()` needs.
    """
    stop = threading.Event()
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    signals = 0

    def pass_on() -> None:
        if os.read(read_end, 1) == b"s":
            stop.set()

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(130)
        os.write(write_end, b"s")

    watcher = threading.Thread(target=pass_on, name="pgtide-signals", daemon=True)
    watcher.start()
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(write_end, b"e")
        watcher.join()
        os.close(read_end)
        os.close(write_end)


def _say(part: str, what: str, detail: str = "") -> None:
    print(f"{part:8} {what}" + (f": {detail}" if detail else ""), file=sys.stderr, flush=True)

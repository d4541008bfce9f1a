"""`run`, `capture` and `mirror`: which parts run, and until when."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pgtide.cli.parts import open_session, run_parts, say, stopped_by_signals
from pgtide.config import Config
from pgtide.errors import LogError

if TYPE_CHECKING:
    from pgtide.replication.preflight import SourceFacts

_POLL_S = 0.1


def run_capture(config: Config) -> None:
    from pgtide.capture.pipeline import Capture

    capture = Capture(config, lambda state: say("capture", state.phase, state.detail))
    with stopped_by_signals() as stop, capture.serving():
        _introduce(config, stop)
        run_parts(stop, {"capture": lambda: capture.run(stop)}, wake=capture.wake)


def run_mirror(config: Config, *, until_caught_up: bool) -> None:
    from pgtide.capture.endpoint import serving
    from pgtide.log.reader import LogReader

    reader = LogReader(config.log_location)  # says that there is no log before Spark takes its seconds to start
    until_offset = reader.end().end_offset if until_caught_up else None
    with stopped_by_signals() as stop, serving(config, "mirror", {}):
        done = threading.Event()
        run_parts(stop, {"mirror": lambda: _mirror(config, until_offset, stop, done)})
    if until_caught_up and not done.is_set():
        raise KeyboardInterrupt


def run_both(config: Config, *, until_caught_up: bool) -> None:
    from pgtide.capture.pipeline import Capture

    capture = Capture(config, lambda state: say("capture", state.phase, state.detail))
    with stopped_by_signals() as stop, capture.serving():
        facts = _introduce(config, stop)
        wal_end_lsn = _wal_end_lsn(config, facts) if until_caught_up else 0
        done = threading.Event()

        def mirror() -> None:
            end_offset = _wait_for_log(config, wal_end_lsn, stop)
            if end_offset is not None:
                _mirror(config, end_offset if until_caught_up else None, stop, done)

        run_parts(stop, {"capture": lambda: capture.run(stop), "mirror": mirror}, wake=capture.wake)
    if until_caught_up and not done.is_set():
        raise KeyboardInterrupt


def _mirror(config: Config, until_offset: int | None, stop: threading.Event, done: threading.Event) -> None:
    """Runs the mirror in a session of its own; `done` tells that it has reached `until_offset`."""
    from pgtide.spark.mirror import Mirror
    from pgtide.spark.only_mirror import only_mirror

    with only_mirror(config.log_location):  # found out before Spark takes its seconds to start
        say("mirror", "starting Spark")
        session = open_session(config)
        try:
            if stop.is_set():
                return
            say("mirror", "running")
            Mirror(session, config, lambda text: say("load", text)).run(stop, until_offset)
            if not stop.is_set():
                done.set()
        finally:
            session.stop()


def _introduce(config: Config, stop: threading.Event) -> SourceFacts:
    """Says what was found, and what cannot be mirrored as one might expect."""
    from pgtide.replication.preflight import check_source

    facts = check_source(config, stop)
    version = f"{facts.server_version // 10000}.{facts.server_version % 10000}"
    say("source", f"Postgres {version}, database {facts.database}, {len(facts.tables)} tables")
    for table in facts.tables:
        if not table.usable_identity:
            remedy = "give it a primary key or REPLICA IDENTITY FULL"
            say("source", f"{table.qualified_name}: only inserts and truncates, it has no replica identity", remedy)
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
            end = LogReader(config.log_location).end()
        except LogError:
            continue  # the capture has not made it yet; if it cannot, it says so and stops us
        if end.durable_lsn >= durable_lsn:
            return end.end_offset
    return None

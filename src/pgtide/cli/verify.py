"""`pgtide verify`: compare, show progress while it goes on, and say what was found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pgtide.cli.parts import open_session, run_parts, say, stopped_by_signals
from pgtide.config import Config
from pgtide.errors import ConfigurationError
from pgtide.lsn import format_lsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgtide.spark.request_point import Limits
    from pgtide.spark.verify import Verified

_MIRROR_END_LIMIT_S = 10.0
_IS_ANYBODY_THERE_S = 3.0


def run_verify(config: Config, tables: Sequence[str], *, catch_up: bool, wait_s: float, as_json: bool) -> bool:
    """True if everything that was asked for was compared and is equal."""
    from pgtide.spark.request_point import Limits, check_running
    from pgtide.spark.verify import Verifier, known_tables

    chosen = known_tables(config, tables)
    limits = Limits(point_s=wait_s)
    found: list[Verified] = []

    def tell(what: str) -> None:
        say("verify", what)

    def verify(session: SparkSession, stop: threading.Event) -> None:
        found.append(Verifier(session, config, limits, stop, tell).verify(chosen))

    with stopped_by_signals() as stop:
        if catch_up:
            _check_nothing_runs(config, limits, stop)
            _run_all(config, stop, verify)
        else:
            check_running(config, limits, stop)
            _run_alone(config, stop, verify)
    if not found:
        raise KeyboardInterrupt
    verified = found[0]
    print(json.dumps(as_object(verified), indent=2) if as_json else "\n".join(as_text(verified)))
    return verified.equal and not verified.not_covered


def _check_nothing_runs(config: Config, limits: Limits, stop: threading.Event) -> None:
    """A second capture would be refused by the server; a second mirror would get in the way of the first."""
    from pgtide.spark.request_point import capture_runs, mirror_runs

    runs = "a capture" if capture_runs(config, 0, stop) else ""
    runs = runs or ("a mirror" if mirror_runs(config, min(_IS_ANYBODY_THERE_S, limits.mirror_s), stop) else "")
    if runs:
        raise ConfigurationError(
            f"--catch-up: {runs} runs already, so verify does not start its own", remedy="Leave it out: pgtide verify"
        )


def _run_alone(config: Config, stop: threading.Event, verify: Callable[[SparkSession, threading.Event], None]) -> None:
    def part() -> None:
        say("verify", "starting Spark")
        session = open_session(config)
        try:
            verify(session, stop)
        finally:
            session.stop()

    run_parts(stop, {"verify": part})


def _run_all(config: Config, stop: threading.Event, verify: Callable[[SparkSession, threading.Event], None]) -> None:
    """With a capture and a mirror of our own, which end when the comparison is made."""
    from pgtide.capture.pipeline import Capture
    from pgtide.spark.mirror import Mirror

    capture = Capture(config, lambda state: say("capture", state.phase, state.detail))
    started, mirror_ended = threading.Event(), threading.Event()
    sessions: list[SparkSession] = []

    def verify_part() -> None:
        say("verify", "starting Spark")
        session = open_session(config)
        try:
            sessions.append(session)
            started.set()
            verify(session, stop)
        finally:
            stop.set()
            mirror_ended.wait(_MIRROR_END_LIMIT_S)
            session.stop()

    def mirror_part() -> None:
        try:
            while not started.wait(0.1):
                if stop.is_set():
                    return
            Mirror(sessions[0], config).run(stop)
        finally:
            mirror_ended.set()

    run_parts(
        stop, {"verify": verify_part, "mirror": mirror_part, "capture": lambda: capture.run(stop)}, wake=capture.wake
    )


def as_object(verified: Verified) -> dict[str, Any]:
    return {
        "lsn": format_lsn(verified.lsn),
        "equal": verified.equal,
        "tables": {
            name: {**found.to_json(), "lsn": format_lsn(verified.lsns[name])}
            for name, found in sorted(verified.tables.items())
        },
        "not_covered": sorted(verified.not_covered),
    }


def as_text(verified: Verified) -> Iterator[str]:
    from pgtide.spark.comparison import described, shown

    rows = sum(found.source_rows for found in verified.tables.values())
    count = len(verified.tables)
    what = f"{count} table{'' if count == 1 else 's'}, {rows:,} rows"
    yield f"{'Equal' if verified.equal else 'NOT equal'} at {format_lsn(verified.lsn)}: {what}."
    for name, found in sorted(verified.tables.items()):
        if not found.equal:
            yield f"{name}: {described(found)}"
            yield from (f"  {shown(example)}" for example in found.examples)
    for name, reason in sorted(verified.not_covered.items()):
        yield f"{name} was not compared: {reason}"

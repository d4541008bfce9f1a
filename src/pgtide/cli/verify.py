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
    return verified.equal


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
        "why_not_covered": dict(sorted(verified.not_covered.items())),
        "gone": verified.gone,
    }


def as_text(verified: Verified) -> Iterator[str]:
    from pgtide.spark.comparison import described, is_cut, shown

    yield _summary(verified)
    for name, reason in sorted(verified.not_covered.items()):
        yield f"{name} was not compared: {reason}"
    for name in verified.gone:
        yield f"{name} is not in the source any more: there is nothing to compare its mirror with."
    cut = False
    for name, found in sorted(verified.tables.items()):
        if not found.equal:
            yield f"{name}: {described(found)}"
            yield from (f"  {shown(example)}" for example in found.examples)
            cut = cut or any(map(is_cut, found.examples))
    if cut:
        yield "Long values are cut; all of them: pgtide verify --json"


def _summary(verified: Verified) -> str:
    """The first line, which must not promise more than was seen."""
    rows = sum(found.source_rows for found in verified.tables.values())
    compared = f"{_tables(len(verified.tables))}, {rows:,} rows"
    where, left = format_lsn(verified.lsn), len(verified.not_covered)
    if verified.equal:
        return f"Equal at {where}: {compared}."
    differing = sum(not found.equal for found in verified.tables.values())
    found = f"{_tables(differing)} of {len(verified.tables)} differ{'s' if differing == 1 else ''}"
    if not left:
        return f"NOT equal at {where}: {found if verified.tables else 'there was no table to compare'}."
    was = f"{_tables(left)} {'was' if left == 1 else 'were'} not compared; see below what to do, then verify again"
    seen = f"{found}, and {was}" if differing else was + (f" ({compared}: equal)" if verified.tables else "")
    return f"{'NOT equal' if differing else 'NOT proven equal'} at {where}: {seen}."


def _tables(count: int) -> str:
    return f"{count} table{'' if count == 1 else 's'}"

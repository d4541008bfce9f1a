"""Asking the mirror for a point at an LSN, and waiting for it: the other side of `barriers`.

Every wait has a limit, and an error that names what was waited for: the mirror to take notice, the capture to bring the
log to the LSN, the mirror to get there.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pgtide.config import Config
from pgtide.errors import NotRunningError, TransientError
from pgtide.log.control import Barrier, BarrierState, barrier, put_barrier, remove_barrier
from pgtide.log.reader import LogReader
from pgtide.log.retention import reader_report, readers
from pgtide.lsn import format_lsn
from pgtide.replication.connect import connect_when_ready, postgres_errors
from pgtide.replication.slot import slot_state
from pgtide.spark.progress import NAME as MIRROR

Tell = Callable[[str], None]

_POLL_S = 0.1
_EXPIRY_MARGIN_S = 60.0
_START_IT = "Start it in another terminal: pgtide run. If nothing is to go on running: pgtide verify --catch-up"


@dataclass(frozen=True, slots=True)
class Limits:
    capture_s: float = 5.0  # for the slot to be in use: a capture may be connecting again
    mirror_s: float = 15.0  # for a mirror to take notice
    point_s: float = 600.0  # for the point to be published
    snapshot_s: float = 60.0  # for open transactions to end, without which there is no snapshot


def check_running(config: Config, limits: Limits, stop: threading.Event) -> None:
    """Whether capture and mirror run, asked before anything is begun."""
    if not capture_runs(config, limits.capture_s, stop):
        raise NotRunningError(
            f'the capture does not run: nobody uses replication slot "{config.source.slot}"', remedy=_START_IT
        )
    if not mirror_runs(config, limits.mirror_s, stop):
        raise NotRunningError(
            f"no mirror runs on the log in {config.log_location}: none has answered within {limits.mirror_s:g} s",
            remedy=_START_IT,
        )


def capture_runs(config: Config, limit_s: float, stop: threading.Event) -> bool:
    deadline = time.monotonic() + limit_s
    source = config.source
    with connect_when_ready(source.dsn, timeout_s=source.connect_timeout_seconds, stop=stop) as connection:
        while True:
            with postgres_errors("looking at the replication slot"):
                state = slot_state(connection, source.slot)
            if state is not None and state.active_pid is not None:
                return True
            if time.monotonic() > deadline:
                return False
            _pause(stop)


def mirror_runs(config: Config, limit_s: float, stop: threading.Event) -> bool:
    asked = _ask(config, None, limit_s)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            if _state(config, asked) is not BarrierState.ASKED:
                return True
            _pause(stop)
        return False
    finally:
        remove_barrier(config.log_location, asked.id)


def publish_at(config: Config, lsn: int, limits: Limits, stop: threading.Event, tell: Tell) -> bool:
    """Waits until a point at exactly this LSN is published; false if the mirror was already beyond it."""
    asked = _ask(config, lsn, limits.point_s)
    began = time.monotonic()
    reader = LogReader(config.log_location)
    told = ""
    try:
        while True:
            state = _state(config, asked)
            if state in (BarrierState.PUBLISHED, BarrierState.PASSED):
                return state is BarrierState.PUBLISHED
            waited_s = time.monotonic() - began
            if state is BarrierState.ASKED and waited_s > limits.mirror_s:
                raise NotRunningError(
                    f"no mirror runs on the log in {config.log_location}: "
                    f"none has answered within {limits.mirror_s:g} s",
                    remedy=_START_IT,
                )
            waiting_for = _waiting_for(config, reader, lsn)
            if waited_s > limits.point_s:
                raise TransientError(
                    f"no point at {format_lsn(lsn)} within {limits.point_s:g} s: {waiting_for}",
                    remedy="See what is behind: pgtide status. Then verify again, or with a longer --wait.",
                )
            if waiting_for != told:
                tell(waiting_for)
                told = waiting_for
            _pause(stop)
    finally:
        remove_barrier(config.log_location, asked.id)


def _waiting_for(config: Config, reader: LogReader, lsn: int) -> str:
    end = reader.end()
    if end.durable_lsn < lsn:
        return f"waiting for the capture: the log is at {format_lsn(end.durable_lsn)}, not yet at {format_lsn(lsn)}"
    if why := _why_not(config):
        return f"the mirror cannot write it, and tries again: {why}"
    mirrored = next((found.offset for found in readers(config.log_location) if found.name == MIRROR), None)
    return f"waiting for the mirror: it is at offset {mirrored}, the point is at {reader.position_after(lsn)}"


def _why_not(config: Config) -> str:
    """What keeps the mirror from publishing points, as it tells; empty if it does not say."""
    report = reader_report(config.log_location, MIRROR)
    return (json.loads(report).get("point_error") if report else None) or ""


def _ask(config: Config, lsn: int | None, limit_s: float) -> Barrier:
    expires_at = datetime.now(UTC) + timedelta(seconds=limit_s + _EXPIRY_MARGIN_S)
    asked = Barrier(secrets.token_hex(8), lsn, expires_at)
    put_barrier(config.log_location, asked)
    return asked


def _state(config: Config, asked: Barrier) -> BarrierState:
    found = barrier(config.log_location, asked.id)
    return found.state if found is not None else BarrierState.PASSED  # a mirror whose clock is ahead removed it


def _pause(stop: threading.Event) -> None:
    if stop.wait(_POLL_S):
        raise KeyboardInterrupt

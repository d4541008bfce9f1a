"""`status`: how far server, log and mirror are, from what each of them says about itself.  Starts no Spark.

Every part may be missing (no server, no log yet, no mirror yet); the keys are there all the same, with nulls.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pgtide.cli.running import CaptureStatus, capture_status
from pgtide.cli.sizes import size_of
from pgtide.config import Config, is_url
from pgtide.errors import LogError, PgtideError
from pgtide.log.control import TableHistory, histories
from pgtide.log.identity import has_identity
from pgtide.log.load_progress import load_line
from pgtide.log.reader import LogReader
from pgtide.log.retention import reader_names, reader_report
from pgtide.log.storage import storage_at
from pgtide.lsn import format_lsn, parse_lsn
from pgtide.replication.connect import connect, postgres_errors
from pgtide.replication.slot import slot_state
from pgtide.replication.writers import Writer, older_writers

_CONNECT_LIMIT_S = 5.0


@dataclass(slots=True)
class SourceStatus:
    wal_end_lsn: str | None = None
    confirmed_flush_lsn: str | None = None
    retained_wal_bytes: int | None = None
    slot_state: str = "unknown"  # active, inactive, missing, lost, unknown
    safe_wal_bytes: int | None = None  # null: the server has no limit, or is not known
    invalidation_reason: str | None = None  # why the slot is lost
    error: str | None = None


@dataclass(slots=True)
class LogStatus:
    durable_lsn: str | None = None
    last_commit_lsn: str | None = None
    end_offset: int | None = None
    segments: int = 0
    bytes: int = 0
    error: str | None = None


@dataclass(slots=True)
class Lag:
    """What lies between server and log, and between log and mirror; null where one of them is not known."""

    log_bytes: int | None = None
    log_seconds: float | None = None
    mirror_bytes: int | None = None
    mirror_seconds: float | None = None


@dataclass(slots=True)
class Status:
    source: SourceStatus
    log: LogStatus
    capture: CaptureStatus = field(default_factory=CaptureStatus)
    lag: Lag = field(default_factory=Lag)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    readers: dict[str, Any] = field(default_factory=dict)
    snapshots: dict[str, Any] = field(default_factory=dict)
    points: dict[str, Any] = field(default_factory=lambda: {"latest_lsn": None, "error": None})
    history: dict[str, dict[str, Any]] = field(default_factory=dict)  # from where on the log has all of each table

    @property
    def needs_a_person(self) -> bool:
        parked = any(table["state"] == "parked" for table in self.tables.values())
        errors = self.source.error or self.log.error
        waiting = self.capture.state == "waiting"
        return bool(errors or self.source.slot_state == "lost" or parked or waiting)


def gather(config: Config) -> Status:
    flush_lag_seconds, source = _source(config)
    status = Status(source, _log(config.log_location), capture_status(config))
    unreachable = status.log.error is not None and is_url(config.log_location)  # it is not asked three times
    status.readers = {} if unreachable else readers_of(config.log_location)
    mirror = status.readers.get("mirror") or {}
    status.tables = {name: _table(found) for name, found in (mirror.get("tables") or {}).items()}
    status.points = {"latest_lsn": (mirror.get("point") or {}).get("lsn"), "error": mirror.get("point_error")}
    status.snapshots = snapshots_of(mirror)
    status.lag = _lag(status, mirror, flush_lag_seconds)
    status.history = {} if unreachable else _history(config)
    return status


def snapshots_of(mirror: dict[str, Any]) -> dict[str, Any]:
    """The loads that are under way, wait, or have failed, from what the mirror says of itself."""
    found = {}
    for name, table in (mirror.get("tables") or {}).items():
        if table.get("load") or table.get("load_error") or table["state"] == "loading":
            state = "loading" if table.get("load") or table["state"] == "loading" else "failed"
            found[name] = {
                "state": state,
                "type": "bulk",
                "error": table.get("load_error"),
                **(table.get("load") or {}),
            }
    return found


def _history(config: Config) -> dict[str, dict[str, Any]]:
    """Per table the LSN from which its history is complete, or else the transactions that must end before."""
    found = histories(storage_at(config.log_location, patience_s=0))
    closed = {oid: history for oid, history in found.items() if history.complete_lsn is None}
    writers = _older_writers(config, closed) if closed else {}
    return {
        history.table: {
            "complete_from_lsn": None if history.complete_lsn is None else format_lsn(history.complete_lsn),
            "waiting_for": [asdict(writer) for writer in writers.get(oid, [])],
        }
        for oid, history in found.items()
    }


def _older_writers(config: Config, closed: dict[int, TableHistory]) -> dict[int, list[Writer]]:
    try:
        with connect(config.source.dsn, timeout_s=_timeout_s(config)) as connection:
            return {oid: older_writers(connection, oid, history.fence_xid) for oid, history in closed.items()}
    except PgtideError:
        return {}  # said by the part that looks at the source


def _timeout_s(config: Config) -> float:
    return min(_CONNECT_LIMIT_S, config.source.connect_timeout_seconds)


def _source(config: Config) -> tuple[float | None, SourceStatus]:
    """How long the server waits for our acknowledgements (null when idle), and the rest."""
    try:
        with (
            connect(config.source.dsn, timeout_s=_timeout_s(config)) as connection,
            postgres_errors("looking at the slot"),
        ):
            state = slot_state(connection, config.source.slot)
            row = connection.execute(_SOURCE, {"slot": config.source.slot}).fetchone()
    except PgtideError as error:
        return None, SourceStatus(error=error.what)
    wal_end_lsn, flush_lag_seconds = row if row is not None else (None, None)
    if state is None:
        return None, SourceStatus(wal_end_lsn, slot_state="missing")
    usable = "lost" if state.invalidation_reason else "active" if state.active_pid is not None else "inactive"
    confirmed = format_lsn(state.confirmed_flush_lsn)
    retained, safe = state.retained_wal_bytes, state.safe_wal_bytes
    reason = state.invalidation_reason or None
    return flush_lag_seconds, SourceStatus(wal_end_lsn, confirmed, retained, usable, safe, reason)


def _log(location: str) -> LogStatus:
    storage = storage_at(location, patience_s=0)
    try:
        if not has_identity(storage):
            return LogStatus()
        end = LogReader(storage).end()
        segments, large = storage.entries("segments"), storage.entries("large")
    except LogError as error:
        return LogStatus(error=error.what)
    return LogStatus(
        format_lsn(end.durable_lsn), format_lsn(end.last_commit_lsn), end.end_offset,
        len(segments), sum(entry.nbytes for entry in (*segments, *large)),
    )  # fmt: skip


def readers_of(location: str) -> dict[str, Any]:
    """What each reader of the log says of itself."""
    found = {}
    storage = storage_at(location, patience_s=0)
    for name in reader_names(storage):
        try:
            found[name] = json.loads(reader_report(storage, name) or b"{}")
        except (OSError, ValueError) as error:
            found[name] = {"error": f"{name}.json: {error}"}
    return found


def _table(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found.get(key) for key in ("state", "rows_applied", "applied_offset", "error")}


def _lag(status: Status, mirror: dict[str, Any], flush_lag_seconds: float | None) -> Lag:
    lag = Lag()
    log = status.log
    if status.source.wal_end_lsn is not None and log.durable_lsn is not None:
        lag.log_bytes = max(0, parse_lsn(status.source.wal_end_lsn) - parse_lsn(log.durable_lsn))
        # The server knows it only of one that acknowledges, the capture also while its log cannot be written.
        seconds = status.capture.lag_seconds
        lag.log_seconds = 0.0 if lag.log_bytes == 0 else flush_lag_seconds if seconds is None else seconds
    point = mirror.get("point")
    if log.end_offset is None or log.last_commit_lsn is None or not point:
        return lag
    if point["offset"] >= log.end_offset:
        lag.mirror_bytes, lag.mirror_seconds = 0, 0.0
        return lag
    lag.mirror_bytes = max(0, parse_lsn(log.last_commit_lsn) - parse_lsn(point["lsn"]))
    if point["commit_timestamp"]:
        behind = datetime.now(UTC) - datetime.fromisoformat(point["commit_timestamp"])
        lag.mirror_seconds = round(max(0.0, behind.total_seconds()), 3)
    return lag


def show(status: Status, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(status), indent=2, default=str))
        return
    console = Console()
    console.print(_overview(status))
    if status.tables:
        console.print(_tables(status))
    for name, load in sorted(status.snapshots.items()):
        if "rows" in load:
            console.print(Text(f"{name}: {load_line(load)}", "yellow"))
        elif load["error"]:
            console.print(Text(f"{name}: it could not be loaded anew: {load['error']}", "red"))
    if status.capture.snapshot_trouble:
        console.print(Text(f"snapshots for loads: {status.capture.snapshot_trouble}", "yellow"))
    for name, history in status.history.items():
        for writer in history["waiting_for"]:
            console.print(Text(f"{name}: its history begins when this has ended: {Writer(**writer)}", "yellow"))
    mirror = status.readers.get("mirror") or {}
    for name, error in ((mirror.get("upkeep") or {}).get("errors") or {}).items():
        console.print(Text(f"{name}: compaction or expiry failed, and will be tried again: {error}", "yellow"))
    if status.points["error"]:
        console.print(Text(f"no point can be published, which is tried again: {status.points['error']}", "red"))
    for error in filter(None, (status.source.error, status.log.error)):
        console.print(Text(error, "red"))


def _overview(status: Status) -> Table:
    source, log, lag = status.source, status.log, status.lag
    table = Table("", "at", "", title="pgtide", title_justify="left")
    slot = f"slot {source.slot_state}" + (f" ({source.invalidation_reason})" if source.invalidation_reason else "")
    if source.retained_wal_bytes is not None:
        slot += f", keeps {size_of(source.retained_wal_bytes)} of WAL"
    if source.safe_wal_bytes is not None:
        slot += f", {size_of(max(0, source.safe_wal_bytes))} until its limit"
    table.add_row("source", source.wal_end_lsn or "–", slot)
    capture = status.capture
    table.add_row("capture", "", Text(capture.state + (f": {capture.detail}" if capture.detail else "")))
    if capture.rows is not None and capture.bytes is not None:
        flushed = f", {1000 * capture.flush_seconds_mean:.1f} ms per flush" if capture.flush_seconds_mean else ""
        text = f"{capture.rows:,} rows, {capture.transactions:,} transactions, {size_of(capture.bytes)}{flushed}"
        table.add_row("", "", text)
    table.add_row(
        "log",
        log.durable_lsn or "–",
        f"{_behind(lag.log_bytes, lag.log_seconds)}, {log.segments} segments, {size_of(log.bytes)}",
    )
    table.add_row("mirror", status.points["latest_lsn"] or "–", _behind(lag.mirror_bytes, lag.mirror_seconds))
    return table


def _tables(status: Status) -> Table:
    table = Table("table", "state", "rows applied", "offset", "", title_justify="left")
    for name, found in sorted(status.tables.items()):
        colour = {"parked": "red", "loading": "yellow"}.get(str(found["state"]), "green")
        numbers = ["–" if found[key] is None else f"{found[key]:,}" for key in ("rows_applied", "applied_offset")]
        table.add_row(Text(name), Text(str(found["state"]), colour), *numbers, Text(found["error"] or ""))
    return table


def _behind(lag_bytes: int | None, seconds: float | None) -> str:
    if lag_bytes is None:
        return "not known"
    if lag_bytes == 0:
        return "up to date"
    return f"{size_of(lag_bytes)} behind" + (f", {seconds:.1f} s" if seconds is not None else "")


# Of its own walsender a role sees everything, also without pg_monitor.
_SOURCE = """
SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text,
       (SELECT extract(epoch FROM r.flush_lag)::float8
        FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid WHERE s.slot_name = %(slot)s)"""

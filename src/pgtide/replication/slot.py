"""The replication slot: made once with an exported snapshot, checked before every start.

`CREATE_REPLICATION_SLOT … (SNAPSHOT 'export')` gives an exact pair: the snapshot holds precisely the transactions
whose end LSN is at or below the consistent point.  The exported name dies with the exporter's next command, so the
snapshot is imported and exported again by a connection that keeps it alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgtide.errors import SlotError, TransientError
from pgtide.failpoints import declare, reach
from pgtide.lsn import format_lsn, parse_lsn

_SLOT_CREATED = declare("slot.created", "the slot exists, the log does not know of it yet")


START_OVER = (
    "changes since then are gone from the server: move the log and the lake tables aside and start again with a new "
    "slot (a repair that keeps them is not there yet)"
)

FREE_A_SLOT = (
    "Drop one that nobody needs: SELECT pg_drop_replication_slot('…');"
    " or raise max_replication_slots and restart the server."
)

# What invalidated a slot, and how to keep it from happening again.
_LOST = {
    "wal_removed": (
        "the log was behind by more WAL than the server keeps",
        "; then raise max_slot_wal_keep_size",
    ),
    "idle_timeout": (
        "nobody has read it for longer than the server allows",
        "; then raise idle_replication_slot_timeout, or keep the capture running",
    ),
    "rows_removed": (
        "the primary has removed catalog rows that the standby still needed",
        "; then set hot_standby_feedback = on on the standby",
    ),
    "wal_level_insufficient": (
        "the primary's wal_level is not logical any more",
        "; then set wal_level = logical on the primary and restart it",
    ),
    "conflict": (
        "what the standby needed was removed, or the primary's wal_level is not logical any more",
        "; then set hot_standby_feedback = on on the standby, and wal_level = logical on the primary",
    ),
}


@dataclass(frozen=True, slots=True)
class SlotState:
    name: str
    plugin: str
    database: str
    active_pid: int | None
    restart_lsn: int
    confirmed_flush_lsn: int
    wal_status: str  # reserved, extended, unreserved, lost
    invalidation_reason: str  # "" while it is usable
    two_phase: bool  # sends prepared transactions when they are prepared, whether asked to or not
    wal_end_lsn: int
    retained_wal_bytes: int
    safe_wal_bytes: int | None
    server_time_s: float


@dataclass(frozen=True, slots=True)
class CreatedSlot:
    consistent_lsn: int
    snapshot_name: str


def slot_state(connection: psycopg.Connection[Any], name: str) -> SlotState | None:
    """What the server says of the slot; None if it has none of that name."""
    with connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(
            """SELECT s.*, wal_end::text, pg_wal_lsn_diff(wal_end, restart_lsn) AS retained,
                   extract(epoch FROM clock_timestamp())::float8 AS server_time, pg_is_in_recovery() AS recovering
               FROM pg_replication_slots s, (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                   ELSE pg_current_wal_lsn() END AS wal_end) w WHERE slot_name = %s""",
            [name],
        ).fetchone()
    if row is None:
        return None
    return SlotState(
        name=name,
        plugin=row["plugin"] or "",
        database=row["database"] or "",
        active_pid=row["active_pid"],
        restart_lsn=parse_lsn(row["restart_lsn"] or "0/0"),
        confirmed_flush_lsn=parse_lsn(row["confirmed_flush_lsn"] or "0/0"),
        wal_status=row["wal_status"] or "lost",
        invalidation_reason=_invalidation_reason(row),
        two_phase=bool(row.get("two_phase")),
        wal_end_lsn=parse_lsn(row["wal_end"]),
        retained_wal_bytes=int(row["retained"] or 0),
        safe_wal_bytes=row["safe_wal_size"],
        server_time_s=row["server_time"],
    )


def _invalidation_reason(row: Mapping[str, Any]) -> str:
    """As Postgres 17 and newer tell it.  Before, only one on a standby (16) can be lost for anything but its WAL."""
    if row.get("invalidation_reason") or (row["wal_status"] or "lost") != "lost":
        return row.get("invalidation_reason") or ""
    return "conflict" if row["recovering"] else "wal_removed"


def create_slot(
    replication: psycopg.Connection[Any], name: str, *, temporary: bool = False, two_phase: bool = False
) -> CreatedSlot:
    """Makes the slot and exports the snapshot that agrees with it; the name lives until the next command."""
    command = sql.SQL("CREATE_REPLICATION_SLOT {} {} LOGICAL pgoutput (SNAPSHOT 'export'{})").format(
        sql.Identifier(name), sql.SQL("TEMPORARY" if temporary else ""), sql.SQL(", TWO_PHASE" if two_phase else "")
    )
    try:
        row = replication.execute(command).fetchone()
    except psycopg.errors.DuplicateObject:
        raise slot_exists(name) from None
    except psycopg.errors.ConfigurationLimitExceeded as error:
        what = f'replication slot "{name}" cannot be made: {str(error).partition(chr(10))[0]}'
        raise TransientError(what, remedy=FREE_A_SLOT) from error
    assert row is not None
    reach(_SLOT_CREATED)
    return CreatedSlot(parse_lsn(row[1]), row[2])


def slot_exists(name: str) -> SlotError:
    return SlotError(
        f'replication slot "{name}" exists already, but this log knows nothing of it',
        remedy=f"choose another source.slot, or, if nothing uses it: SELECT pg_drop_replication_slot('{name}')",
    )


def drop_slot(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute("SELECT pg_drop_replication_slot(%s)", [name])


def check_slot(state: SlotState | None, name: str, database: str, durable_lsn: int) -> SlotState:
    """Raises what keeps the slot from going on where the log ends; each state has its own remedy."""
    if state is None:
        raise SlotError(f'replication slot "{name}" does not exist any more', remedy=START_OVER)
    if state.invalidation_reason:
        reason = state.invalidation_reason
        why, prevention = _LOST.get(reason, ("the server gives no further reason", ""))
        raise SlotError(
            f'replication slot "{name}" was invalidated by the server ({reason}): {why}',
            remedy=f"{START_OVER}{prevention}",
        )
    if state.plugin != "pgoutput" or state.database != database:
        raise SlotError(
            f'replication slot "{name}" belongs to database {state.database!r} with plugin {state.plugin!r}',
            remedy="choose another name for source.slot",
        )
    if state.confirmed_flush_lsn > durable_lsn:
        raise SlotError(
            f'replication slot "{name}" was acknowledged up to {format_lsn(state.confirmed_flush_lsn)}, '
            f"but the log ends at {format_lsn(durable_lsn)}: somebody else used the slot, or the log is an older copy",
            remedy=START_OVER,
        )
    return state


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An exported snapshot and what it is told by: names come again when a server process has crashed."""

    name: str  # for SET TRANSACTION SNAPSHOT
    contents: str  # which transactions it sees, as pg_current_snapshot() prints it
    server_started: str  # the server that has it: its standbys have snapshots of the same name


class KeptSnapshot:
    """An exported snapshot that stays importable for as long as this object's connection lives."""

    def __init__(self, connection: psycopg.Connection[Any], snapshot_name: str, server_started: str) -> None:
        self._connection = connection
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot_name)))
        row = connection.execute("SELECT pg_export_snapshot(), pg_current_snapshot()::text").fetchone()
        assert row is not None
        self.snapshot = Snapshot(row[0], row[1], server_started)

    def is_alive(self) -> bool:
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def release(self) -> None:
        self._connection.close()

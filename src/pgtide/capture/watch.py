"""Watches what the stream itself does not tell: whether publication and slot are still as they must be, and the
numbers that people look at.

A publication that was dropped stops the stream for good on Postgres 15 to 17; 18 only warns in the server's log, and
the changes are lost without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgtide.errors import LogError, SlotError
from pgtide.metrics import counter, gauge, histogram
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.published import memberships
from pgtide.replication.slot import SlotState, slot_state

INTERVAL_S = 5.0
_WAL_LIMIT_NEAR_BYTES = 1 << 30

rows = counter("capture_rows", "Changes received from the server.")
read_rows = counter("capture_read_rows", "Rows of tables read into the log as changes of kind read.")
received_bytes = counter("capture_bytes", "Bytes of messages received from the server.")
transactions = counter("capture_transactions", "Transactions made durable in the log.")
reconnects = counter("capture_reconnects", "Times the connection to the server was lost and opened again.")
streaming = gauge("capture_streaming", "1 while the server streams changes to us, 0 while we connect or wait.")
prepared_transactions = gauge("capture_prepared_transactions", "Prepared transactions that wait for their end.")
durable_lsn = gauge("capture_durable_lsn", "Up to which LSN the log is durable, as a number.")
last_commit = gauge(
    "capture_last_commit_timestamp_seconds", "When the last transaction that is durable in the log was committed."
)
flush_seconds = histogram("capture_flush_seconds", "Time to write and fsync one block.")
lag_bytes = gauge("capture_lag_bytes", "WAL that the server has written and the log does not hold durably yet.")
lag_seconds = gauge(
    "capture_lag_seconds",
    "How long ago, by the server's clock, the log last held everything or the last durable transaction was committed; "
    "0 while it holds everything.",
)
retained_wal_bytes = gauge("slot_retained_wal_bytes", "WAL that the server keeps for the slot.")
safe_wal_bytes = gauge(
    "slot_safe_wal_bytes",
    "WAL that can be written before the slot is in danger (safe_wal_size); -1: there is no limit.",
)


class SourceWatch:
    """Looks every few seconds, over the connection that also holds the lock."""

    def __init__(
        self, slot: str, timeline: int, publications: Sequence[str], published_by: Mapping[int, frozenset[str]]
    ) -> None:
        self._slot = slot
        self._timeline = timeline
        self._publications = publications
        self._published_by = published_by
        self._next = 0.0
        self._held_everything_s = 0.0  # by the server's clock
        self.warning: str | None = None  # the WAL limit is near

    def look(self, connection: Connection, now_s: float, durable: int, last_commit_s: float) -> None:
        """Does nothing unless it is time; raises what a person has to mend."""
        if now_s < self._next:
            return
        self._next = now_s + INTERVAL_S
        with postgres_errors("watching slot and publication"):
            check_published(connection, self._publications, self._published_by)
            self._check_timeline(connection)
            state = slot_state(connection, self._slot)
        if state is None:
            return  # the stream will end with an error that says so
        retained_wal_bytes.set(state.retained_wal_bytes)
        safe_wal_bytes.set(-1 if state.safe_wal_bytes is None else state.safe_wal_bytes)
        pending = max(0, state.wal_end_lsn - durable)
        lag_bytes.set(pending)
        lag_seconds.set(self._lag_seconds(pending, state.server_time_s, last_commit_s))
        last_commit.set(last_commit_s)
        self.warning = _wal_limit(state)

    def _lag_seconds(self, pending_bytes: int, server_time_s: float, last_commit_s: float) -> float:
        """The commit alone does not tell: after a quiet hour the last one is an hour old when the next one comes."""
        since_s = max(self._held_everything_s, last_commit_s)
        if not pending_bytes or not since_s:
            self._held_everything_s = server_time_s
            return 0.0
        return max(0.0, server_time_s - since_s)

    def _check_timeline(self, connection: Connection) -> None:
        """A standby may be promoted while it streams, and then goes on streaming."""
        row = connection.execute(_TIMELINE).fetchone()
        if row is not None and row[0] is not None and int(row[0], 16) != self._timeline:
            raise LogError(
                f"the server is now on timeline {int(row[0], 16)}, the log follows {self._timeline}: it was promoted",
                remedy=NEW_LOG,
            )


_TIMELINE = "SELECT CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END"
NEW_LOG = "begin a new log (log.path) and a new mirror; going on across a fork is not there yet"


def check_published(
    connection: Connection, publications: Sequence[str], published_by: Mapping[int, frozenset[str]]
) -> None:
    """Raises if the server has stopped to send what the log is taken to have, also if it sends it again by now.

    One entry of the catalog that was there before and is there now has sent everything in between.
    """
    # Before the look at the publications: with one that is dropped in between, its tables would seem to be taken out.
    found_now = memberships(connection, publications, list(published_by))
    found = connection.execute(
        "SELECT pubname::text FROM pg_publication WHERE pubname = ANY(%s)", [list(publications)]
    ).fetchall()
    missing = sorted(set(publications) - {row[0] for row in found})
    if missing:
        raise SlotError(
            f"publication {missing[0]} was dropped while changes are captured: what happens to its tables from "
            "then on is not sent",
            remedy=_BEGIN_ANEW,
        )
    out = [membership.table for membership in found_now.values() if not membership.entries]
    if out:
        raise SlotError(
            f"{', '.join(out)}: taken out of the publication {publications[0]} while changes are captured: what "
            "happens there from then on is not sent",
            remedy=_LEAVE_OUT,
        )
    for oid, membership in found_now.items():
        noted = published_by[oid]
        if noted and membership.is_of_another_publication(noted):
            raise SlotError(
                f"the publication of {membership.table} was dropped and made again: what happened in between was not "
                "sent",
                remedy=_BEGIN_ANEW,
            )
        if noted and not membership.has_kept(noted):
            raise SlotError(
                f"{membership.table}: taken out of the publication {publications[0]} and put back: what happened there "
                "in between was not sent",
                remedy=_LEAVE_OUT,
            )


_BEGIN_ANEW = "begin a new log (log.path) with a new slot and a new mirror"
_LEAVE_OUT = "leave it out of source.tables for one start: when it comes back, its history begins anew"


def _wal_limit(state: SlotState) -> str | None:
    """A warning when little is left of what the server keeps for a slot that lags behind: a quarter, at most 1 GiB."""
    if state.safe_wal_bytes is None:
        return None
    limit_bytes = state.retained_wal_bytes + max(0, state.safe_wal_bytes)
    if state.safe_wal_bytes >= min(_WAL_LIMIT_NEAR_BYTES, limit_bytes // 4):
        return None
    return (
        "the WAL limit is near: the server gives the slot up, and changes are lost, when it would have to keep more "
        "WAL for it than max_slot_wal_keep_size; end transactions that are open for long, or raise the limit"
    )

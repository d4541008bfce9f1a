"""Watches what the stream itself does not tell: whether publication and slot are still as they must be, and the
numbers that people look at.

A publication that was dropped stops the stream for good on Postgres 15 to 17; 18 only warns in the server's log, and
the changes are lost without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgtide.errors import SlotError
from pgtide.metrics import counter, gauge, histogram
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.slot import slot_state

INTERVAL_S = 5.0
_WAL_LIMIT_NEAR_BYTES = 1 << 30
_WAL_LIMIT_NEAR = "less than 1 GiB of WAL until the server gives the slot up (max_slot_wal_keep_size)"

rows = counter("capture_rows", "Changes received from the server.")
received_bytes = counter("capture_bytes", "Bytes of messages received from the server.")
transactions = counter("capture_transactions", "Transactions made durable in the log.")
reconnects = counter("capture_reconnects", "Times the connection to the server was opened again.")
prepared_transactions = gauge("capture_prepared_transactions", "Prepared transactions that wait for their end.")
durable_lsn = gauge("capture_durable_lsn", "Up to which LSN the log is durable.")
flush_seconds = histogram("capture_flush_seconds", "Time to write and fsync one block.")
lag_bytes = gauge("capture_lag_bytes", "WAL that the server has written and the log does not hold durably yet.")
retained_wal_bytes = gauge("slot_retained_wal_bytes", "WAL that the server keeps for the slot.")
safe_wal_bytes = gauge("slot_safe_wal_bytes", "WAL that can be written before the slot is lost; -1: no limit.")


class SourceWatch:
    """Looks every few seconds, over the connection that also holds the lock."""

    def __init__(self, connection: Connection, slot: str, publications: Sequence[str]) -> None:
        self._connection = connection
        self._slot = slot
        self._publications = list(publications)
        self._next = 0.0
        self.warning: str | None = None  # the WAL limit is near

    def look(self, now_s: float, durable: int) -> None:
        """Does nothing unless it is time; raises what a person has to mend."""
        if now_s < self._next:
            return
        self._next = now_s + INTERVAL_S
        with postgres_errors("watching slot and publication"):
            self._check_publications()
            state = slot_state(self._connection, self._slot)
        if state is None:
            return  # the stream will end with an error that says so
        retained_wal_bytes.set(state.retained_wal_bytes)
        safe_wal_bytes.set(-1 if state.safe_wal_bytes is None else state.safe_wal_bytes)
        lag_bytes.set(max(0, state.wal_end_lsn - durable))
        near = state.safe_wal_bytes is not None and state.safe_wal_bytes < _WAL_LIMIT_NEAR_BYTES
        self.warning = _WAL_LIMIT_NEAR if near else None

    def _check_publications(self) -> None:
        found = self._connection.execute(
            "SELECT pubname::text FROM pg_publication WHERE pubname = ANY(%s)", [self._publications]
        ).fetchall()
        missing = sorted(set(self._publications) - {row[0] for row in found})
        if missing:
            raise SlotError(
                f"publication {missing[0]} was dropped while changes are captured: what happens to its tables from "
                "then on is not sent",
                remedy="create it again and take a new snapshot of the tables, or begin a new log",
            )

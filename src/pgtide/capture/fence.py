"""Where the history of a table begins that was published after the slot was made: behind the fence.

At the slot's making the server itself waits for all open transactions.  A table that comes later is fenced: noted with
the xid that all later transactions have, until no transaction from before it has a lock on the table; from the WAL's
end at that moment on, every transaction is in the stream with all its rows of the table.  The note is in the log's
control folder, so that a load can rely on it, and a capture that was killed goes on waiting for the same transactions.

A table without a note is fenced at every start: whatever was altered without being noted is only noted later, which is
safe.  The note of a table that is captured no more goes, since its history has a gap when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pgtide.errors import LogNotWritableError
from pgtide.failpoints import declare, reach
from pgtide.log.control import TableHistory, histories, record_histories
from pgtide.log.storage import Storage
from pgtide.lsn import format_lsn
from pgtide.replication.catalog import TableInfo
from pgtide.replication.connect import Connection
from pgtide.replication.published import memberships
from pgtide.replication.writers import insert_lsn, next_transaction, older_writers

_FENCED = declare("capture.fence.noted", "a table is published and noted as fenced")
_OPENED = declare("capture.fence.opened", "the LSN from which a table's history is complete is noted")

INTERVAL_S = 0.5


class Fence:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._noted: dict[int, TableHistory] = {}
        self._next = 0.0
        self._notices: dict[int, str] = {}

    @property
    def notices(self) -> tuple[str, ...]:
        """For each table that is or was fenced in this run: whom we wait for, or that the fence has opened."""
        return tuple(self._notices.values())

    @property
    def published_by(self) -> dict[int, frozenset[str]]:
        """By which entries of the catalog each captured table is published."""
        return {oid: history.published_by for oid, history in self._noted.items()}

    def raise_around(self, connection: Connection, publications: Sequence[str], tables: Sequence[TableInfo]) -> None:
        """Notes the tables that are new; to be called when they are published, before their changes are read."""
        noted = histories(self._storage)
        published = memberships(connection, publications, [table.oid for table in tables])
        xid = next_transaction(connection) if any(table.oid not in noted for table in tables) else 0
        kept = {}
        for table in tables:
            history = noted.get(table.oid) or TableHistory(table.qualified_name, xid, None)
            entries = published[table.oid].entries if table.oid in published else history.published_by
            kept[table.oid] = replace(history, table=table.qualified_name, published_by=entries)
        if kept != noted:
            try:
                record_histories(self._storage, kept)
            except OSError as error:
                reason = error.strerror or error
                raise LogNotWritableError(f"the log in {self._storage.location} cannot be written: {reason}") from error
            reach(_FENCED)
        self._noted = kept

    def look(self, connection: Connection, now_s: float) -> None:
        """Does nothing unless a table is fenced and it is time; opens what can be opened."""
        closed = {oid: history for oid, history in self._noted.items() if history.complete_lsn is None}
        if not closed or now_s < self._next:
            return
        self._next = now_s + INTERVAL_S
        for oid, history in closed.items():
            self._notices[oid] = f"{history.table}: {self._try_to_open(connection, oid, history)}"

    def _try_to_open(self, connection: Connection, oid: int, history: TableHistory) -> str:
        writers = older_writers(connection, oid, history.fence_xid)
        if writers:
            return f"its history begins when open transactions have ended: {', '.join(map(str, writers))}"
        lsn = insert_lsn(connection)
        if lsn is None:
            return "where its history begins cannot be told on a standby"
        opened = self._noted | {oid: replace(history, complete_lsn=lsn)}
        try:
            record_histories(self._storage, opened)
        except OSError as error:
            return f"where its history begins cannot be noted: {error.strerror or error}"
        reach(_OPENED)
        self._noted = opened
        return f"its history is complete from {format_lsn(lsn)} on"

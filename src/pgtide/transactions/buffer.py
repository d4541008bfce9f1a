"""Open transactions under one memory budget; whole committed transactions out.

Changes arrive in any mixture.  While all open transactions together fit into the budget they stay in memory; beyond
it the largest one goes to the spool.  Rolling back a savepoint removes exactly its changes.  A committed transaction
comes out as pieces of at most a block each, or, when it was spooled, as the names of its files.  A prepared one is kept
in the spool, across restarts, until its end is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.errors import LogError, PgtideError
from pgtide.lsn import format_lsn
from pgtide.transactions.pending import Pending
from pgtide.transactions.pieces import Commit
from pgtide.transactions.prepared import Forget, Keep, Key, NoteCommit, Prepare, Prepared, SpoolStep, load_prepared
from pgtide.transactions.spool import Spool

__all__ = ["Commit", "Prepare", "TransactionBuffer"]

MEMORY_BYTES = 256 << 20
PIECE_BYTES = 8 << 20


class TransactionBuffer:
    """One per connection to the source: what is open is forgotten with it, because the source sends it again.

    `durable_lsn`: how far the log is durable; a prepared transaction that committed at or before is not kept any more.
    """

    def __init__(
        self,
        spool: Spool,
        memory_bytes: int = MEMORY_BYTES,
        piece_bytes: int = PIECE_BYTES,
        durable_lsn: int = 0,
    ) -> None:
        self._spool = spool
        self._budget_bytes = memory_bytes
        self._piece_bytes = piece_bytes
        self._open: dict[int, Pending] = {}
        self._prepared: dict[Key, Prepared] = {}
        self.memory_bytes = 0
        self._restore(durable_lsn)

    def _restore(self, durable_lsn: int) -> None:
        """What an earlier process has left: the source sends all of it again but prepared transactions."""
        self._prepared = {prepared.key: prepared for prepared in load_prepared(self._spool, durable_lsn)}
        self._spool.remove_all_but({path for each in self._prepared.values() for path in (each.note, *each.rows)})

    @property
    def open_transactions(self) -> int:
        return len(self._open)

    @property
    def prepared_transactions(self) -> int:
        return len(self._prepared)

    def begin(self, xid: int) -> None:
        """A transaction's first changes are coming; a second call changes nothing."""
        if xid not in self._open:
            self._open[xid] = Pending(xid)

    def next_place(self, xid: int) -> int:
        return self._transaction(xid).places.count

    def append(
        self,
        xid: int,
        subxids: npt.NDArray[np.uint32],
        tables: Sequence[TableRows],
        row_ids: Sequence[bytes] | None = None,
    ) -> None:
        """Adds changes: `subxids` says for each place from `next_place` on which subtransaction wrote it.

        `row_ids` names the row that each place changes, for a source that undoes changes by naming rows.
        """
        transaction = self._transaction(xid)
        before = transaction.memory_bytes
        transaction.append(subxids, tables, row_ids)
        self.memory_bytes += transaction.memory_bytes - before
        while self.memory_bytes > self._budget_bytes:
            self._spill(max(self._open.values(), key=lambda each: each.memory_bytes))

    def abort(self, xid: int, subxid: int) -> None:
        """Rolls back a subtransaction, or, when both are equal, the whole transaction."""
        if xid == subxid:
            self.forget(xid)
        elif xid in self._open:
            transaction = self._open[xid]
            before = transaction.memory_bytes
            gone = transaction.places.roll_back(subxid)
            if gone:
                transaction.drop_rows(gone)
                self.memory_bytes += transaction.memory_bytes - before

    def undo(self, xid: int, rows: int | Sequence[bytes]) -> None:
        """Takes changes back, the newest first: so many, or one of each of these rows, in this order."""
        self._transaction(xid).undo(rows)

    def forget(self, xid: int) -> None:
        """Drops a transaction; one that is not known is none (its changes may all have been filtered away)."""
        transaction = self._open.pop(xid, None)
        if transaction is not None:
            self.memory_bytes -= transaction.memory_bytes
            if transaction.files is not None:
                transaction.files.remove()

    def forget_all(self) -> None:
        """Drops all that are open; prepared ones stay."""
        for xid in list(self._open):
            self.forget(xid)

    def commit(self, xid: int, commit: Commit) -> list[Committed] | LargeTransaction:
        """The whole transaction; an empty list if nothing of it is left."""
        transaction = self._open.get(xid)
        if transaction is None or transaction.places.kept == 0:
            self.forget(xid)
            return []
        if transaction.files is not None:
            self._spill(transaction)
            large = transaction.by_reference(commit, kept=False)
            self._spool.discard([transaction.files.ids])
            transaction.files.release()
            del self._open[xid]
            return large
        del self._open[xid]
        self.memory_bytes -= transaction.memory_bytes
        return transaction.whole(commit)

    def prepare(self, xid: int, prepare: Prepare) -> list[SpoolStep]:
        """The transaction waits in the spool for its end.  It may have no changes: its end comes all the same."""
        key = (prepare.gid, xid)
        known = self._prepared.get(key)
        if known is not None and known.prepare.end_lsn == prepare.end_lsn:
            self.forget(xid)  # sent again, and kept already
            return []
        self.begin(xid)
        transaction = self._open[xid]
        self._spill(transaction)
        del self._open[xid]
        transaction.places.forget_writers()
        prepared = self._prepared[key] = Prepared(prepare, transaction)
        replaced = [] if known is None else self._forget_prepared(known)
        return [Keep(prepared.note, prepared.rows, prepared.encoded()), *replaced]

    def commit_prepared(self, gid: str, xid: int, commit: Commit) -> list[SpoolStep | Committed | LargeTransaction]:
        """The whole transaction, between the steps that go with it; its origin is the one that came with the prepare.

        One that is not known is an error, never an empty transaction.
        """
        prepared = self._take_prepared(gid, xid, commit)
        commit = replace(commit, origin=prepared.prepare.origin)
        transaction: list[Committed | LargeTransaction] = []
        if prepared.transaction.row_bytes <= self._piece_bytes:
            transaction += prepared.transaction.whole(commit)
        elif prepared.transaction.places.kept:
            transaction.append(prepared.transaction.by_reference(commit, kept=True))
        noted = NoteCommit(prepared.note, prepared.encoded(commit.end_lsn))
        return [noted, *transaction, *self._forget_prepared(prepared)]

    def rollback_prepared(self, gid: str, xid: int) -> list[SpoolStep]:
        """Drops a prepared transaction; one that is not known is none: its prepare may have been skipped."""
        prepared = self._prepared.pop((gid, xid), None)
        return [] if prepared is None else self._forget_prepared(prepared)

    def _take_prepared(self, gid: str, xid: int, commit: Commit) -> Prepared:
        prepared = self._prepared.pop((gid, xid), None)
        files = prepared.transaction.files if prepared is not None else None
        if prepared is None or files is None or not files.are_there():
            raise LogError(
                f"prepared transaction {gid!r} (xid {xid}) was committed at {format_lsn(commit.commit_lsn)}, but its "
                f"rows are not in the spool {self._spool.folder}, and the source does not send them again",
                remedy="if the spool was moved, set capture.spool_path to where it is; if it is lost, begin a new log",
            )
        return prepared

    def _forget_prepared(self, prepared: Prepared) -> list[SpoolStep]:
        forget = Forget(prepared.note, prepared.rows)
        assert prepared.transaction.files is not None
        prepared.transaction.files.release()
        return [forget]

    def _transaction(self, xid: int) -> Pending:
        try:
            return self._open[xid]
        except KeyError:
            raise PgtideError(f"changes of transaction {xid}, which was not begun") from None

    def _spill(self, transaction: Pending) -> None:
        self.memory_bytes -= transaction.memory_bytes
        transaction.spill(self._spool, self._piece_bytes)

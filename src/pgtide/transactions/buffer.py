"""Open transactions under one memory budget; whole committed transactions out.

Changes arrive in any mixture.  While all open transactions together fit into the budget they stay in memory; beyond
it the largest one goes to the spool.  Rolling back a savepoint removes exactly its changes.  A committed transaction
comes out as pieces of at most a block each, or, when it was spooled, as the names of its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.change import TRANSACTIONS, Committed, LargeTransaction, TableRows, TransactionKind
from pgtide.errors import PgtideError
from pgtide.log.block import outside
from pgtide.transactions.places import Places, Range, dense
from pgtide.transactions.spool import Spool, SpooledFiles

MEMORY_BYTES = 256 << 20
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Commit:
    """What the source says of a transaction when it commits."""

    commit_lsn: int
    end_lsn: int
    commit_timestamp_us: int
    kind: TransactionKind = TransactionKind.COMMIT
    origin: str | None = None


@dataclass(slots=True)
class _Open:
    """One open transaction: rows in memory (`tables` of each piece have `_place` and a `_txn` of 0) or in files."""

    xid: int
    places: Places = field(default_factory=Places)
    pieces: list[tuple[TableRows, ...]] = field(default_factory=list)
    memory_bytes: int = 0
    files: SpooledFiles | None = None
    spooled_places: int = 0  # places below are in files


class TransactionBuffer:
    def __init__(self, spool: Spool, memory_bytes: int = MEMORY_BYTES, piece_bytes: int = PIECE_BYTES) -> None:
        self._spool = spool
        self._budget_bytes = memory_bytes
        self._piece_bytes = piece_bytes
        self._open: dict[int, _Open] = {}
        self.memory_bytes = 0

    @property
    def open_transactions(self) -> int:
        return len(self._open)

    def begin(self, xid: int) -> None:
        """A transaction's first changes are coming; a second call changes nothing."""
        if xid not in self._open:
            self._open[xid] = _Open(xid)

    def next_place(self, xid: int) -> int:
        return self._transaction(xid).places.count

    def append(self, xid: int, subxids: npt.NDArray[np.uint32], tables: Sequence[TableRows]) -> None:
        """Adds changes: `subxids` says for each place from `next_place` on which subtransaction wrote it."""
        transaction = self._transaction(xid)
        transaction.places.add(subxids)
        size = sum(table.rows.nbytes for table in tables)
        transaction.pieces.append(tuple(tables))
        transaction.memory_bytes += size
        self.memory_bytes += size
        while self.memory_bytes > self._budget_bytes:
            self._spill(max(self._open.values(), key=lambda each: each.memory_bytes))

    def abort(self, xid: int, subxid: int) -> None:
        """Rolls back a subtransaction, or, when both are equal, the whole transaction."""
        if xid == subxid:
            self.forget(xid)
        elif xid in self._open:
            transaction = self._open[xid]
            gone = transaction.places.roll_back(subxid)
            if gone:
                self._drop_rows(transaction, gone)

    def forget(self, xid: int) -> None:
        """Drops a transaction; one that is not known is none (its changes may all have been filtered away)."""
        transaction = self._open.pop(xid, None)
        if transaction is not None:
            self.memory_bytes -= transaction.memory_bytes
            if transaction.files is not None:
                transaction.files.remove()

    def forget_all(self) -> None:
        for xid in list(self._open):
            self.forget(xid)

    def commit(self, xid: int, commit: Commit) -> list[Committed] | LargeTransaction:
        """The whole transaction; an empty list if nothing of it is left."""
        transaction = self._open.get(xid)
        if transaction is None or transaction.places.kept == 0:
            self.forget(xid)
            return []
        if transaction.files is not None:
            return self._commit_spooled(transaction, commit)
        del self._open[xid]
        self.memory_bytes -= transaction.memory_bytes
        return self._pieces(transaction, commit)

    def _transaction(self, xid: int) -> _Open:
        try:
            return self._open[xid]
        except KeyError:
            raise PgtideError(f"changes of transaction {xid}, which was not begun") from None

    def _drop_rows(self, transaction: _Open, gone: list[Range]) -> None:
        """Takes rolled-back rows out of memory; in files they are left out by their places."""
        pieces, size = [], 0
        for piece in transaction.pieces:
            kept = tuple(table for table in (_without(table, gone) for table in piece) if table.rows.num_rows)
            if kept:
                pieces.append(kept)
                size += sum(table.rows.nbytes for table in kept)
        self.memory_bytes += size - transaction.memory_bytes
        transaction.pieces, transaction.memory_bytes = pieces, size

    def _spill(self, transaction: _Open) -> None:
        if transaction.files is None:
            transaction.files = self._spool.new_files(str(transaction.xid))
        if transaction.pieces:
            unknown = Commit(0, 0, 0)
            for group in self._groups(transaction.pieces):
                pieces = [
                    Committed(_entry(transaction.xid, unknown, _rows(piece), ends=False), piece) for piece in group
                ]
                transaction.files.append(pieces, transaction.spooled_places)
        transaction.spooled_places = transaction.places.count
        self.memory_bytes -= transaction.memory_bytes
        transaction.pieces, transaction.memory_bytes = [], 0

    def _commit_spooled(self, transaction: _Open, commit: Commit) -> LargeTransaction:
        self._spill(transaction)
        del self._open[transaction.xid]
        files = transaction.files
        assert files is not None
        paths: tuple[Path, ...] = tuple(files.paths)
        files.release()
        places = transaction.places
        return LargeTransaction(
            transaction=_entry(transaction.xid, commit, places.kept, ends=True),
            places=places.count,
            gone=tuple(places.gone),
            files=paths,
            shapes=tuple(files.shapes.values()),
        )

    def _pieces(self, transaction: _Open, commit: Commit) -> list[Committed]:
        """In memory to the end: rows renumbered so that nothing shows of what was rolled back."""
        gone = transaction.places.gone
        groups = list(self._groups(transaction.pieces))
        result: list[Committed] = []
        for number, group in enumerate(groups):
            last = number == len(groups) - 1
            for index, piece in enumerate(group):
                ends = last and index == len(group) - 1
                entry = _entry(transaction.xid, commit if ends else replace(commit, end_lsn=0), _rows(piece), ends=ends)
                result.append(Committed(entry, tuple(_renumbered(table, gone) for table in piece)))
        return result

    def _groups(self, pieces: list[tuple[TableRows, ...]]) -> list[list[tuple[TableRows, ...]]]:
        """Consecutive pieces of about a block together."""
        groups: list[list[tuple[TableRows, ...]]] = []
        size = self._piece_bytes
        for piece in pieces:
            if size >= self._piece_bytes:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += sum(table.rows.nbytes for table in piece)
        return groups


def _rows(piece: tuple[TableRows, ...]) -> int:
    return sum(table.rows.num_rows for table in piece)


def _entry(xid: int, commit: Commit, changes: int, *, ends: bool) -> pa.RecordBatch:
    values = {
        "kind": int(commit.kind),
        "xid": xid,
        "commit_lsn": commit.commit_lsn,
        "end_lsn": commit.end_lsn,
        "commit_timestamp": commit.commit_timestamp_us,
        "first_offset": 0,
        "end_offset": 0,
        "changes": changes,
        "ends": ends,
        "origin": commit.origin,
        "extra": None,
    }
    return pa.RecordBatch.from_pylist([values], schema=TRANSACTIONS)


def _without(table: TableRows, gone: list[Range]) -> TableRows:
    kept = outside(table.rows["_place"].to_numpy(), gone)
    return table if kept.all() else TableRows(table.shape, table.rows.filter(pa.array(kept)))


def _renumbered(table: TableRows, gone: list[Range]) -> TableRows:
    if not gone:
        return table
    index = table.rows.schema.get_field_index("_place")
    places = dense(table.rows.column(index).to_numpy(), gone)
    rows = table.rows.set_column(index, table.rows.schema.field(index), pa.array(places))
    return TableRows(table.shape, rows)

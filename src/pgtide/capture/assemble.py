"""From decoded messages to committed transactions, in commit order.

Two kinds interleave in the stream: transactions that come whole after their commit (`whole`), and those that may yet
roll back: blocks of large ones that are still in progress, and prepared ones.  The transaction buffer keeps them until
their end is known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.capture.whole import HELD_BYTES, Idle, WholeTransactions, between, with_places
from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.decode.decoded import Decoded, ShapedRows
from pgtide.errors import SendWholeError
from pgtide.schema import MESSAGES
from pgtide.transactions.buffer import Commit, Prepare, TransactionBuffer
from pgtide.transactions.prepared import SpoolStep

_STREAM_START, _STREAM_STOP, _STREAM_ABORT, _STREAM_COMMIT = (ord(kind) for kind in "SEAc")
_BEGIN_PREPARE, _PREPARE, _STREAM_PREPARE, _COMMIT_PREPARED, _ROLLBACK_PREPARED = (ord(kind) for kind in "bPpKr")
_OF_THE_BUFFER = np.isin(np.arange(256), [ord(kind) for kind in "SEAcbPpKr"])
_KEPT_MORE, _KEPT_MORE_BYTES = 1.25, 4096

Piece = Committed | LargeTransaction | SpoolStep | Idle


class Assembler:
    """Turns feeds into pieces for the log; one per connection, because a new connection sends again."""

    def __init__(self, durable_lsn: int, buffer: TransactionBuffer, held_bytes: int = HELD_BYTES) -> None:
        self._durable_lsn = durable_lsn
        self._buffer = buffer
        self._whole = WholeTransactions(durable_lsn, held_bytes)
        self._inside: int | None = None  # xid of the stream block or prepared transaction whose changes are coming
        self._in_progress = False  # and it is a stream block
        self._origins: dict[int, str] = {}  # of streamed transactions
        # A streamed message names its transaction, not its savepoint (seen on 16): with both, it cannot be known
        # whether the message was rolled back.
        self._with_messages: set[int] = set()
        self._partly_rolled_back: set[int] = set()
        buffer.forget_all()

    @property
    def prepared_transactions(self) -> int:
        return self._buffer.prepared_transactions

    def feed(self, decoded: Decoded) -> list[Piece]:
        """What can be written now, in order."""
        kinds = decoded.controls["kind"]
        edges = np.flatnonzero(_OF_THE_BUFFER[kinds])
        if not len(edges) and self._inside is None:
            return [*self._whole.feed(decoded)]
        pieces: list[Piece] = []
        first_control, first_change = 0, decoded.first_change
        for edge in [*edges.tolist(), len(kinds)]:
            last = edge == len(kinds)
            change = decoded.first_change + decoded.changes if last else int(decoded.controls["change"][edge])
            part = _part(decoded, slice(first_control, edge), first_change, change)
            if self._inside is None:
                pieces += self._whole.feed(part)
            else:
                self._append(self._inside, part)
                for origin in part.origins.values():
                    self._origins[self._inside] = origin
            if not last:
                pieces += self._control(decoded.controls[edge], decoded.gids.get(edge, ""))
            first_control, first_change = edge + 1, change
        return pieces

    def _append(self, xid: int, part: Decoded) -> None:
        """Changes for the buffer: their places follow those that the transaction has already."""
        if not part.changes:
            return
        shift = self._buffer.next_place(xid) - part.first_change
        subxids = np.zeros(part.changes, np.uint32)
        tables = []
        for table in part.tables:
            if table.shape == MESSAGES:
                self._with_messages.add(xid)
            elif self._in_progress and any(column.attnum < 0 for column in table.shape.columns):
                # The catalog shows what a transaction in progress has altered to nobody else; after the commit it does.
                raise SendWholeError(f"transaction {xid} has altered {table.shape.qualified_name}")
            changes = table.rows["_change"].to_numpy()
            subxids[changes - part.first_change] = table.rows["_subxid"].to_numpy()
            rows = with_places(_apart(table.rows), changes + shift, np.zeros(len(changes), np.int64))
            tables.append(TableRows(table.shape, rows))
        self._buffer.append(xid, subxids, tables)

    def _control(self, control: Any, gid: str) -> list[Piece]:
        kind, xid = int(control["kind"]), int(control["xid"])
        if kind in (_STREAM_START, _BEGIN_PREPARE):
            self._inside, self._in_progress = xid, kind == _STREAM_START
            self._buffer.begin(xid)
        elif kind == _STREAM_STOP:
            self._inside = None
        elif kind == _STREAM_ABORT:
            subxid = int(control["subxid"])
            self._buffer.abort(xid, subxid)
            if subxid == xid:
                self._forget(xid)
            else:
                self._partly_rolled_back.add(xid)
        elif kind == _STREAM_COMMIT:
            return self._commit(xid, control)
        elif kind in (_PREPARE, _STREAM_PREPARE):
            self._inside = None
            return self._prepare(xid, gid, control)
        elif kind == _COMMIT_PREPARED:
            return self._commit_prepared(xid, gid, control)
        else:
            return [*self._buffer.rollback_prepared(gid, xid), Idle(int(control["end_lsn"]))]
        return []

    def _forget(self, xid: int) -> str | None:
        """What was remembered of a transaction is not needed any more; returns its origin."""
        self._with_messages.discard(xid)
        self._partly_rolled_back.discard(xid)
        return self._origins.pop(xid, None)

    def _check_certain(self, xid: int, end_lsn: int) -> None:
        if xid in self._with_messages and xid in self._partly_rolled_back:
            what = f"transaction {xid} has logical messages and rolled-back savepoints"
            raise SendWholeError(what, end_lsn=end_lsn)

    def _commit(self, xid: int, control: Any) -> list[Piece]:
        commit = _commit_of(control)
        if commit.commit_lsn < self._durable_lsn:
            self._forget(xid)
            self._buffer.forget(xid)
            return []
        self._check_certain(xid, commit.end_lsn)
        committed = self._buffer.commit(xid, replace(commit, origin=self._forget(xid)))
        if isinstance(committed, LargeTransaction):
            return [committed]
        return [*committed] or [Idle(commit.end_lsn)]

    def _prepare(self, xid: int, gid: str, control: Any) -> list[Piece]:
        """Not skipped, however old: one that was prepared before the slot became two-phase comes with its commit."""
        end_lsn = int(control["end_lsn"])
        self._check_certain(xid, end_lsn)
        return [*self._buffer.prepare(xid, Prepare(gid, end_lsn, self._forget(xid))), Idle(end_lsn)]

    def _commit_prepared(self, xid: int, gid: str, control: Any) -> list[Piece]:
        commit = _commit_of(control)
        if commit.commit_lsn < self._durable_lsn:
            return [*self._buffer.rollback_prepared(gid, xid)]
        # The position is durable before what was kept is forgotten, also when there are no rows to write.
        noted, *rows, forget = self._buffer.commit_prepared(gid, xid, commit)
        return [noted, *rows, Idle(commit.end_lsn), forget]


def _commit_of(control: Any) -> Commit:
    return Commit(int(control["commit_lsn"]), int(control["end_lsn"]), int(control["timestamp_us"]))


def _apart(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows that may be kept for long: copied where they would keep much more in memory than they are themselves.

    A slice keeps the whole feed alive that it was cut from, and is counted as what it is.
    """
    if rows.get_total_buffer_size() <= _KEPT_MORE * rows.nbytes + _KEPT_MORE_BYTES:
        return rows
    return pa.RecordBatch.from_arrays([pa.concat_arrays([column]) for column in rows.columns], schema=rows.schema)


def _part(decoded: Decoded, controls: slice, first_change: int, end_change: int) -> Decoded:
    """A stretch of a feed, as if it had been fed alone."""
    tables = []
    for table in decoded.tables:
        rows: pa.RecordBatch = between(table.rows, first_change, end_change)
        if rows.num_rows:
            tables.append(ShapedRows(table.shape, rows))
    shown: npt.NDArray[Any] = decoded.controls[controls]
    origins = {
        at - controls.start: name for at, name in decoded.origins.items() if controls.start <= at < controls.stop
    }
    return Decoded(first_change, end_change - first_change, tuple(tables), shown, origins, {}, decoded.wal_end)

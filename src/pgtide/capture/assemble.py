"""From decoded messages to committed transactions, in commit order.

Two kinds interleave in the stream: transactions that come whole after their commit (`whole`), and blocks of large ones
that are still in progress and may yet roll back, which the transaction buffer keeps until it is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.capture.whole import HELD_BYTES, Idle, WholeTransactions, between, with_places
from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.decode.decoded import Decoded, ShapedRows
from pgtide.errors import DecodeError, SendWholeError
from pgtide.schema import MESSAGES
from pgtide.transactions.buffer import Commit, TransactionBuffer

_STREAM_START, _STREAM_STOP, _STREAM_ABORT, _STREAM_COMMIT = (ord(kind) for kind in "SEAc")
_OF_STREAMS = np.isin(np.arange(256), [_STREAM_START, _STREAM_STOP, _STREAM_ABORT, _STREAM_COMMIT])
_UNDERSTOOD = np.isin(np.arange(256), [ord(kind) for kind in "BCkOSEAc"])

Piece = Committed | LargeTransaction | Idle


class Assembler:
    """Turns feeds into pieces for the log; one per connection, because a new connection sends again."""

    def __init__(self, durable_lsn: int, buffer: TransactionBuffer, held_bytes: int = HELD_BYTES) -> None:
        self._durable_lsn = durable_lsn
        self._buffer = buffer
        self._whole = WholeTransactions(durable_lsn, held_bytes)
        self._streaming: int | None = None  # xid of the stream block that we are in
        self._origins: dict[int, str] = {}  # of streamed transactions
        # A streamed message names its transaction, not its savepoint (seen on 16): with both, it cannot be known
        # whether the message was rolled back.
        self._with_messages: set[int] = set()
        self._partly_rolled_back: set[int] = set()
        buffer.forget_all()

    def feed(self, decoded: Decoded) -> list[Piece]:
        """What can be written now, in order."""
        kinds = decoded.controls["kind"]
        if not _UNDERSTOOD[kinds].all():
            raise DecodeError(
                f"the server sent message {chr(kinds[~_UNDERSTOOD[kinds]][0])!r}, which was not asked for"
            )
        edges = np.flatnonzero(_OF_STREAMS[kinds])
        if not len(edges) and self._streaming is None:
            return [*self._whole.feed(decoded)]
        pieces: list[Piece] = []
        first_control, first_change = 0, decoded.first_change
        for edge in [*edges.tolist(), len(kinds)]:
            last = edge == len(kinds)
            change = decoded.first_change + decoded.changes if last else int(decoded.controls["change"][edge])
            part = _part(decoded, slice(first_control, edge), first_change, change)
            if self._streaming is None:
                pieces += self._whole.feed(part)
            else:
                self._append(self._streaming, part)
                for origin in part.origins.values():
                    self._origins[self._streaming] = origin
            if not last:
                pieces += self._control(decoded.controls[edge])
            first_control, first_change = edge + 1, change
        return pieces

    def _append(self, xid: int, part: Decoded) -> None:
        """Changes of a stream block: their places follow those that the transaction has already."""
        if not part.changes:
            return
        shift = self._buffer.next_place(xid) - part.first_change
        subxids = np.zeros(part.changes, np.uint32)
        tables = []
        for table in part.tables:
            if table.shape == MESSAGES:
                self._with_messages.add(xid)
            changes = table.rows["_change"].to_numpy()
            subxids[changes - part.first_change] = table.rows["_subxid"].to_numpy()
            rows = with_places(table.rows, changes + shift, np.zeros(len(changes), np.int64))
            tables.append(TableRows(table.shape, rows))
        self._buffer.append(xid, subxids, tables)

    def _control(self, control: Any) -> list[Piece]:
        kind, xid = int(control["kind"]), int(control["xid"])
        if kind == _STREAM_START:
            self._streaming = xid
            self._buffer.begin(xid)
        elif kind == _STREAM_STOP:
            self._streaming = None
        elif kind == _STREAM_ABORT:
            subxid = int(control["subxid"])
            self._buffer.abort(xid, subxid)
            if subxid == xid:
                self._forget(xid)
            else:
                self._partly_rolled_back.add(xid)
        else:
            return self._commit(xid, control)
        return []

    def _forget(self, xid: int) -> None:
        self._origins.pop(xid, None)
        self._with_messages.discard(xid)
        self._partly_rolled_back.discard(xid)

    def _commit(self, xid: int, control: Any) -> list[Piece]:
        commit_lsn, end_lsn = int(control["commit_lsn"]), int(control["end_lsn"])
        origin = self._origins.get(xid)
        uncertain = xid in self._with_messages and xid in self._partly_rolled_back
        self._forget(xid)
        if commit_lsn < self._durable_lsn:
            self._buffer.forget(xid)
            return []
        if uncertain:
            raise SendWholeError(f"transaction {xid} has logical messages and rolled-back savepoints")
        commit = Commit(commit_lsn, end_lsn, int(control["timestamp_us"]), origin=origin)
        committed = self._buffer.commit(xid, commit)
        if isinstance(committed, LargeTransaction):
            return [committed]
        return [*committed] or [Idle(end_lsn)]


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

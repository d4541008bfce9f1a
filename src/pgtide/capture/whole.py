"""Transactions that come whole, a column at a time: a feed of a thousand one-row transactions costs as much Python
as a feed of one.

Outside of stream blocks pgoutput sends a transaction whole, between Begin and Commit, only after it committed.  So
its changes may go to the log as they come; a transaction that has become too large to wait for its Commit in memory
is handed on in pieces, which readers cannot see before the last one is durable.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.change import TIMESTAMP, TRANSACTIONS, Committed, TableRows, TransactionKind
from pgtide.decode.decoded import Decoded
from pgtide.errors import DecodeError
from pgtide.schema import MESSAGES

HELD_BYTES = 8 << 20  # of an open transaction, before its changes go to the log without their commit
_BEGIN, _COMMIT, _KEEPALIVE = (ord(kind) for kind in "BCk")

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing up to `lsn` is missing: no transaction that ends there or before is still to come."""

    lsn: int


@dataclass(frozen=True, slots=True)
class _Spans:
    """The transactions of one feed, as columns: which changes each has here, and what is known of it."""

    starts: Int64s  # number of its first change in this feed
    stops: Int64s  # exclusive
    fields: npt.NDArray[Any]  # controls: Begin, with the Commit's end LSN filled in where it is there
    kinds: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.bool_]
    origins: npt.NDArray[np.object_]

    def select(self, which: slice) -> _Spans:
        return _Spans(
            self.starts[which],
            self.stops[which],
            self.fields[which],
            self.kinds[which],
            self.ends[which],
            self.origins[which],
        )


class WholeTransactions:
    """Turns what lies between Begin and Commit into pieces for the log."""

    def __init__(self, durable_lsn: int, held_bytes: int = HELD_BYTES) -> None:
        self._durable_lsn = durable_lsn  # transactions that end here or before are in the log already
        self._held_limit_bytes = held_bytes
        self._open: npt.NDArray[Any] | None = None  # Begin of the transaction whose Commit has not come yet
        self._open_origin: str | None = None
        self._open_place = 0  # how many changes of it came in earlier feeds
        self._held: list[Committed] = []
        self._held_bytes = 0

    def feed(self, decoded: Decoded) -> list[Committed | Idle]:
        """What can be written now, in order."""
        spans = self._spans(decoded)
        skipped = self._already_durable(spans)
        unfinished = len(spans.ends) > skipped and not spans.ends[-1]
        whole = spans.select(slice(skipped, len(spans.ends) - unfinished))
        work: list[Committed | Idle] = []
        if len(whole.ends):
            piece = self._piece(decoded, whole, self._open_place if skipped == 0 else 0)
            if piece is not None:
                work += [*self._held, piece]
                self._held, self._held_bytes = [], 0
            elif not unfinished:
                work.append(Idle(int(whole.fields["end_lsn"][-1])))
        if unfinished:
            first_place = self._open_place if len(spans.ends) == 1 else 0
            self._hold(self._piece(decoded, spans.select(slice(-1, None)), first_place), work)
        self._remember_open(spans)
        idle = self._idle(decoded.controls)
        return [*work, idle] if idle else work

    def _spans(self, decoded: Decoded) -> _Spans:
        """All transactions that have a part in this feed; the first may continue, the last may not end."""
        controls, last_change = decoded.controls, decoded.first_change + decoded.changes
        begins = controls[controls["kind"] == _BEGIN]
        commits = controls[controls["kind"] == _COMMIT]
        starts = begins["change"]
        if self._open is not None:
            begins = np.concatenate((self._open, begins))
            starts = np.append(decoded.first_change, starts)
        if not 0 <= len(begins) - len(commits) <= 1:
            raise DecodeError("Begin and Commit messages do not match")
        fields = begins.copy()
        fields["end_lsn"] = 0
        fields["end_lsn"][: len(commits)] = commits["end_lsn"]
        stops = commits["change"]
        ends = np.ones(len(begins), np.bool_)
        if len(begins) > len(commits):
            stops, ends[-1] = np.append(stops, last_change), False
        kinds = np.full(len(begins), TransactionKind.COMMIT, np.uint8)
        origins = self._origins(decoded, len(begins))
        spans = _Spans(starts.astype(np.int64), stops.astype(np.int64), fields, kinds, ends, origins)
        return self._with_messages(decoded, spans)

    def _origins(self, decoded: Decoded, transactions: int) -> npt.NDArray[np.object_]:
        """Where each transaction was written first, for those that were themselves replicated; else None."""
        origins = np.full(transactions, None)
        if self._open is not None:
            origins[0] = self._open_origin
        begun = np.cumsum(decoded.controls["kind"] == _BEGIN) + (self._open is not None)
        for index, name in decoded.origins.items():
            origins[begun[index] - 1] = name
        return origins

    def _with_messages(self, decoded: Decoded, spans: _Spans) -> _Spans:
        """Non-transactional messages come between transactions: each becomes one of its own."""
        for table in decoded.tables:
            if table.shape != MESSAGES:
                continue
            alone = ~table.rows["c3"].to_numpy(zero_copy_only=False)
            if not alone.any():
                continue
            changes = table.rows["_change"].to_numpy()[alone]
            lsns = table.rows["c4"].to_numpy()[alone]
            fields = np.zeros(len(changes), spans.fields.dtype)
            fields["commit_lsn"], fields["end_lsn"] = lsns, lsns
            fields["timestamp_us"] = time.time_ns() // 1000  # the message itself has no time: when it was received
            kinds = np.full(len(changes), TransactionKind.MESSAGE, np.uint8)
            order = np.argsort(np.concatenate((spans.starts, changes)), kind="stable")
            spans = _Spans(
                np.concatenate((spans.starts, changes))[order],
                np.concatenate((spans.stops, changes + 1))[order],
                np.concatenate((spans.fields, fields))[order],
                np.concatenate((spans.kinds, kinds))[order],
                np.concatenate((spans.ends, np.ones(len(changes), np.bool_)))[order],
                np.concatenate((spans.origins, np.full(len(changes), None)))[order],
            )
        return spans

    def _already_durable(self, spans: _Spans) -> int:
        """How many transactions the log has already: the server sends again from its last acknowledged position.

        Positions that become durable are ends of records, so a commit record that begins below one also ends there.
        """
        lsn = spans.fields["commit_lsn"]
        there = np.where(spans.kinds == TransactionKind.MESSAGE, lsn <= self._durable_lsn, lsn < self._durable_lsn)
        return int(np.count_nonzero(there))

    def _piece(self, decoded: Decoded, spans: _Spans, first_place: int) -> Committed | None:
        """The changes of these transactions; those without any are left out.  None if that leaves nothing."""
        places = np.zeros(len(spans.starts), np.int64)
        places[0] = first_place
        kept = (spans.stops > spans.starts) | (places > 0)
        if not kept.any():
            return None
        low, high = int(spans.starts[0]), int(spans.stops[-1])
        numbers = np.cumsum(kept) - 1  # a transaction's index once the empty ones are gone
        tables = []
        for table in decoded.tables:
            rows = between(table.rows, low, high)
            if rows.num_rows:
                changes = rows["_change"].to_numpy()
                span = np.searchsorted(spans.starts, changes, side="right") - 1
                tables.append(
                    TableRows(
                        table.shape, with_places(rows, changes - spans.starts[span] + places[span], numbers[span])
                    )
                )
        return Committed(_transactions(spans, kept), tuple(tables))

    def _hold(self, piece: Committed | None, work: list[Committed | Idle]) -> None:
        """Keeps the open transaction's changes until its Commit, or hands them on when they are too many."""
        if piece is None:
            return
        self._held.append(piece)
        self._held_bytes += piece.nbytes
        if self._held_bytes > self._held_limit_bytes:
            # The newest stays: a block that ends a transaction must have rows, or no range of offsets contains it.
            work += self._held[:-1]
            self._held, self._held_bytes = [piece], piece.nbytes

    def _remember_open(self, spans: _Spans) -> None:
        if len(spans.ends) and not spans.ends[-1]:
            continues = self._open is not None and len(spans.ends) == 1
            seen = int(spans.stops[-1] - spans.starts[-1])
            self._open_place = seen + (self._open_place if continues else 0)
            self._open = spans.fields[-1:]
            self._open_origin = spans.origins[-1]
        elif len(spans.ends):
            self._open, self._open_place = None, 0

    def _idle(self, controls: npt.NDArray[Any]) -> Idle | None:
        """The position of a keepalive that comes after everything else, outside of any transaction."""
        if self._open is not None or not len(controls) or controls["kind"][-1] != _KEEPALIVE:
            return None
        return Idle(int(controls["end_lsn"][-1]))


def between(rows: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    first, last = np.searchsorted(rows["_change"].to_numpy(), [low, high])
    return rows.slice(first, last - first)


def with_places(rows: pa.RecordBatch, places: Int64s, transactions: Int64s) -> pa.RecordBatch:
    """`_op`, `_place`, `_txn` in place of `_op`, `_change`, `_subxid`; the rest as it is."""
    fields = [rows.schema.field(0), _PLACE, _TXN, *list(rows.schema)[3:]]
    columns = [rows.column(0), pa.array(places), pa.array(transactions.astype(np.uint32)), *rows.columns[3:]]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


_PLACE = pa.field("_place", pa.int64(), nullable=False)
_TXN = pa.field("_txn", pa.uint32(), nullable=False)


def _transactions(spans: _Spans, kept: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    fields, count = spans.fields[kept], int(kept.sum())
    zeros = pa.array(np.zeros(count, np.int64))
    columns = [
        pa.array(spans.kinds[kept]),
        pa.array(fields["xid"].astype(np.uint32)),
        pa.array(fields["commit_lsn"].astype(np.uint64)),
        pa.array(fields["end_lsn"].astype(np.uint64)),
        pa.array(fields["timestamp_us"].astype(np.int64)).view(TIMESTAMP),
        zeros,
        zeros,
        pa.array((spans.stops - spans.starts)[kept]),
        pa.array(spans.ends[kept]),
        pa.array(spans.origins[kept], pa.string()),
        pa.nulls(count, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TRANSACTIONS)

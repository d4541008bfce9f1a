"""Reads tables as of one snapshot, in a thread of its own, as transactions for the log.

A range of a table is one transaction, in pieces of what came together: readers see a range whole or not at all, and no
more than a few pieces are in memory.  The last piece of a range is held back until it is known whether more of the
table comes after it, because the table's last transaction says that it is the last.

A table that the log may know something of already begins with a truncate: what was there of it counts no more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import psycopg
import pyarrow as pa

from pgtide.capture.appender import Reset
from pgtide.capture.read_pair import ReadPair
from pgtide.change import Committed, Op, TableRows, TransactionKind
from pgtide.config import Config
from pgtide.errors import PgtideError, TableError
from pgtide.log.reads import read_extra
from pgtide.replication.connect import Connection
from pgtide.schema import TableShape, storage_schema
from pgtide.snapshot.copy_range import Cancelled, ReadLimits, SnapshotGone, TableAsOf, stored_rows
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.snapshot.lock_watch import LockWatch, MakingWay
from pgtide.snapshot.table_ranges import cut, file_blocks, table_as_of
from pgtide.transactions.pieces import Commit, entry

_PIECES_WAITING = 2
_POLL_S = 0.2
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ReadTable:
    relation_oid: int
    name: str
    supersedes: bool  # the log may have changes of it from before


@dataclass(frozen=True, slots=True)
class TableBegun:
    table: ReadTable


@dataclass(frozen=True, slots=True)
class TableRead:
    """Everything of it was handed over."""

    table: ReadTable


@dataclass(frozen=True, slots=True)
class TableFailed:
    table: ReadTable
    why: str


@dataclass(frozen=True, slots=True)
class RoundOver:
    """No more comes of this round, whether all of its tables were read or not."""

    error: BaseException | None = None


ReadEvent = Committed | Reset | TableBegun | TableRead | TableFailed | RoundOver


class _ClosedError(Exception):
    """Nobody takes what is read any more."""


class ReadRound:
    """Reads the tables one after the other; what comes of it is taken with `next`."""

    def __init__(
        self, config: Config, pair: ReadPair, tables: Sequence[ReadTable], publications: Sequence[str]
    ) -> None:
        self.pair = pair
        self.tables = tuple(tables)
        self._config = config
        self._publications = publications
        self._events: queue.Queue[ReadEvent] = queue.Queue(_PIECES_WAITING)
        self._closed = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="pgtide-reads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, timeout_s: float) -> ReadEvent | None:
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        self._closed.set()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.cancel_safe(timeout=1.0)
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _put(self, event: ReadEvent) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=_POLL_S)
                return
        raise _ClosedError

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._read_all()
        except BaseException as failure:  # noqa: BLE001 - told to whoever takes the events
            error = failure
        with contextlib.suppress(_ClosedError):
            self._put(RoundOver(error))

    def _read_all(self) -> None:
        timeout_s = self._config.source.connect_timeout_seconds
        with (
            self.pair.server.connect(timeout_s=timeout_s) as connection,
            LockWatch(self.pair.server, timeout_s) as watch,
        ):
            self._connection = connection
            for number, table in enumerate(self.tables):
                if number and self.pair.is_older_than(self._config.snapshot.max_age_minutes * 60):
                    return  # the rest has its turn under another one
                self._put(TableBegun(table))
                try:
                    _TableReader(self._config, self.pair, connection, watch, self._put, self._closed).read(
                        table, self._publications
                    )
                except PgtideError as error:
                    if isinstance(error, SnapshotGone) or connection.closed:
                        raise
                    self._put(Reset())
                    self._put(TableFailed(table, error.what))
                else:
                    self._put(TableRead(table))


class _TableReader:
    def __init__(
        self,
        config: Config,
        pair: ReadPair,
        connection: Connection,
        watch: LockWatch,
        put: Callable[[ReadEvent], None],
        closed: threading.Event,
    ) -> None:
        self._config = config
        self._pair = pair
        self._connection = connection
        self._watch = watch
        self._put = put
        self._closed = closed

    def read(self, table: ReadTable, publications: Sequence[str]) -> None:
        oid, snapshot = table.relation_oid, self._config.snapshot
        found = table_as_of(self._connection, oid, self._pair.kept.snapshot, publications)
        limits = ReadLimits(snapshot.statement_timeout_seconds, self._watch.reader_name(oid))
        source = replace(found, limits=limits)
        pieces = _Pieces(source.shape, self._pair, self._put, supersedes=table.supersedes)
        ranges, way = deque(cut(self._connection, source, snapshot.range_bytes)), MakingWay(self._watch, oid)
        while ranges:
            part = ranges.popleft()
            way.begin()
            pieces.begin_range()
            try:
                for rows in stored_rows(self._connection, source, part):
                    pieces.add(rows)
            except Cancelled:
                if self._closed.is_set():
                    raise
                pieces.undo_range()
                taken = way.made_way()
                smaller = not taken or way.too_often
                ranges.extendleft(reversed(self._halves(source, part, must=not taken)) if smaller else [part])
                self._closed.wait(_RETRY_S)
            else:
                way.done()
                pieces.end_range()
        pieces.end_table()

    def _halves(self, source: TableAsOf, part: CtidRange, *, must: bool) -> tuple[CtidRange, ...]:
        halves = part.halves(file_blocks(self._connection, part.relation_oid) - part.first_block)
        if halves is None and must:
            limit_s = self._config.snapshot.statement_timeout_seconds
            raise TableError(
                f"{source.shape.qualified_name}: reading a single block takes longer than {limit_s:g} s.",
                remedy="Raise snapshot.statement_timeout_seconds.",
            )
        return halves or (part,)


class _Pieces:
    """The rows of one table as pieces of transactions."""

    def __init__(
        self, shape: TableShape, pair: ReadPair, put: Callable[[ReadEvent], None], *, supersedes: bool
    ) -> None:
        self._shape = shape
        self._pair = pair
        self._put = put
        self._supersedes = supersedes
        self._place = 0
        self._held: pa.RecordBatch | None = None  # the newest of a range that is being read
        self._final: pa.RecordBatch | None = None  # the last of a range that is read
        self._sent = False  # something of the range that is being read

    def begin_range(self) -> None:
        self._place, self._sent = 0, False
        if self._supersedes:
            schema = pa.schema(list(storage_schema(self._shape))[3:])
            self._add(Op.TRUNCATE, pa.RecordBatch.from_arrays([pa.nulls(1, one.type) for one in schema], schema=schema))

    def add(self, rows: pa.RecordBatch) -> None:
        self._add(Op.READ, rows)

    def end_range(self) -> None:
        if self._held is not None:
            self._final, self._held = self._held, None
            self._supersedes = False

    def undo_range(self) -> None:
        """It is read again: what was handed over of it does not count."""
        self._held = None
        if self._sent:
            self._put(Reset())

    def end_table(self) -> None:
        if self._final is not None:
            self._send(self._final, ends=True, last=True)
            self._final = None

    def _add(self, op: Op, rows: pa.RecordBatch) -> None:
        if self._final is not None:
            self._send(self._final, ends=True)
            self._final = None
        if self._held is not None:
            self._send(self._held)
            self._sent = True
        count = rows.num_rows
        columns = {
            "_op": pa.array(np.full(count, op, np.uint8)),
            "_place": pa.array(np.arange(self._place, self._place + count, dtype=np.int64)),
            "_txn": pa.array(np.zeros(count, np.uint32)),
        }
        schema = pa.schema([*list(storage_schema(self._shape))[:3], *rows.schema])
        self._held = pa.RecordBatch.from_arrays([*columns.values(), *rows.columns], schema=schema)
        self._place += count

    def _send(self, rows: pa.RecordBatch, *, ends: bool = False, last: bool = False) -> None:
        pair, extra = self._pair, read_extra(self._shape.relation_oid, last=last)
        commit = Commit(pair.lsn, pair.lsn, pair.timestamp_us, TransactionKind.READ, extra=extra)
        transaction = entry(0, commit, rows.num_rows, ends=ends)
        self._put(Committed(transaction, (TableRows(self._shape, rows),)))

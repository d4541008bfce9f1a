"""The thread that makes transactions durable, apart from the one that reads the socket.

A queue bounded in bytes lies between them: a slow disk slows reading, and the server is still answered in time.  What
waits while one fsync runs goes into the next block together.  When the log cannot be written (disk full, folder
read-only), the thread says so, tries again with growing pauses, and goes on by itself with the rows it still holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from pgtide.capture import watch
from pgtide.capture.whole import Idle
from pgtide.change import Committed, LargeTransaction, TransactionKind
from pgtide.errors import LogNotWritableError, LogUnreachableError, PgtideError, TransientError
from pgtide.log.opening import Writer
from pgtide.transactions.prepared import SpoolStep

QUEUE_BYTES = 64 << 20
_BLOCK_BYTES = 16 << 20
_RETRY_FIRST_S, _RETRY_LAST_S = 0.1, 5.0
_SLOW_S = 1.0


class Reset:
    """In the queue: the connection is new, the server sends again what was not whole."""


Work = Committed | LargeTransaction | SpoolStep | Idle | Reset


class Appender:
    """Owns the writer.  `offer` is called by one thread, `durable_lsn` may be read by any."""

    def __init__(
        self,
        writer: Writer,
        on_durable: Callable[[], None],
        queue_bytes: int = QUEUE_BYTES,
        last_commit_s: float = 0.0,
        flush_interval_s: float = 0.0,
    ) -> None:
        self._writer = writer
        self._on_durable = on_durable
        self._limit_bytes = queue_bytes
        self._flush_interval_s = flush_interval_s  # 0: as fast as it can be made durable
        self._flushed_at_s = float("-inf")
        self._hurried = False  # somebody waits for all of it
        self._queue: deque[Work] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._in_hand = False  # taken from the queue, not yet durable
        self._taken_s = 0.0
        self.durable_lsn = writer.durable_lsn
        self.last_commit_s = last_commit_s  # when the last durable transaction was committed; 0: there is none
        self.failure: BaseException | None = None
        self.trouble: str | None = None  # why the log cannot be written just now
        self._thread = threading.Thread(target=self._run, name="pgtide-appender", daemon=True)
        self._thread.start()

    def offer(self, work: list[Work], timeout_s: float) -> list[Work]:
        """Queues as much as fits; returns the rest, for the caller to offer again after answering the server."""
        with self._changed:
            self._changed.wait_for(self._has_room, timeout_s)
            self.raise_failure()
            taken = 0
            for item in work:
                if not self._has_room():
                    break
                self._queue.append(item)
                self._queued_bytes += _size(item)
                taken += 1
            self._changed.notify_all()
        return work[taken:]

    def drained(self, timeout_s: float) -> bool:
        """Waits until everything offered is durable."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: (not self._queue and not self._in_hand) or self.failure is not None, timeout_s
                )
            finally:
                self._hurried = False

    def must_be_opened_again(self) -> bool:
        """Whether the log has to be opened anew after a failure that may pass.

        Raises what does not pass: above all that another capture has taken over, whether it still runs or not.
        """
        try:
            self._writer.check_not_fenced()
        except LogUnreachableError as error:
            raise LogNotWritableError(error.what, remedy=error.remedy) from error
        if self.failure is not None and not isinstance(self.failure, TransientError):
            raise self.failure
        return self.failure is not None

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    @property
    def delay(self) -> str | None:
        """That a write has not come back, as on a network folder whose server is gone; without an error it is slow."""
        if self._in_hand and time.monotonic() - self._taken_s > _SLOW_S:
            return f"a write to the log in {self._writer.location} has not come back"
        return None

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, if that can be done in time, and ends the thread and the writer."""
        self.drained(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._writer.close()

    def _has_room(self) -> bool:
        """Nothing more is taken while the log cannot be written: what is not read stays with the server."""
        return (self._queued_bytes < self._limit_bytes and self.trouble is None) or self.failure is not None

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._append(work)
                with self._changed:
                    self._in_hand = False
                    self._changed.notify_all()
                self._on_durable()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the reading thread must hear of it
            with self._changed:
                self.failure = error
                self._changed.notify_all()
            self._on_durable()

    def _next(self) -> list[Work] | None:
        """All that waits, up to one block's worth; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._flush_interval_s:
                self._wait_for_more()
            if self._closing:
                return None
            work: list[Work] = []
            taken_bytes = 0
            while self._queue and taken_bytes < _BLOCK_BYTES:
                work.append(self._queue.popleft())
                taken_bytes += _size(work[-1])
            self._queued_bytes -= taken_bytes
            self._in_hand, self._taken_s = True, time.monotonic()
            self._changed.notify_all()
            return work

    def _wait_for_more(self) -> None:
        """Where a flush is dear (an object store), it waits for its time, for a block's worth, or until hurried."""
        self._changed.wait_for(
            lambda: self._hurried or self._closing or self._queued_bytes >= _BLOCK_BYTES,
            max(0.0, self._flushed_at_s + self._flush_interval_s - time.monotonic()),
        )
        self._flushed_at_s = time.monotonic()

    def _append(self, work: list[Work]) -> None:
        pieces: list[Committed] = []
        idle_lsn = 0
        for item in work:
            if isinstance(item, Committed):
                pieces.append(item)
                idle_lsn = 0
            elif isinstance(item, Idle):
                idle_lsn = item.lsn
            else:
                self._write(pieces, idle_lsn)
                pieces, idle_lsn = [], 0
                if isinstance(item, LargeTransaction):
                    self._write_large(item)
                else:
                    self._write_or_wait(self._writer.forget_unfinished if isinstance(item, Reset) else item.run)
        self._write(pieces, idle_lsn)
        self.durable_lsn = self._writer.durable_lsn

    def _write_large(self, item: LargeTransaction) -> None:
        with watch.flush_seconds.time():
            self._write_or_wait(lambda: self._writer.write_large(item))
        watch.transactions.inc()
        self._note_commit(item.transaction)

    def _write(self, pieces: list[Committed], idle_lsn: int) -> None:
        if pieces:
            with watch.flush_seconds.time():
                self._write_or_wait(lambda: self._writer.write(pieces))
            watch.transactions.inc(sum(piece.transactions["ends"].true_count for piece in pieces))
            self._note_commit(*(piece.transactions for piece in pieces))
        if idle_lsn and not self._writer.unfinished:
            self._write_or_wait(lambda: self._writer.advance(idle_lsn))

    def _note_commit(self, *written: pa.RecordBatch) -> None:
        newest_first = (newest_commit_s(transactions) for transactions in reversed(written))
        self.last_commit_s = next(filter(None, newest_first), self.last_commit_s)

    def _write_or_wait(self, step: Callable[[], None]) -> None:
        """Does one step on the log.  After a failure: a new epoch, then the same step with the same rows.

        Not if an earlier step has written the beginning of the transaction at hand, which is not in memory any more,
        or if a part of this step is durable already: then the server has to send again, and what is there is skipped.
        """
        pause_s = _RETRY_FIRST_S
        cut, end_offset = self._writer.unfinished, self._writer.end_offset
        restart = False
        while True:
            try:
                if restart:
                    self._writer.restart()
                    if cut or self._writer.end_offset != end_offset:
                        self.trouble = None
                        raise TransientError("the log could not be written for a while; what is missing is read again")
                step()
            except OSError as error:
                self.trouble = f"the log in {self._writer.location} cannot be written: {error.strerror or error}"
                restart = True
            except PgtideError:
                raise
            else:
                self.trouble = None
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause_s):
                    raise LogNotWritableError(self.trouble)
            pause_s = min(2 * pause_s, _RETRY_LAST_S)


def newest_commit_s(transactions: pa.RecordBatch | pa.Table) -> float:
    """When the last transaction that has ended was committed; 0 if there is none.  Messages have no time."""
    ended = pc.and_(transactions["ends"], pc.equal(transactions["kind"], TransactionKind.COMMIT))
    commits = transactions["commit_timestamp"].filter(ended)
    return commits[-1].as_py().timestamp() if len(commits) else 0.0


def _size(item: Work) -> int:
    return item.nbytes if isinstance(item, Committed) else 64

"""Publishing the point at which a batch ends; when the lake cannot be written, again after a pause that grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from pgtide.change import TRANSACTIONS
from pgtide.errors import TableError
from pgtide.log.reader import LogReader
from pgtide.sinks import Conflict
from pgtide.spark.apply import MirrorTable
from pgtide.spark.points import Coverage, Moment, Points
from pgtide.spark.reason import reason
from pgtide.spark.timings import POINT, Timings

_RETRY_FIRST_S, _RETRY_LAST_S = 1.0, 60.0


class Publisher:
    """Used by the thread that runs a batch."""

    def __init__(self, points: Points, reader: LogReader, timings: Timings) -> None:
        self._points = points
        self._reader = reader
        self._timings = timings
        self._failures = 0
        self._retry_at_s = 0.0
        self.error = ""  # why the last point could not be published

    @property
    def is_due(self) -> bool:
        return bool(self.error) and time.monotonic() >= self._retry_at_s

    def publish(
        self, tables: Collection[MirrorTable], start: int, to: int, at_lsn: int = 0, renewed: Collection[str] = ()
    ) -> bool:
        """Publishes the point at `to`, under the LSN of its last commit or a later one that is asked for."""
        return self._tried(lambda: self._publish(tables, start, to, at_lsn, renewed))

    def open(self) -> None:
        """Finds out what is published."""
        self._tried(lambda: True)

    def _tried(self, work: Callable[[], bool]) -> bool:
        """If the lake cannot be written, tables are parked, and so is the point; also if the points are not ours."""
        try:
            self._points.open()
            done = work()
        except (Conflict, TableError, Py4JJavaError, PySparkException) as error:
            self._failures += 1
            self._retry_at_s = time.monotonic() + pause_s(self._failures)
            self.error = reason(error)
            return False
        self._failures, self.error = 0, ""
        return done

    def _publish(
        self, tables: Collection[MirrorTable], start: int, to: int, at_lsn: int, renewed: Collection[str]
    ) -> bool:
        streaming = [table for table in tables if not table.joining and not table.removed]
        if any((mark := table.mark) is not None and (mark.offset or 0) > to for table in streaming):
            return False  # a table is ahead of this batch: there is no version of it to name
        coverage = {table.name: _coverage(table, to) for table in tables}
        if self._points.last is None and not any(one.covered for one in coverage.values()):
            return False  # the first point is one at which there is something to read
        moment = self._moment(start, to)
        if moment is None:
            return False
        with self._timings.of(POINT):
            return self._points.publish(replace(moment, lsn=max(moment.lsn, at_lsn)), coverage, renewed)

    def _moment(self, start: int, to: int) -> Moment | None:
        """None: retention has already taken the transaction that ends here, so that its LSN is not known."""
        last, first = self._points.last, self._reader.first_offset()
        if last is not None and last.offset == to:
            return last
        if first > 0 and to <= first:
            return None
        transactions = self._reader.transactions(max(start, first), to)
        if transactions.num_rows == 0:
            return Moment(to, self._reader.identity.start_lsn, None)
        ending = dict(zip(TRANSACTIONS.names, (column[-1].as_py() for column in transactions.columns), strict=True))
        return Moment(to, ending["commit_lsn"], ending["commit_timestamp"])


def is_streaming(table: MirrorTable) -> bool:
    return table.is_loaded and not (table.error or table.joining or table.removed)


def _coverage(table: MirrorTable, to: int) -> Coverage:
    covered = is_streaming(table) and table.clean_to >= to
    return Coverage(table.version.snapshot_id if table.version and covered else None, covered)


def pause_s(failures: int) -> float:
    return min(_RETRY_FIRST_S * 2.0 ** (min(failures, 10) - 1), _RETRY_LAST_S)

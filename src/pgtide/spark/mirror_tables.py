"""The tables of a mirror, and work for several of them at a time.

The trouble of one table parks that table: the others go on, points name it as not covered, and it is tried again with
growing pauses, also while nothing else happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.errors import LogError, LogRangeError, PgtideError, TableError, TransientError
from pgtide.log.control import TableHistory
from pgtide.log.reader import LogReader
from pgtide.schema import TableShape
from pgtide.sinks import Conflict
from pgtide.sinks.merge import LOST_VALUE
from pgtide.sinks.multiset import LOST_ROW
from pgtide.spark.apply import JOB_TAG, MirrorTable
from pgtide.spark.publisher import pause_s
from pgtide.spark.reason import reason
from pgtide.spark.targets import target_of

_AT_ONCE = 4
_BATCH_ROWS = 2_000_000
_BATCH_BYTES = 1 << 30

Result = TypeVar("Result")


class Stopped(Exception):
    """We are to stop, and leave everything as it is."""


class MirrorTables:
    def __init__(self, spark: SparkSession, config: Config) -> None:
        self._spark = spark
        self._config = config
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pgtide-mirror")
        self.by_oid: dict[int, MirrorTable] = {}
        self.histories: dict[int, TableHistory] = {}  # of those that are captured; none for a log without notes
        self.done = 0  # the end of the last batch
        self.stop = threading.Event()

    def __iter__(self) -> Iterator[MirrorTable]:
        return iter(self.by_oid.values())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def is_removed(self, table: MirrorTable) -> bool:
        return bool(self.histories) and table.shape.relation_oid not in self.histories

    def is_fenced(self, table: MirrorTable) -> bool:
        """Whether transactions are open that have rows of it which the stream lacks: a load must wait for them."""
        history = self.histories.get(table.shape.relation_oid)
        return history is not None and history.complete_lsn is None

    def take_in(self, shapes: dict[int, TableShape], oids: Iterable[int]) -> list[MirrorTable]:
        """Makes tables of the shapes that are not known yet; returns these."""
        unknown = []
        for oid in oids:
            if oid not in shapes or self._is_known(shapes[oid]):
                continue
            table = MirrorTable(shapes[oid], target_of(self._config, shapes[oid].qualified_name))
            # A table that was dropped and made again has the name of one that is captured no more.
            others = {oid: old for oid, old in self.by_oid.items() if old.name != table.name}
            self.by_oid = {**others, oid: table}  # in one go: loads that report go through it in other threads
            unknown.append(table)
        return unknown

    def _is_known(self, shape: TableShape) -> bool:
        """A table that was renamed is not: it gets a mirror of its new name, and the old one stays as it was."""
        table = self.by_oid.get(shape.relation_oid)
        return table is not None and table.target == target_of(self._config, shape.qualified_name)

    def sharing(self, table: MirrorTable) -> list[str]:
        """Names of the captured tables that have this one's mirror table for theirs, itself among them."""
        return sorted(other.name for other in self if other.target == table.target and not other.removed)

    def aside(self, work: Callable[[], Result]) -> Future[Result]:
        """Runs something that is no table's own beside what is done for tables."""
        return self._pool.submit(self._tagged, work)

    def each(self, tables: Iterable[MirrorTable], work: Callable[[MirrorTable], None]) -> None:
        """Does the work for several tables at a time; one that fails is parked."""
        running = {self._pool.submit(self._tagged, work, table): table for table in tables}
        wait(running)
        if self.stop.is_set():
            raise Stopped  # what failed now failed because it was interrupted
        for future, table in running.items():
            error = future.exception()
            if error is None:
                table.error = ""
                table.failures = table.failures if table.joining else 0
            elif isinstance(error, LogRangeError):
                self.park(table, removed(table, error))
            elif isinstance(error, Exception) and not isinstance(error, LogError):
                self.park(table, error)
            else:
                raise error

    def _tagged(self, work: Callable[..., Result], *arguments: MirrorTable) -> Result:
        self._spark.addTag(JOB_TAG)
        return work(*arguments)

    def park(self, table: MirrorTable, error: Exception) -> None:
        table.error = told(table, error)
        table.may_pass = may_pass(error)
        table.version = None
        if table.joining and not table.catching_up:
            # It has nothing of its own that needs older changes than its load did.
            table.clean_to, table.needs_from = max(table.clean_to, table.needs_from or 0), None
        table.joining = table.catching_up = False
        table.failures += 1
        table.retry_at_s = time.monotonic() + pause_s(table.failures)


def batch_end(reader: LogReader, start: int) -> int:
    return reader.boundary(start, _BATCH_ROWS, _BATCH_BYTES)


def removed(table: MirrorTable, error: LogRangeError) -> TableError:
    return TableError(
        f"{table.name}: changes that it has not applied are no longer in the log ({error.what}).",
        remedy=f"Load it anew: pgtide snapshot start {table.name} --type bulk",
    )


def may_pass(error: Exception) -> bool:
    """Whether this may be over by itself; trouble with changes that are in the log is not."""
    if isinstance(error, PgtideError):
        return isinstance(error, Conflict | TransientError)
    return LOST_VALUE not in str(error) and LOST_ROW not in str(error)


def told(table: MirrorTable, error: Exception) -> str:
    if isinstance(error, PgtideError):
        return str(error)
    if LOST_VALUE in str(error):
        return (
            f"{table.name}: a change keeps a large value as it was, and the mirror does not have that value.\n"
            f"Drop the mirror table to load it anew: DROP TABLE {table.target}"
        )
    if LOST_ROW in str(error):
        return (
            f"{table.name}: a row was updated or deleted that the mirror does not have.\n"
            f"Drop the mirror table to load it anew: DROP TABLE {table.target}"
        )
    return reason(error)

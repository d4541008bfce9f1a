"""The mirror: keeps lake tables as the source tables are, and publishes the points at which they agree.

One streaming query for all tables.  A micro-batch begins when the log has grown (`mirror_plan`) and ends at the end of
a transaction; each table with changes applies what lies between its own mark and there (`apply`), several at a
time, and when all are done the point is published.

The query's checkpoint is scratch, made anew at each start: nothing but the tables' own commits is trusted, so there
is no lost, old or foreign checkpoint to go wrong.  The trouble of one table parks that table: the others go on, points
name it as not covered, and it is tried again with growing pauses, also while nothing else happens.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pgtide.change import TRANSACTIONS
from pgtide.config import Config
from pgtide.errors import LogError, PgtideError, TableError
from pgtide.log.control import BarrierState
from pgtide.log.reader import LogReader
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.merge import LOST_VALUE
from pgtide.sinks.multiset import LOST_ROW
from pgtide.spark.apply import JOB_TAG, Applier, MirrorTable
from pgtide.spark.barriers import Barriers
from pgtide.spark.load import Loader
from pgtide.spark.mirror_plan import NAME as PLAN_SOURCE
from pgtide.spark.mirror_plan import MirrorPlanSource
from pgtide.spark.only_mirror import only_mirror
from pgtide.spark.points import Coverage, Moment, Points
from pgtide.spark.progress import Progress
from pgtide.spark.targets import points_target, target_of
from pgtide.spark.timings import BATCH, POINT, UPKEEP
from pgtide.spark.upkeep import Upkeep

_TABLES_AT_ONCE = 4
_BATCH_ROWS = 2_000_000
_BATCH_BYTES = 1 << 30
_RETRY_FIRST_S, _RETRY_LAST_S = 1.0, 60.0
_LOOK_S = 0.1
_LOOK_FOR_BARRIERS_S = 0.5
# Spark gives the Python process of a streaming source ten seconds to start, which a busy machine may not keep.
_SLOW_WORKER = "Python worker failed to connect back"
_QUERY_ATTEMPTS = 5


class _Stopped(Exception):
    """We are to stop, and leave everything as it is."""


class Mirror:
    """One run: `run` blocks until `stop` is set, everything up to `until_offset` is applied, or it fails."""

    def __init__(self, spark: SparkSession, config: Config) -> None:
        self._spark = spark
        self._config = config
        self._log_location = config.log_location
        self._sink = IcebergSink(spark)
        self._applier = Applier(spark, self._sink, self._log_location, config.mirror)
        self._reader = LogReader(self._log_location)
        self._points = Points(spark, self._sink, points_target(config), self._applier.log_id)
        self._barriers = Barriers(self._log_location)
        self._upkeep = Upkeep(self._sink, self._points, self._log_location, config.mirror)
        self._progress = Progress(self._log_location, self._applier.log_id)
        self._loader = Loader(spark, config, self._applier, self._sink)
        self._tables: dict[int, MirrorTable] = {}
        self._done = 0  # the end of the last batch
        self._stop = threading.Event()
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._query: StreamingQuery | None = None
        self._batch = threading.Lock()  # a batch, or a retry between batches
        self._pool = ThreadPoolExecutor(_TABLES_AT_ONCE, thread_name_prefix="pgtide-mirror")

    def run(self, stop: threading.Event, until_offset: int | None = None) -> None:
        with only_mirror(self._config.presence_path):
            self._run(stop, until_offset)

    def _run(self, stop: threading.Event, until_offset: int | None) -> None:
        self._stop = stop
        threading.Thread(target=self._attend, name="pgtide-mirror-attend", daemon=True).start()
        checkpoint = Path(tempfile.mkdtemp(prefix="pgtide-checkpoint-"))
        try:
            self._begin(stop)
            self._watch(checkpoint, stop, until_offset)
        except _Stopped:
            pass
        finally:
            if self._query is not None:
                self._query.stop()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._over.set()
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _attend(self) -> None:
        """What cannot wait for the threads that wait for Spark: ending their jobs, and saying that we are here."""
        looked_s = 0.0
        while not self._over.wait(_LOOK_S):
            with contextlib.suppress(Exception):  # the session itself may be ending; what fails now is tried again
                if self._stop.is_set():
                    self._spark.interruptTag(JOB_TAG)
                elif time.monotonic() - looked_s > _LOOK_FOR_BARRIERS_S:
                    looked_s = time.monotonic()
                    self._barriers.look()

    def _begin(self, stop: threading.Event) -> None:
        """Finds out where each table is, and loads those that have nothing yet."""
        self._points.open()
        for shape in self._reader.shapes().values():
            if shape.relation_oid:
                self._tables[shape.relation_oid] = MirrorTable(shape, target_of(self._config, shape.qualified_name))
        tables = list(self._tables.values())
        self._each(tables, lambda table: self._sink.sweep(table.target))
        if self._config.snapshot.initial == "bulk":
            unloaded = [table for table in tables if not table.error and not self._is_loaded(table)]
            self._loader.load(unloaded, stop, self._report)
        if stop.is_set():
            raise _Stopped
        self._each([table for table in tables if not table.error], lambda table: _nothing(self._applier.refresh(table)))
        self._done = self._first_needed([table for table in tables if not table.error])
        for table in tables:
            if not table.error:
                table.clean_to = max(table.clean_to, self._done)
        # A predecessor may have been killed between its last table and the point; after a load there is none yet.
        if self._done == self._reader.end().end_offset:
            self._publish(self._reader.first_offset(), self._done)
        self._report()

    def _first_needed(self, tables: list[MirrorTable]) -> int:
        """The first change that some table has not applied; the end of the log when there is none."""
        end_offset = self._reader.end().end_offset
        marks = {table.shape.relation_oid: table.clean_to for table in tables}
        slices = self._reader.plan(min(marks.values(), default=end_offset), end_offset)
        needed = [
            max(piece.entry.first_offset, marks[piece.relation_oid])
            for piece in slices
            if piece.relation_oid in marks and piece.entry.last_offset >= marks[piece.relation_oid]
        ]
        return min(needed, default=end_offset)

    def _is_loaded(self, table: MirrorTable) -> bool:
        version = self._sink.recorded(table.target)
        return version is not None and version.mark is not None and version.mark.offset is not None

    def _start_query(self, checkpoint: Path) -> StreamingQuery:
        self._spark.dataSource.register(MirrorPlanSource)
        options = {"path": self._log_location, "start": str(self._done)}
        plan = self._spark.readStream.format(PLAN_SOURCE).options(**options).load()
        writer = plan.writeStream.queryName(f"pgtide mirror {uuid.uuid4().hex}").foreachBatch(self._on_batch)
        writer = writer.trigger(processingTime=f"{self._config.mirror.trigger_seconds} seconds")
        return writer.option("checkpointLocation", checkpoint.as_uri()).start()

    def _watch(self, checkpoint: Path, stop: threading.Event, until_offset: int | None) -> None:
        attempts = 1
        self._query = self._start_query(checkpoint / str(attempts))
        while not stop.wait(_LOOK_S):
            if self._failure is not None:
                raise self._failure
            if not self._query.isActive:
                error = str(self._query.exception() or "somebody stopped it")
                if _SLOW_WORKER not in error or attempts == _QUERY_ATTEMPTS:
                    raise PgtideError(f"The mirror's streaming query ended: {error}")
                attempts += 1
                self._query = self._start_query(checkpoint / str(attempts))
            if self._batch.acquire(blocking=False):
                try:
                    self._retry_parked()
                    self._meet_barriers()
                    goes_on = self._keep_up()
                    if until_offset is not None and self._done >= until_offset and not goes_on:
                        return
                finally:
                    self._batch.release()

    def _on_batch(self, _plan: DataFrame, _batch_id: int) -> None:
        """All that is in the log by now: a batch grows with the lag, because larger ones cost less per row.

        An error is kept for `run` to raise: through Spark it would arrive as text, and a long one overflows the
        stack of the JVM, which searches it with a regular expression.
        """
        try:
            with self._batch:
                while self._failure is None and self._reader.end().end_offset > self._done:
                    to = self._up_to_barrier(self._reader.boundary(self._done, _BATCH_ROWS, _BATCH_BYTES))
                    with self._applier.timings.of(BATCH):
                        self._run_batch(to)
                    self._report()
                    self._meet_barriers()
                    self._keep_up()
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - raised by `_watch`
            if not self._stop.is_set():
                self._failure = error

    def _run_batch(self, to: int) -> None:
        latest = {piece.relation_oid: piece.entry.fingerprint for piece in self._reader.plan(self._done, to)}
        touched = {oid: self._reader.shape(oid, fingerprint) for oid, fingerprint in latest.items() if oid}
        for oid, shape in touched.items():
            if oid not in self._tables:
                self._tables[oid] = MirrorTable(shape, target_of(self._config, shape.qualified_name))
        now = time.monotonic()
        due = [table for oid, table in self._tables.items() if _is_due(table, now, touched=oid in touched)]
        self._each(due, lambda table: self._advance(table, to))
        for oid, table in self._tables.items():
            if oid not in touched and not table.error:
                table.clean_to = max(table.clean_to, to)
        self._publish(self._done, to)
        self._done = to

    def _advance(self, table: MirrorTable, to: int) -> None:
        """Brings one table to `to`; loads it first if it has nothing, as when it was dropped to be loaded anew."""
        if not table.is_loaded and self._config.snapshot.initial == "bulk" and not self._is_loaded(table):
            self._loader.load([table], self._stop, lambda: None)
            if table.error:
                raise TableError(table.error)
        self._applier.apply(table, to)

    def _publish(self, start: int, to: int, at_lsn: int = 0) -> bool:
        """Publishes the point at `to`, under the LSN of its last commit or a later one that is asked for."""
        if any((mark := table.mark) is not None and (mark.offset or 0) > to for table in self._tables.values()):
            return False  # a table is ahead of this batch: there is no version of it to name
        moment = self._moment(start, to)
        moment = replace(moment, lsn=max(moment.lsn, at_lsn))
        with self._applier.timings.of(POINT):
            return self._points.publish(moment, {table.name: _coverage(table, to) for table in self._tables.values()})

    def _moment(self, start: int, to: int) -> Moment:
        last = self._points.last
        if last is not None and last.offset == to:
            return last
        transactions = self._reader.transactions(start, to)
        if transactions.num_rows == 0:
            return Moment(to, self._reader.identity.start_lsn, None)
        ending = dict(zip(TRANSACTIONS.names, (column[-1].as_py() for column in transactions.columns), strict=True))
        return Moment(to, ending["commit_lsn"], ending["commit_timestamp"])

    def _retry_parked(self) -> None:
        now = time.monotonic()
        due = [table for table in self._tables.values() if table.error and now >= table.retry_at_s]
        if due:
            self._each(due, lambda table: self._advance(table, self._done))
            if any(not table.error for table in due) and self._done == self._reader.end().end_offset:
                self._publish(self._reader.first_offset(), self._done)
            self._report()

    def _up_to_barrier(self, to: int) -> int:
        """The end of a batch that would end at `to`: no later than the next barrier.

        `to` was read before the barriers are placed: if the log has not reached one's LSN now, it had not then.
        """
        self._barriers.look()
        return min([to, *(place for _, place, _ in self._barriers.placed(self._reader) if place > self._done)])

    def _meet_barriers(self) -> None:
        """Publishes the points that are asked for where we are now, and tells those who asked too late."""
        for lsn, place, barrier in self._barriers.placed(self._reader):
            if place == self._done:
                loaded = [table for table in self._tables.values() if not table.error and table.is_loaded]
                self._each(loaded, self._take_head)
                published = self._publish(self._reader.first_offset(), self._done, lsn)
                self._report()
                self._barriers.answer(barrier, BarrierState.PUBLISHED if published else BarrierState.PASSED)
            elif place < self._done:
                self._barriers.answer(barrier, BarrierState.PASSED)

    def _keep_up(self) -> bool:
        """Some upkeep, if it is due; returns whether there is more to do now."""
        if self._stop.is_set() or not self._upkeep.is_due():
            return False
        before = self._upkeep.report()
        goes_on = self._pool.submit(self._upkeep_step).result()
        if self._upkeep.report() != before:
            self._report()
        return goes_on

    def _upkeep_step(self) -> bool:
        self._spark.addTag(JOB_TAG)
        with self._applier.timings.of(UPKEEP):
            return self._upkeep.step(self._tables.values(), self._stop)

    def _take_head(self, table: MirrorTable) -> None:
        """Makes sure that we name the table as it is now: somebody else may have written to it."""
        recorded = self._sink.recorded(table.target)
        if recorded is None or table.version is None or recorded.snapshot_id != table.version.snapshot_id:
            table.version = None
            self._advance(table, self._done)

    def _each(self, tables: Iterable[MirrorTable], work: Callable[[MirrorTable], None]) -> None:
        """Does the work for several tables at a time; one that fails is parked."""
        running: dict[Future[None], MirrorTable] = {
            self._pool.submit(self._tagged, work, table): table for table in tables
        }  # fmt: skip
        wait(running)
        if self._stop.is_set():
            raise _Stopped  # what failed now failed because it was interrupted
        for future, table in running.items():
            error = future.exception()
            if error is None:
                table.error, table.failures = "", 0
            elif isinstance(error, Exception) and not isinstance(error, LogError):
                self._park(table, error)
            else:
                raise error

    def _tagged(self, work: Callable[[MirrorTable], None], table: MirrorTable) -> None:
        self._spark.addTag(JOB_TAG)
        work(table)

    def _park(self, table: MirrorTable, error: Exception) -> None:
        table.error = _told(table, error)
        table.version = None
        table.failures += 1
        table.retry_at_s = time.monotonic() + min(_RETRY_FIRST_S * 2 ** (table.failures - 1), _RETRY_LAST_S)

    def _report(self) -> None:
        self._progress.write(
            self._tables.values(), self._done, self._points, self._upkeep.report(), self._applier.timings.report()
        )


def _is_due(table: MirrorTable, now_s: float, *, touched: bool) -> bool:
    return now_s >= table.retry_at_s if table.error else touched


def _coverage(table: MirrorTable, to: int) -> Coverage:
    covered = not table.error and table.is_loaded and table.clean_to >= to
    return Coverage(table.version.snapshot_id if table.version and covered else None, covered)


def _told(table: MirrorTable, error: Exception) -> str:
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
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:500]}"


def _nothing(_: object) -> None:
    """For work whose result is kept elsewhere."""

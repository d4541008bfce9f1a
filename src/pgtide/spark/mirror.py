"""The mirror: keeps lake tables as the source tables are, and publishes the points at which they agree.

One streaming query for all tables.  A micro-batch begins when the log has grown (`mirror_plan`) and ends at the end of
a transaction; each table with changes applies what lies between its own mark and there (`apply`), several at a
time, and when all are done the point is published.

The query's checkpoint is scratch, made anew at each start: nothing but the tables' own commits is trusted, so there
is no lost, old or foreign checkpoint to go wrong.  Which tables there are, and what becomes of one that fails, is in
`mirror_tables`; how they are loaded and join, in `intake`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pgtide.config import Config
from pgtide.errors import LogRangeError, PgtideError
from pgtide.log.control import BarrierState, histories, requested_reloads, withdraw_reloads
from pgtide.log.reader import LogReader
from pgtide.schema import TableShape
from pgtide.sinks.iceberg import IcebergSink
from pgtide.spark.alterations import Alterations
from pgtide.spark.announcer import Announcer
from pgtide.spark.apply import JOB_TAG, Applier, MirrorTable
from pgtide.spark.barriers import Barriers
from pgtide.spark.intake import Intake
from pgtide.spark.joining import Joining
from pgtide.spark.mirror_plan import NAME as PLAN_SOURCE
from pgtide.spark.mirror_plan import MirrorPlanSource
from pgtide.spark.mirror_tables import MirrorTables, Stopped, batch_end, removed
from pgtide.spark.only_mirror import only_mirror
from pgtide.spark.points import Points
from pgtide.spark.progress import Progress
from pgtide.spark.publisher import Publisher, is_streaming
from pgtide.spark.targets import points_target
from pgtide.spark.timings import BATCH, UPKEEP
from pgtide.spark.upkeep import Upkeep

_LOOK_S = 0.1
_LOOK_FOR_BARRIERS_S = 0.5
_LOOK_FOR_TABLES_S = 1.0
# Spark gives the Python process of a streaming source ten seconds to start, which a busy machine may not keep.
_SLOW_WORKER = "Python worker failed to connect back"
_QUERY_ATTEMPTS = 5


class Mirror:
    """One run: `run` blocks until `stop` is set, everything up to `until_offset` is applied, or it fails."""

    def __init__(self, spark: SparkSession, config: Config, tell: Callable[[str], None] = lambda _: None) -> None:
        self._spark = spark
        self._announcer = Announcer(tell)
        self._config = config
        self._log_location = config.log_location
        self._sink = IcebergSink(spark)
        loads = config.snapshot.initial == "bulk"
        self._applier = Applier(spark, self._sink, self._log_location, config.mirror, loads=loads)
        self._reader = LogReader(self._log_location, reads=False)
        self._points = Points(spark, self._sink, points_target(config), self._applier.log_id)
        self._publisher = Publisher(self._points, self._reader, self._applier.timings)
        self._barriers = Barriers(self._log_location)
        self._upkeep = Upkeep(self._sink, self._points, self._log_location, config.mirror)
        self._progress = Progress(self._log_location, self._applier.log_id)
        self._alterations = Alterations(self._log_location, self._applier)
        self._joining = Joining(spark, config, self._applier, self._sink, self._report)
        self._tables = MirrorTables(spark, config)
        self._intake = Intake(
            config,
            self._tables,
            self._reader,
            self._sink,
            self._applier,
            self._alterations,
            self._joining,
            self._publish,
            self._report,
        )
        self._look_for_tables_at_s = 0.0
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._query: StreamingQuery | None = None
        self._batch = threading.Lock()  # a batch, or a retry between batches

    def run(self, stop: threading.Event, until_offset: int | None = None) -> None:
        with only_mirror(self._log_location) as self._hold:
            self._run(stop, until_offset)

    def _run(self, stop: threading.Event, until_offset: int | None) -> None:
        self._tables.stop = stop
        threading.Thread(target=self._attend, name="pgtide-mirror-attend", daemon=True).start()
        checkpoint = Path(tempfile.mkdtemp(prefix="pgtide-checkpoint-"))
        try:
            self._begin(stop)
            self._watch(checkpoint, stop, until_offset)
        except Stopped:
            pass
        finally:
            if self._query is not None:
                self._query.stop()
            self._tables.close()
            self._joining.end(stop)
            self._over.set()
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _attend(self) -> None:
        """What cannot wait for the threads that wait for Spark: ending their jobs, and saying that we are here."""
        looked_s = 0.0
        while not self._over.wait(_LOOK_S):
            with contextlib.suppress(Exception):  # the session itself may be ending; what fails now is tried again
                if self._tables.stop.is_set():
                    self._spark.interruptTag(JOB_TAG)
                elif time.monotonic() - looked_s > _LOOK_FOR_BARRIERS_S:
                    looked_s = time.monotonic()
                    self._barriers.look()

    def _begin(self, stop: threading.Event) -> None:
        """Finds out where each table is, and has those loaded that have nothing yet."""
        self._tables.done = min(self._reader.first_offset(), self._reader.end().end_offset)
        self._tables.histories = histories(self._log_location)
        shapes = {shape.relation_oid: shape for shape in self._reader.shapes().values() if shape.relation_oid}
        self._tables.take_in(shapes, shapes)
        for table in self._tables:
            table.removed = self._tables.is_removed(table)
        tables = [table for table in self._tables if not table.removed]
        self._tables.each(tables, lambda table: self._sink.sweep(table.target))
        self._tables.each([table for table in tables if not table.error], self._intake.examine)
        self._joining.go(stop)
        if not self._joining.is_busy:
            self._joining.release(stop)
        if all(table.joining for table in tables):
            self._report()  # what is published is found out later: no point covers a table now
            self._joining.wait_for_first(stop, self._tables_have_changed)
        else:
            self._publisher.open()
        if stop.is_set():
            raise Stopped
        self._alterations.look(self._reader, 0)
        tables = [table for table in tables if not table.joining]
        self._tables.each([table for table in tables if not table.error], self._refresh)
        self._go_to_first_needed([table for table in tables if not table.error])
        self._intake.join_loaded()
        # A predecessor may have been killed between its last table, or one that was loaded anew, and the point.
        if tables and self._tables.done == self._reader.end().end_offset:
            renewed = [table.name for table in tables]
            self._publish(self._reader.first_offset(), self._tables.done, renewed=renewed)
        self._report()

    def _tables_have_changed(self) -> bool:
        self._hold.check()
        return histories(self._log_location) != self._tables.histories

    def _look_for_tables(self) -> None:
        """Tables that are captured since the last look, or no more, or are to be loaded anew."""
        if time.monotonic() < self._look_for_tables_at_s:
            return
        self._look_for_tables_at_s = time.monotonic() + _LOOK_FOR_TABLES_S
        found, known = histories(self._log_location), self._tables.histories
        wanted = requested_reloads(self._log_location)
        # A capture that has just begun notes tables before it writes down their shapes.
        if found == known and found.keys() <= self._tables.by_oid.keys() and not wanted:
            return
        self._tables.histories = found
        self._tables.take_in({shape.relation_oid: shape for shape in self._reader.shapes().values()}, found)
        changed = []
        for oid, table in self._tables.by_oid.items():
            was_removed, table.removed = table.removed, self._tables.is_removed(table)
            if not table.removed and (was_removed or found.get(oid) != known.get(oid)):
                changed.append(table)
        self._tables.each([table for table in changed if not table.error], self._intake.examine)
        self._tables.each(
            [table for table in self._tables if _is_untouched(table)],
            lambda table: self._advance(table, self._tables.done),
        )
        failed = self._intake.load_anew([table for table in self._tables if table.name in wanted])
        withdraw_reloads(self._log_location, set(wanted) - failed)
        self._report()

    def _refresh(self, table: MirrorTable) -> None:
        self._applier.refresh(table)
        self._alterations.check(table)

    def _go_to_first_needed(self, tables: list[MirrorTable]) -> None:
        """On to where these tables need the log from; one that needs what retention has taken is parked."""
        self._tables.done = self._first_needed(tables)
        for table in tables:
            if not table.error:
                table.clean_to = max(table.clean_to, self._tables.done)

    def _first_needed(self, tables: list[MirrorTable]) -> int:
        """The first change that some table has not applied; the end of the log when there is none."""
        end_offset = self._reader.end().end_offset
        marks = {table.shape.relation_oid: table.clean_to for table in tables}
        # The mark of a quiet table may be older than the log; then it is the table's own question what is missing.
        first = min(self._reader.first_offset(), end_offset)
        for table in tables:
            oid = table.shape.relation_oid
            if marks[oid] < first:
                try:
                    self._reader.plan(marks[oid], first, oid)
                except LogRangeError as error:
                    self._tables.park(table, removed(table, error))
                    del marks[oid]
        slices = self._reader.plan(max(first, min(marks.values(), default=end_offset)), end_offset)
        needed = [
            max(piece.entry.first_offset, marks[piece.relation_oid])
            for piece in slices
            if piece.relation_oid in marks and piece.entry.last_offset >= marks[piece.relation_oid]
        ]
        return min(needed, default=end_offset)

    def _start_query(self, checkpoint: Path) -> StreamingQuery:
        self._spark.dataSource.register(MirrorPlanSource)
        options = {"path": self._log_location, "start": str(self._tables.done)}
        plan = self._spark.readStream.format(PLAN_SOURCE).options(**options).load()
        writer = plan.writeStream.queryName(f"pgtide mirror {uuid.uuid4().hex}").foreachBatch(self._on_batch)
        writer = writer.trigger(processingTime=f"{self._config.mirror.trigger_seconds} seconds")
        return writer.option("checkpointLocation", checkpoint.as_uri()).start()

    def _watch(self, checkpoint: Path, stop: threading.Event, until_offset: int | None) -> None:
        attempts = 1
        self._query = self._start_query(checkpoint / str(attempts))
        while not stop.wait(_LOOK_S):
            self._hold.check()
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
                    self._look_for_tables()
                    self._intake.join_loaded()
                    self._retry_parked()
                    self._intake.retry_reloads()
                    self._retry_point()
                    self._follow_alterations()
                    self._meet_barriers()
                    goes_on = self._keep_up() or self._intake.is_busy or bool(self._publisher.error)
                    goes_on = goes_on or any(map(_is_joining, self._tables))
                    if until_offset is not None and self._tables.done >= until_offset and not goes_on:
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
                while self._failure is None and self._reader.end().end_offset > self._tables.done:
                    try:
                        self._next_batch()
                    except LogRangeError:
                        if self._tables.done >= self._reader.first_offset():
                            raise
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - raised by `_watch`
            if not self._tables.stop.is_set():
                self._failure = error

    def _next_batch(self) -> None:
        if self._tables.done < self._reader.first_offset():
            # The log may not be larger than so much, and we are so far behind.
            self._go_to_first_needed([table for table in self._tables if is_streaming(table)])
            if self._tables.done == self._reader.end().end_offset:
                self._publish(self._reader.first_offset(), self._tables.done)
        else:
            to = self._up_to_barrier(batch_end(self._reader, self._tables.done))
            with self._applier.timings.of(BATCH):
                self._run_batch(to)
            self._look_for_tables()
            self._intake.join_loaded()
        self._report()
        self._meet_barriers()
        self._keep_up()

    def _run_batch(self, to: int) -> None:
        latest = {piece.relation_oid: piece.entry.fingerprint for piece in self._reader.plan(self._tables.done, to)}
        touched = {oid: self._reader.shape(oid, fingerprint) for oid, fingerprint in latest.items() if oid}
        captured = self._tables.histories or touched
        self._take_in({oid: shape for oid, shape in touched.items() if oid in captured})
        now = time.monotonic()
        due = [table for oid, table in self._tables.by_oid.items() if _is_due(table, now, touched=oid in touched)]
        self._tables.each(due, lambda table: self._advance(table, to))
        for oid, table in self._tables.by_oid.items():
            if oid not in touched and not table.error and not table.joining:
                table.clean_to = max(table.clean_to, to)
        self._publish(self._tables.done, to)
        self._tables.done = to

    def _take_in(self, shapes: dict[int, TableShape]) -> None:
        self._tables.each(self._tables.take_in(shapes, shapes), self._intake.examine)

    def _advance(self, table: MirrorTable, to: int) -> None:
        """Brings one table to `to`; has it loaded if it has nothing, as when it was dropped to be loaded anew.

        One that was parked for long catches up in batches, as one that was loaded does.
        """
        was_parked = bool(table.error)
        if not table.is_loaded:
            table.error = ""
            self._intake.examine(table)
        if was_parked and not table.joining:
            self._intake.take_back(table)
        if not table.joining:
            self._applier.apply(table, to)
            self._alterations.follow(table, to)

    def _publish(self, start: int, to: int, at_lsn: int = 0, renewed: Collection[str] = ()) -> bool:
        published = self._publisher.publish(list(self._tables), start, to, at_lsn, renewed)
        if self._tables.stop.is_set():
            raise Stopped
        return published

    def _retry_point(self) -> None:
        if self._publisher.is_due:
            if self._tables.done == self._reader.end().end_offset:
                renewed = [table.name for table in self._tables if not table.joining]
                self._publish(self._reader.first_offset(), self._tables.done, renewed=renewed)
            self._report()

    def _retry_parked(self) -> None:
        now = time.monotonic()
        due = [table for table in self._tables if table.error and _is_due(table, now, touched=False)]
        if due:
            self._tables.each(due, lambda table: self._advance(table, self._tables.done))
            if any(not table.error for table in due) and self._tables.done == self._reader.end().end_offset:
                self._publish(self._reader.first_offset(), self._tables.done)
            self._report()

    def _follow_alterations(self) -> None:
        """Tables that were altered without a change of a row."""
        due, lsn = self._alterations.look(self._reader, self._tables.done)
        # Those that are being loaded are looked at when they have joined.
        due -= {oid for oid, table in self._tables.by_oid.items() if table.joining}
        if due:
            shapes = self._alterations.shapes(due, self._tables.done)
            self._take_in({oid: shape for oid, shape in shapes.items() if oid in self._tables.by_oid})
            tables = {oid: self._tables.by_oid[oid] for oid in due & self._tables.by_oid.keys()}
            following = [table for table in tables.values() if is_streaming(table) or _is_untouched(table)]
            self._tables.each(following, lambda table: self._advance(table, self._tables.done))
            failed = self._intake.load_rewritten(tables.values())
            self._alterations.followed(due - {oid for oid, table in tables.items() if table.name in failed})
            self._publish(self._reader.first_offset(), self._tables.done, lsn)
            self._report()

    def _up_to_barrier(self, to: int) -> int:
        """The end of a batch that would end at `to`: no later than the next barrier.

        `to` was read before the barriers are placed: if the log has not reached one's LSN now, it had not then.
        """
        self._barriers.look()
        return min([to, *(place for _, place, _ in self._barriers.placed(self._reader) if place > self._tables.done)])

    def _meet_barriers(self) -> None:
        """Publishes the points that are asked for where we are now, and tells those who asked too late."""
        for lsn, place, barrier in self._barriers.placed(self._reader):
            if place == self._tables.done:
                loaded = [table for table in self._tables if is_streaming(table)]
                self._tables.each(loaded, self._take_head)
                published = self._publish(self._reader.first_offset(), self._tables.done, lsn)
                # A point that was asked for with a later LSN, here, does not name tables as they were at this one.
                published = published and self._points.last is not None and self._points.last.lsn == lsn
                self._report()
                # Else nothing is loaded yet, or the lake cannot be written: it is to wait.
                if published or (self._points.last is not None and not self._publisher.error):
                    self._barriers.answer(barrier, BarrierState.PUBLISHED if published else BarrierState.PASSED)
            elif place < self._tables.done:
                self._barriers.answer(barrier, BarrierState.PASSED)

    def _keep_up(self) -> bool:
        """Some upkeep, if it is due; returns whether there is more to do now."""
        if self._tables.stop.is_set() or not self._upkeep.is_due():
            return False
        before = self._upkeep.report()
        goes_on = self._tables.aside(self._upkeep_step).result()
        if self._upkeep.report() != before:
            self._report()
        return goes_on

    def _upkeep_step(self) -> bool:
        with self._applier.timings.of(UPKEEP):
            return self._upkeep.step(filter(is_streaming, self._tables), self._tables.stop)

    def _take_head(self, table: MirrorTable) -> None:
        """Makes sure that we name the table as it is now: somebody else may have written to it."""
        recorded = self._sink.recorded(table.target)
        if recorded is None or table.version is None or recorded.snapshot_id != table.version.snapshot_id:
            table.version = None
            self._advance(table, self._tables.done)

    def _report(self) -> None:
        self._announcer.look([(table.name, table.progress) for table in self._tables])
        upkeep, timings = self._upkeep.report(), self._applier.timings.report()
        self._progress.write(self._tables, self._tables.done, self._points, upkeep, timings, self._publisher.error)


def _is_joining(table: MirrorTable) -> bool:
    return table.joining


def _is_untouched(table: MirrorTable) -> bool:
    """Whether nothing is known of a table that is to be kept up to date."""
    return table.version is None and not (table.error or table.joining or table.removed)


def _is_due(table: MirrorTable, now_s: float, *, touched: bool) -> bool:
    if table.joining or table.removed:
        return False
    return now_s >= table.retry_at_s if table.error else touched

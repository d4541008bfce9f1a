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
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pgtide.config import Config
from pgtide.errors import LogError, LogRangeError, PgtideError, TableError
from pgtide.failpoints import reach
from pgtide.log.control import (
    BarrierState,
    TableHistory,
    histories,
    offered_snapshot,
    requested_reloads,
    withdraw_reloads,
)
from pgtide.log.reader import LogReader
from pgtide.schema import TableShape
from pgtide.sinks import Conflict, Version
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.merge import LOST_VALUE
from pgtide.sinks.multiset import LOST_ROW
from pgtide.spark.alterations import Alterations
from pgtide.spark.announcer import Announcer
from pgtide.spark.apply import JOB_TAG, Applier, MirrorTable
from pgtide.spark.barriers import Barriers
from pgtide.spark.gap import has_gap, loaded_lsn
from pgtide.spark.joining import TAKEN_OVER, Joining, Load
from pgtide.spark.mirror_plan import NAME as PLAN_SOURCE
from pgtide.spark.mirror_plan import MirrorPlanSource
from pgtide.spark.only_mirror import only_mirror
from pgtide.spark.points import Points
from pgtide.spark.progress import Progress
from pgtide.spark.publisher import Publisher, first_line, is_streaming, pause_s
from pgtide.spark.targets import points_target, target_of
from pgtide.spark.timings import BATCH, UPKEEP
from pgtide.spark.upkeep import Upkeep

_TABLES_AT_ONCE = 4
_BATCH_ROWS = 2_000_000
_BATCH_BYTES = 1 << 30
_LOOK_S = 0.1
_LOOK_FOR_BARRIERS_S = 0.5
_LOOK_FOR_TABLES_S = 1.0
# Spark gives the Python process of a streaming source ten seconds to start, which a busy machine may not keep.
_SLOW_WORKER = "Python worker failed to connect back"
_QUERY_ATTEMPTS = 5


class _Stopped(Exception):
    """We are to stop, and leave everything as it is."""


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
        self._tables: dict[int, MirrorTable] = {}
        self._histories: dict[int, TableHistory] = {}  # of the tables that are captured; none for a log without notes
        self._look_for_tables_at_s = 0.0
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
            self._joining.end(stop)
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
        """Finds out where each table is, and has those loaded that have nothing yet."""
        self._points.open()
        self._done = min(self._reader.first_offset(), self._reader.end().end_offset)
        for shape in self._reader.shapes().values():
            if shape.relation_oid:
                self._tables[shape.relation_oid] = MirrorTable(shape, target_of(self._config, shape.qualified_name))
        self._histories = histories(self._log_location)
        for table in self._tables.values():
            table.removed = self._is_removed(table)
        tables = [table for table in self._tables.values() if not table.removed]
        self._each(tables, lambda table: self._sink.sweep(table.target))
        self._each([table for table in tables if not table.error], self._examine)
        self._joining.go(stop)
        if not self._joining.is_busy:
            self._joining.release(stop)
        if all(table.joining for table in tables):
            self._report()
            self._joining.wait_for_first(stop)
        if stop.is_set():
            raise _Stopped
        self._alterations.look(self._reader, 0)
        tables = [table for table in tables if not table.joining]
        self._each([table for table in tables if not table.error], self._refresh)
        self._done = self._first_needed([table for table in tables if not table.error])
        for table in tables:
            if not table.error:
                table.clean_to = max(table.clean_to, self._done)
        self._join_loaded()
        # A predecessor may have been killed between its last table, or one that was loaded anew, and the point.
        if tables and self._done == self._reader.end().end_offset:
            renewed = [table.name for table in tables]
            self._publish(self._reader.first_offset(), self._done, renewed=renewed)
        self._report()

    def _is_removed(self, table: MirrorTable) -> bool:
        return bool(self._histories) and table.shape.relation_oid not in self._histories

    def _is_fenced(self, table: MirrorTable) -> bool:
        """Whether transactions are open that have rows of it which the stream lacks: a load must wait for them."""
        history = self._histories.get(table.shape.relation_oid)
        return history is not None and history.complete_lsn is None

    def _must_be_loaded(self, table: MirrorTable) -> Version | None:
        """The version that lacks something: it has no rows yet, or changes since they were read were not captured."""
        version = self._sink.recorded(table.target)
        if version is None or version.mark is None or version.mark.offset is None:
            return version or Version(table.target, None, has_rows=False, mark=None)
        history = self._histories.get(table.shape.relation_oid)
        return version if has_gap(version.mark, history, self._reader.identity.start_lsn) else None

    def _examine(self, table: MirrorTable) -> None:
        """Has a table loaded that needs it, or whose load was broken off."""
        if self._config.snapshot.initial != "bulk" or table.removed or table.error or self._joining.is_loading(table):
            return
        lacking = self._must_be_loaded(table)
        beside = self._sink.beside(table.target)
        table.joining = lacking is not None
        if lacking is None and beside is None:
            return
        table.needs_from = self._needed_from(table, beside or lacking)
        if lacking is None or not self._is_fenced(table):
            has_rows = lacking is None or (lacking.mark is not None and lacking.mark.offset is not None)
            self._joining.begin(table, beside=has_rows)

    def _needed_from(self, table: MirrorTable, version: Version | None) -> int:
        """From where on a load that goes on, or begins under an offered snapshot, needs the log; others begin now."""
        mark, offer = version.mark if version else None, offered_snapshot(self._log_location)
        lsns = [loaded_lsn(mark, 0) if mark else 0, offer.lsn if offer and table.name in offer.tables else 0]
        try:
            return min([self._done, *(self._applier.reader().position_after(lsn) for lsn in lsns if lsn)])
        except LogRangeError:
            return self._done  # it begins again, with a snapshot of then

    def _look_for_tables(self) -> None:
        """Tables that are captured since the last look, or no more, or are to be loaded anew."""
        if time.monotonic() < self._look_for_tables_at_s:
            return
        self._look_for_tables_at_s = time.monotonic() + _LOOK_FOR_TABLES_S
        found, known = histories(self._log_location), self._histories
        wanted = requested_reloads(self._log_location)
        if found == known and not wanted:
            return
        self._histories = found
        self._take_in({shape.relation_oid: shape for shape in self._reader.shapes().values()}, found)
        changed = []
        for oid, table in self._tables.items():
            was_removed, table.removed = table.removed, self._is_removed(table)
            if not table.removed and (was_removed or found.get(oid) != known.get(oid)):
                changed.append(table)
        self._each([table for table in changed if not table.error], self._examine)
        self._each(
            [table for table in self._tables.values() if _is_untouched(table)],
            lambda table: self._advance(table, self._done),
        )
        failed = self._load_anew([table for table in self._tables.values() if table.name in wanted])
        withdraw_reloads(self._log_location, set(wanted) - failed)
        self._report()

    def _load_anew(self, tables: list[MirrorTable]) -> set[str]:
        """Tables that somebody wants loaded anew, parked ones too; others have no rows to be replaced.

        Names those for which it cannot even be begun just now.
        """
        failed = set()
        for table in tables:
            if table.joining or table.removed or not self._is_loaded(table):
                continue
            try:
                self._joining.begin_beside(table)
            except (Conflict, Py4JJavaError, PySparkException) as error:
                table.load_error = _told(table, error)
                failed.add(table.name)
                continue
            table.needs_from = self._done
            self._joining.begin(table, beside=True)
        return failed

    def _is_known(self, shape: TableShape) -> bool:
        """A table that was renamed is not: it gets a mirror of its new name, and the old one stays as it was."""
        table = self._tables.get(shape.relation_oid)
        return table is not None and table.target == target_of(self._config, shape.qualified_name)

    def _take_in(self, shapes: dict[int, TableShape], oids: Iterable[int]) -> None:
        for oid in oids:
            if oid not in shapes or self._is_known(shapes[oid]):
                continue
            table = MirrorTable(shapes[oid], target_of(self._config, shapes[oid].qualified_name))
            # A table that was dropped and made again has the name of one that is captured no more.
            others = {oid: old for oid, old in self._tables.items() if old.target != table.target}
            self._tables = {**others, oid: table}  # in one go: loads that report go through it in other threads

    def _take_in_unknown(self, shapes: dict[int, TableShape]) -> None:
        unknown = [oid for oid, shape in shapes.items() if not self._is_known(shape)]
        self._take_in(shapes, unknown)
        for oid in unknown:
            self._examine(self._tables[oid])

    def _join_loaded(self) -> None:
        """Tables that were loaded meanwhile go on with the others, when they have caught up with them."""
        self._joining.go(self._stop)
        loaded = []
        for load, error in self._joining.finished(self._done):
            table = load.table
            if isinstance(error, LogError):
                raise error
            if self._tables.get(table.shape.relation_oid) is not table:
                continue  # it was renamed meanwhile
            table.progress.end()
            table.load_error = str(error) if error is not None else ""
            if error is None:
                table.load_failures = 0
                loaded.append(load)
            elif table.joining or not load.is_beside:
                self._park(table, error)
            else:
                self._put_off_reload(table)
        self._each([load.table for load in loaded], lambda table: self._take(table, loaded))
        behind = [table for table in self._tables.values() if table.catching_up]
        self._each(behind, self._catch_up)
        joined = [table.name for table in behind if not table.catching_up and not table.error]
        if joined:
            self._report()
            if self._done == self._reader.end().end_offset:
                self._publish(self._reader.first_offset(), self._done, renewed=joined)
        if loaded or behind:
            self._report()

    def _take(self, table: MirrorTable, loaded: list[Load]) -> None:
        """What was loaded beside a table takes its place, and is brought at once to where the table was."""
        shadow = next(load.shadow for load in loaded if load.table is table)
        if shadow is not table:
            assert shadow.version is not None
            table.version = self._sink.take_over(shadow.version)
            reach(TAKEN_OVER)
            table.shape, table.clean_to = shadow.shape, shadow.clean_to
        self._refresh(table)
        while shadow is not table and table.clean_to < self._done:
            self._applier.apply(table, min(self._done, _batch_end(self._applier.reader(), table.clean_to)))
        table.catching_up = True

    def _catch_up(self, table: MirrorTable) -> None:
        """One batch at a time: after a long load there may be many, and the others are not to wait for all of them."""
        if table.clean_to < self._done:
            self._applier.apply(table, min(self._done, _batch_end(self._applier.reader(), table.clean_to)))
        table.needs_from = table.clean_to
        if table.clean_to >= self._done:
            table.catching_up = table.joining = False
            table.needs_from = None

    def _put_off_reload(self, table: MirrorTable) -> None:
        """Its old rows are kept up to date meanwhile, and what is loaded beside them stays."""
        table.load_failures += 1
        table.reload_at_s = time.monotonic() + pause_s(table.load_failures)

    def _retry_reloads(self) -> None:
        now_s = time.monotonic()
        due = [t for t in self._tables.values() if t.load_failures and not t.error and now_s >= t.reload_at_s]
        self._each([table for table in due if not self._joining.is_loading(table)], self._examine)
        for table in due:
            if not self._joining.is_loading(table):
                table.load_failures = 0  # nothing is beside it any more

    def _refresh(self, table: MirrorTable) -> None:
        self._applier.refresh(table)
        self._alterations.check(table)

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
                    self._park(table, _removed(table, error))
                    del marks[oid]
        slices = self._reader.plan(max(first, min(marks.values(), default=end_offset)), end_offset)
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
                    self._look_for_tables()
                    self._join_loaded()
                    self._retry_parked()
                    self._retry_reloads()
                    self._retry_point()
                    self._follow_alterations()
                    self._meet_barriers()
                    goes_on = self._keep_up() or self._joining.is_busy or bool(self._publisher.error)
                    goes_on = goes_on or any(map(_is_joining, self._tables.values()))
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
                    to = self._up_to_barrier(_batch_end(self._reader, self._done))
                    with self._applier.timings.of(BATCH):
                        self._run_batch(to)
                    self._look_for_tables()
                    self._join_loaded()
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
        self._take_in_unknown(
            {oid: shape for oid, shape in touched.items() if oid in self._histories or not self._histories}
        )
        now = time.monotonic()
        due = [table for oid, table in self._tables.items() if _is_due(table, now, touched=oid in touched)]
        self._each(due, lambda table: self._advance(table, to))
        for oid, table in self._tables.items():
            if oid not in touched and not table.error and not table.joining:
                table.clean_to = max(table.clean_to, to)
        self._publish(self._done, to)
        self._done = to

    def _advance(self, table: MirrorTable, to: int) -> None:
        """Brings one table to `to`; has it loaded if it has nothing, as when it was dropped to be loaded anew."""
        if not table.is_loaded:
            table.error = ""
            self._examine(table)
        if not table.joining:
            self._applier.apply(table, to)
            self._alterations.follow(table, to)

    def _publish(self, start: int, to: int, at_lsn: int = 0, renewed: Collection[str] = ()) -> bool:
        published = self._publisher.publish(self._tables.values(), start, to, at_lsn, renewed)
        if self._stop.is_set():
            raise _Stopped
        return published

    def _retry_point(self) -> None:
        if self._publisher.is_due:
            if self._done == self._reader.end().end_offset:
                renewed = [table.name for table in self._tables.values() if not table.joining]
                self._publish(self._reader.first_offset(), self._done, renewed=renewed)
            self._report()

    def _retry_parked(self) -> None:
        now = time.monotonic()
        due = [table for table in self._tables.values() if table.error and _is_due(table, now, touched=False)]
        if due:
            self._each(due, lambda table: self._advance(table, self._done))
            if any(not table.error for table in due) and self._done == self._reader.end().end_offset:
                self._publish(self._reader.first_offset(), self._done)
            self._report()

    def _follow_alterations(self) -> None:
        """Tables that were altered without a change of a row."""
        due, lsn = self._alterations.look(self._reader, self._done)
        # Those that are being loaded are looked at when they have joined.
        due -= {oid for oid, table in self._tables.items() if table.joining or self._joining.is_loading(table)}
        if due:
            shapes = self._alterations.shapes(due, self._done)
            self._take_in_unknown({oid: shape for oid, shape in shapes.items() if oid in self._tables})
            tables = [self._tables[oid] for oid in due & self._tables.keys()]
            tables = [table for table in tables if is_streaming(table) or _is_untouched(table)]
            self._each(tables, lambda table: self._advance(table, self._done))
            failed: set[str] = set()
            if self._config.snapshot.initial == "bulk":
                lost = [table for oid, table in self._tables.items() if oid in due and self._lost(table)]
                failed = self._load_anew(lost)
            self._alterations.followed({oid for oid in due if self._tables[oid].name not in failed})
            self._publish(self._reader.first_offset(), self._done, lsn)
            self._report()

    def _lost(self, table: MirrorTable) -> bool:
        """Whether its rows have values in the source that were never sent."""
        version = self._sink.recorded(table.target)
        return version is not None and self._alterations.is_rewritten(table, version.mark)

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
                loaded = [table for table in self._tables.values() if is_streaming(table)]
                self._each(loaded, self._take_head)
                published = self._publish(self._reader.first_offset(), self._done, lsn)
                self._report()
                if published or self._points.last is not None:  # else nothing is loaded yet: it is to wait
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
            return self._upkeep.step(filter(is_streaming, self._tables.values()), self._stop)

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
                table.error = ""
                table.failures = table.failures if table.joining else 0
            elif isinstance(error, LogRangeError):
                self._park(table, _removed(table, error))
            elif isinstance(error, Exception) and not isinstance(error, LogError):
                self._park(table, error)
            else:
                raise error

    def _tagged(self, work: Callable[[MirrorTable], None], table: MirrorTable) -> None:
        self._spark.addTag(JOB_TAG)
        work(table)

    def _park(self, table: MirrorTable, error: Exception) -> None:
        table.error = _told(table, error)
        table.version = table.needs_from = None
        table.joining = table.catching_up = False
        table.failures += 1
        table.retry_at_s = time.monotonic() + pause_s(table.failures)

    def _report(self) -> None:
        self._announcer.look([(table.name, table.progress) for table in self._tables.values()])
        upkeep, timings = self._upkeep.report(), self._applier.timings.report()
        self._progress.write(self._tables.values(), self._done, self._points, upkeep, timings, self._publisher.error)


def _batch_end(reader: LogReader, start: int) -> int:
    return reader.boundary(start, _BATCH_ROWS, _BATCH_BYTES)


def _is_joining(table: MirrorTable) -> bool:
    return table.joining


def _is_untouched(table: MirrorTable) -> bool:
    """Whether nothing is known of a table that is to be kept up to date."""
    return table.version is None and not (table.error or table.joining or table.removed)


def _is_due(table: MirrorTable, now_s: float, *, touched: bool) -> bool:
    if table.joining or table.removed:
        return False
    return now_s >= table.retry_at_s if table.error else touched


def _removed(table: MirrorTable, error: LogRangeError) -> TableError:
    return TableError(
        f"{table.name}: changes that it has not applied are no longer in the log ({error.what}).",
        remedy=f"Load it anew: pgtide snapshot start {table.name} --type bulk",
    )


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
    return f"{type(error).__name__}: {first_line(error)}"

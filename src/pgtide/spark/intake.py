"""Which tables are to be loaded, and how they take their place among those that stream.

`joining` loads them in threads of its own.  Here it is found out what the lake lacks, and between two batches what is
loaded is taken: it catches up, one batch at a time, and is covered by points from then on.  What was loaded beside a
table catches up there, so that for readers time does not go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import wait
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Protocol

from pgtide.config import Config
from pgtide.errors import LogError, LogRangeError, TableError
from pgtide.failpoints import reach
from pgtide.log.control import offered_snapshot
from pgtide.log.reader import LogReader
from pgtide.schema import TableShape
from pgtide.sinks import Sink, Version
from pgtide.spark.alterations import Alterations
from pgtide.spark.apply import Applier, MirrorTable
from pgtide.spark.gap import has_gap, loaded_lsn
from pgtide.spark.joining import TAKEN_OVER, Joining, Load
from pgtide.spark.mirror_tables import MirrorTables, Stopped, batch_end, may_pass, told
from pgtide.spark.publisher import pause_s
from pgtide.spark.targets import POINTS, RELATION, layout_for, points_target


class Publish(Protocol):
    def __call__(self, start: int, to: int, at_lsn: int = 0, renewed: Collection[str] = ()) -> bool: ...


class _Beside(Enum):
    """What becomes of a state that is loaded."""

    BEHIND = auto()  # there are more changes
    TAKEN = auto()  # readers see it
    AGAIN = auto()  # it will not do, and is loaded again


class Intake:
    """Used by the thread that runs a batch, or that has the lock of batches."""

    def __init__(
        self,
        config: Config,
        tables: MirrorTables,
        reader: LogReader,
        sink: Sink,
        applier: Applier,
        alterations: Alterations,
        joining: Joining,
        publish: Publish,
        report: Callable[[], None],
    ) -> None:
        self._loads = config.snapshot.initial == "bulk"
        self._log_location = config.log_location
        self._points_target = points_target(config)
        self._tables = tables
        self._reader = reader
        self._sink = sink
        self._applier = applier
        self._alterations = alterations
        self._joining = joining
        self._publish = publish
        self._report = report
        self._beside: list[Load] = []  # loaded beside their tables, and catching up with them

    def examine(self, table: MirrorTable) -> None:
        """Has a table loaded that needs it, or whose load was broken off; refuses one whose mirror is another's."""
        self._check_target(table)
        if not self._loads or table.removed or table.error:
            return
        if self.is_loading(table):
            if self._has_gap(table):
                table.joining, table.catching_up = True, False
            return
        lacking = self._must_be_loaded(table)
        is_new = lacking is not None and lacking.snapshot_id is None
        beside = None if is_new else self._sink.beside(table.target)
        table.catching_up = table.catching_up and lacking is None
        table.joining = table.catching_up or lacking is not None
        if lacking is None and beside is None:
            return
        table.needs_from = self._needed_from(table, beside or lacking)
        if lacking is None or not self._tables.is_fenced(table):
            has_rows = lacking is None or (lacking.mark is not None and lacking.mark.offset is not None)
            self._joining.begin(table, beside=has_rows)

    def _check_target(self, table: MirrorTable) -> None:
        """Of several tables with one mirror table, it is the one's that it says, or the first's."""
        sharing = self._tables.sharing(table)
        if table.target == self._points_target:
            sharing = [POINTS, *sharing]
        if len(sharing) < 2:
            return
        version = self._sink.recorded(table.target)
        owner = version.properties.get(RELATION) if version else None
        owner = owner if owner in sharing else sharing[0]
        if owner != table.name:
            table.clean_to = max(table.clean_to, self._tables.done)  # it has nothing, and keeps nothing in the log
            raise TableError(
                f"{table.name} would be mirrored into {table.target}, which is that of {owner}.",
                remedy="Leave [mirror] namespace out or give another, or leave one of them out of [source] tables.",
            )

    def _must_be_loaded(self, table: MirrorTable) -> Version | None:
        """The version that lacks something: it has no rows yet, or changes since they were read were not captured."""
        version = self._sink.recorded(table.target)
        if version is None or version.mark is None or version.mark.offset is None:
            return version or Version(table.target, None, has_rows=False, mark=None)
        history = self._tables.histories.get(table.shape.relation_oid)
        return version if has_gap(version.mark, history, self._reader.identity.start_lsn) else None

    def _needed_from(self, table: MirrorTable, version: Version | None) -> int:
        """From where on a load that goes on, or begins under an offered snapshot, needs the log; others begin now."""
        mark, offer = version.mark if version else None, offered_snapshot(self._log_location)
        lsns = [loaded_lsn(mark, 0) if mark else 0, offer.lsn if offer and table.name in offer.tables else 0]
        try:
            return min([self._tables.done, *(self._applier.reader().position_after(lsn) for lsn in lsns if lsn)])
        except LogRangeError:
            return self._tables.done  # it begins again, with a snapshot of then

    def load_anew(self, tables: Iterable[MirrorTable]) -> set[str]:
        """Tables that somebody wants loaded anew, parked ones too; others have no rows to be replaced.

        Names those for which it cannot even be begun just now.
        """
        failed = set()
        for table in tables:
            if (table.joining and not table.catching_up) or table.removed or self.is_loading(table):
                continue
            try:
                if not self._has_rows(table):
                    continue
                self._joining.begin_beside(table)
            except LogError:
                raise
            except Exception as error:  # noqa: BLE001 - of this table alone
                table.load_error = told(table, error)
                failed.add(table.name)
                continue
            table.needs_from = self._tables.done
            self._joining.begin(table, beside=True)
        return failed

    def load_rewritten(self, tables: Iterable[MirrorTable]) -> set[str]:
        """Of these, those whose rows have values in the source that were never sent; see `load_anew`."""
        rewritten, failed = [], set()
        for table in tables if self._loads else ():
            try:
                version = self._sink.recorded(table.target)
            except LogError:
                raise
            except Exception:  # noqa: BLE001 - of this table alone
                failed.add(table.name)
                continue
            if version is not None and self._alterations.is_rewritten(table, version.mark):
                rewritten.append(table)
        return failed | self.load_anew(rewritten)

    def _has_rows(self, table: MirrorTable) -> bool:
        version = self._sink.recorded(table.target)
        return version is not None and version.mark is not None and version.mark.offset is not None

    def is_loading(self, table: MirrorTable) -> bool:
        """Whether it is being loaded, or what is loaded has not taken its place yet."""
        return self._joining.is_loading(table) or any(load.table is table for load in self._beside)

    @property
    def is_busy(self) -> bool:
        return self._joining.is_busy or bool(self._beside)

    def join_loaded(self) -> None:
        """Tables that were loaded meanwhile go on with the others, when they have caught up with them."""
        self._joining.go(self._tables.stop)
        loaded: list[Load] = []
        finished = self._joining.finished(self._tables.done)
        for load, error in finished:
            table = load.table
            if isinstance(error, LogError):
                raise error
            if self._tables.by_oid.get(table.shape.relation_oid) is not table:
                continue  # it was renamed meanwhile
            table.progress.end()
            table.load_error = str(error) if error is not None else ""
            if error is None:
                (self._beside if load.is_beside else loaded).append(load)
            elif table.joining or not load.is_beside:
                self._tables.park(table, error)
            else:
                self._put_off_reload(table)
        self._tables.each([load.table for load in loaded], self._take)
        joined = self._bring_up_beside()
        behind = [table for table in self._tables if table.catching_up]
        self._tables.each(behind, self._catch_up)
        joined += [table.name for table in behind if not table.catching_up and not table.error]
        if joined:
            self._report()
            if self._tables.done == self._reader.end().end_offset:
                self._publish(self._reader.first_offset(), self._tables.done, renewed=joined)
        if finished or behind:
            self._report()

    def _take(self, table: MirrorTable) -> None:
        if self._has_gap(table):
            self._begin_again(Load(table, table))
            return
        self._applier.begin(table)
        self._alterations.check(table)
        table.catching_up, table.needs_from = True, None

    def take_back(self, table: MirrorTable) -> None:
        """A table that was parked: it catches up if it is more than a batch behind."""
        self._applier.begin(table)
        if self._next_end(table) < self._tables.done:
            table.joining = table.catching_up = True

    def _catch_up(self, table: MirrorTable) -> None:
        """One batch at a time: after a long load there may be many, and the others are not to wait for all of them."""
        if table.clean_to < self._tables.done:
            self._applier.apply(table, self._next_end(table))
        if table.clean_to >= self._tables.done:
            self._alterations.follow(table, self._tables.done)
            table.catching_up = table.joining = False

    def _bring_up_beside(self) -> list[str]:
        """What was loaded beside tables takes their place when it has caught up with them; names those."""
        loads = [load for load in self._beside if any(table is load.table for table in self._tables)]
        work = [self._tables.aside(partial(self._bring_up, load)) for load in loads]
        wait(work)
        if self._tables.stop.is_set():
            raise Stopped
        self._beside, joined = [], []
        for load, outcome in zip(loads, work, strict=True):
            table, error = load.table, outcome.exception()
            if isinstance(error, Exception) and not isinstance(error, LogError):
                table.load_error = told(table, error)
                self._put_off_reload(table)
            elif error is not None:
                raise error
            elif (state := outcome.result()) is _Beside.BEHIND:
                self._beside.append(load)
            elif state is _Beside.TAKEN:
                joined.append(table.name)
        return joined

    def _bring_up(self, load: Load) -> _Beside:
        """One batch of changes, unseen by readers; when there are no more, it takes over.

        The state beside has the columns of the table: when they were altered since it was loaded, its rows lack
        something, and changes from before that no longer fit.
        """
        table, shadow = load.table, load.shadow
        if self._joining.deleted_rows.are_coming(shadow):
            return _Beside.BEHIND
        assert shadow.version is not None
        now = self._sink.recorded(shadow.target)
        if (
            self._alterations.is_rewritten(shadow, shadow.mark)
            or self._has_gap(shadow)
            or now is None
            or not self._fits(shadow, now)
        ):
            self._begin_again(load)
            return _Beside.AGAIN
        if shadow.clean_to < self._tables.done:
            try:
                self._joining.apply_beside(shadow, self._next_end(shadow))
            except LogRangeError:
                self._begin_again(load)
                return _Beside.AGAIN
            except LogError:
                raise
            except Exception as error:
                if not may_pass(error):
                    # A change that cannot be applied stays one: the next attempt reads the table as it is then.
                    self._joining.discard(load)
                raise
            table.needs_from = shadow.clean_to
            if shadow.clean_to < self._tables.done:
                return _Beside.BEHIND
        if shadow.clean_to < table.clean_to:
            return _Beside.BEHIND  # a mirror that was killed had brought the table further than the others
        if not self._joining.deleted_rows.have_come(shadow, self._shape_of(shadow), now):
            return _Beside.BEHIND
        table.version = self._sink.take_over(shadow.version, now)
        reach(TAKEN_OVER)
        table.shape, table.clean_to, table.needs_from = shadow.shape, shadow.clean_to, None
        table.joining = table.catching_up = False
        table.error, table.failures, table.load_failures = "", 0, 0
        return _Beside.TAKEN

    def _begin_again(self, load: Load) -> None:
        table = load.table
        table.joining = table.joining or self._has_gap(table)
        table.needs_from = self._tables.done
        self._joining.discard(load)
        if not self._tables.is_fenced(table):  # else it begins when the fence is passed
            self._joining.begin(table, beside=load.is_beside)

    def _has_gap(self, table: MirrorTable) -> bool:
        """Whether it has been away since it was loaded."""
        history = self._tables.histories.get(table.shape.relation_oid)
        return table.mark is not None and has_gap(table.mark, history, self._reader.identity.start_lsn)

    def _shape_of(self, shadow: MirrorTable) -> TableShape:
        """With which what is beside a table was written, if that is known."""
        assert shadow.mark is not None
        shapes = self._applier.reader().shapes_of(shadow.shape.relation_oid)
        return {one.fingerprint: one for one in shapes}.get(shadow.mark.shape, shadow.shape)

    def _fits(self, shadow: MirrorTable, now: Version) -> bool:
        """Whether the table has exactly the columns with which what is beside it was loaded."""
        version, mark, shape = shadow.version, shadow.mark, self._shape_of(shadow)
        assert version is not None
        assert mark is not None
        if shape.fingerprint != mark.shape:
            return False
        try:
            wanted = layout_for(shape, replace(version, properties=now.properties))
        except TableError:  # a column is gone, or is of another type
            return False
        return wanted.properties.items() <= now.properties.items()

    def _next_end(self, table: MirrorTable) -> int:
        reader = self._applier.reader()
        # The mark of a quiet table may be older than the log.
        return min(self._tables.done, batch_end(reader, max(table.clean_to, reader.first_offset())))

    def _put_off_reload(self, table: MirrorTable) -> None:
        """Its old rows are kept up to date meanwhile, and what is loaded beside them stays."""
        table.load_failures += 1
        table.reload_at_s = time.monotonic() + pause_s(table.load_failures)
        self._report()

    def retry_reloads(self) -> None:
        now_s = time.monotonic()
        due = [table for table in self._tables if table.load_failures and not table.error]
        due = [table for table in due if now_s >= table.reload_at_s]
        self._tables.each([table for table in due if not self.is_loading(table)], self.examine)
        for table in due:
            if not self.is_loading(table):
                table.load_failures, table.needs_from = 0, None  # nothing is beside it any more

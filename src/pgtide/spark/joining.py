"""Tables that are loaded and join those that stream: all at a first start, later new ones, those that come back after a
gap, and those to be loaded anew.

A new table is filled where it is.  One that has rows already is loaded beside them, on a branch of the lake table that
no reader sees, and takes over in one commit: readers see the old rows or the new, never none or half.  That the branch
is there is what a mirror that was killed goes on by.

Loads run in a thread of their own, several tables at a time.  A table that is loaded does not wait for the others: it
joins at the end of a batch that has passed the place from which its changes are to be applied; until then no point
covers it, unless its old rows are still being kept up to date.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.errors import PgtideError
from pgtide.failpoints import declare, reach
from pgtide.sinks import Mark, Sink, Version
from pgtide.sinks.iceberg import IcebergSink
from pgtide.spark.apply import Applier, MirrorTable
from pgtide.spark.deleted_rows import DeletedRows
from pgtide.spark.load import Loader

BESIDE_BEGUN = declare("load.beside.begun", "a table that is loaded anew has an empty state beside its rows")
TAKEN_OVER = declare("load.taken_over", "a table that was loaded anew shows its new rows, and no point says so yet")

_LOOK_S = 0.1
_NOT_MUCH_LONGER = 0.5
_ANEW = "anew"  # the load of a state beside that nothing is loaded into yet


@dataclass(frozen=True, slots=True)
class Load:
    table: MirrorTable
    shadow: MirrorTable  # what the loader works on: the table itself, or its state beside

    @property
    def is_beside(self) -> bool:
        return self.shadow is not self.table


class Joining:
    def __init__(
        self, spark: SparkSession, config: Config, applier: Applier, sink: Sink, report: Callable[[], None]
    ) -> None:
        unloaded: set[str] = set()
        self._loader = Loader(spark, config, applier, sink, unloaded)
        self._beside_sink = _BesideSink(spark, applier)
        self._loader_beside = Loader(spark, config, applier, self._beside_sink, unloaded)
        self._applier_beside = Applier(spark, self._beside_sink, config.log_location, config.mirror, loads=True)
        self._sink = sink
        self._report = report
        self.deleted_rows = DeletedRows(spark, sink)
        self._waiting: deque[Load] = deque()
        self._loading: list[Load] = []
        self._over: deque[tuple[Load, Exception | None]] = deque()
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._changed = threading.Condition()

    def wait_for_first(self, stop: threading.Event, is_due: Callable[[], bool]) -> None:
        """Until a table is loaded, or none will be, or something else is due: nothing streams before that.

        Those that take not much longer than the first are waited for: starting to stream would slow them down.
        """
        limit_s: float | None = None
        while not stop.is_set() and not is_due() and (limit_s is None or time.monotonic() < limit_s):
            with self._changed:
                if not (self._waiting or self._loading):
                    return
                if self._over and limit_s is None:
                    limit_s = time.monotonic() + _NOT_MUCH_LONGER * (time.monotonic() - self._began_s)
                self._changed.wait(_LOOK_S)

    def release(self, stop: threading.Event) -> None:
        """Lets go of the snapshot that a run has left which was killed when it had loaded everything."""
        self._loader.load([], stop, self._report, lambda _: None)

    def is_loading(self, table: MirrorTable) -> bool:
        with self._changed:
            loads = [*self._waiting, *self._loading, *(load for load, _ in self._over)]
        return any(load.table is table for load in loads)

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._loading or self._over)

    def begin(self, table: MirrorTable, *, beside: bool) -> None:
        """Has the table loaded, unless it is: together with others that are begun before the next `go`."""
        if self.is_loading(table):
            return
        shadow = table
        if beside:
            shadow = MirrorTable(table.shape, table.target, progress=table.progress, beside_of=table)
        with self._changed:
            self._waiting.append(Load(table, shadow))

    def go(self, stop: threading.Event) -> None:
        with self._changed:
            if self._waiting and self._thread is None:
                self._began_s = time.monotonic()
                self._thread = threading.Thread(target=self._run, args=[stop], name="pgtide-joining", daemon=True)
                self._thread.start()

    def finished(self, done: int) -> list[tuple[Load, Exception | None]]:
        """Loads that have failed, or whose changes begin at or before this offset; they are handed out once."""
        with self._changed:
            ready = [one for one in self._over if one[1] is not None or one[0].shadow.clean_to <= done]
            for one in ready:
                self._over.remove(one)
        return ready

    def apply_beside(self, shadow: MirrorTable, to: int) -> None:
        """Brings what is loaded beside a table on to this offset, unseen by readers."""
        self._applier_beside.begin(shadow)
        self._applier_beside.apply(shadow, to)

    def discard(self, load: Load) -> None:
        """What is loaded beside a table will not do: its next load reads all of it."""
        version = self._beside_sink.recorded(load.shadow.target) if load.is_beside else None
        if version is not None and version.mark is not None:
            self._beside_sink.replace(version, None, replace(version.mark, offset=None, load=_ANEW))

    def begin_beside(self, table: MirrorTable) -> None:
        """Makes it known in the lake itself that it is to be loaded anew, whatever becomes of this process."""
        self._beside_sink.recorded(table.target)

    def end(self, stop: threading.Event) -> None:
        """Waits for the threads, which leave off when `stop` is set."""
        self.deleted_rows.end(stop)
        thread = self._thread
        if thread is not None and stop.is_set():
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self._changed:
                # All that wait are loaded under one snapshot, several at a time.
                beside = self._waiting[0].is_beside if self._waiting else False
                self._loading = [load for load in self._waiting if load.is_beside == beside]
                self._waiting = deque(load for load in self._waiting if load.is_beside != beside)
                if not self._loading:
                    self._thread = None
                    return
            loads, failure = self._loading, None
            try:
                loader = self._loader_beside if beside else self._loader
                loader.load([load.shadow for load in loads], stop, self._report, self._hand_on)
            except Exception as error:  # noqa: BLE001 - handed to the mirror
                failure = error
            if stop.is_set():
                return
            with self._changed:
                for load in self._loading:
                    told = PgtideError(load.shadow.error) if load.shadow.error else None
                    self._over.append((load, failure or told))
                self._loading = []
                self._changed.notify_all()

    def _hand_on(self, loaded: MirrorTable) -> None:
        with self._changed:
            self._over += [(load, None) for load in self._loading if load.shadow is loaded]
            self._loading = [load for load in self._loading if load.shadow is not loaded]
            self._changed.notify_all()


class _BesideSink(IcebergSink):
    """The sink with which a table that has rows is loaded: it sees and writes the state beside."""

    def __init__(self, spark: SparkSession, applier: Applier) -> None:
        super().__init__(spark)
        self._log_id = applier.log_id

    def recorded(self, target: str) -> Version | None:
        beside = self.beside(target)
        if beside is not None:
            return beside
        version = super().recorded(target)
        if version is None or version.snapshot_id is None:
            return version
        beside = self.begin_beside(version, Mark(self._log_id, version.mark.shape if version.mark else "", load=_ANEW))
        reach(BESIDE_BEGUN)
        return beside

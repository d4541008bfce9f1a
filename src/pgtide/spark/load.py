"""The first load: Spark reads the tables as of the snapshot that the capture offers, range by range.

The capture keeps a database snapshot S that agrees exactly with a place L in the stream.  Tables are read in ctid
ranges under S; each commit to the lake names the ranges it finished and the pair (S, L) they were read under, so a load
that was killed goes on with what is missing.  The closing commit sets the offset from which changes are applied: the
first transaction that ended after L.  Until then the table is *loading* and no point covers it.

If S is gone, what is loaded is brought to a new pair (`new_pair`); a table for which that cannot be done starts again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.errors import LogError, PgtideError, TableError
from pgtide.failpoints import declare, reach
from pgtide.log.control import SnapshotOffer, offered_snapshot, request_snapshot, requested_snapshot, withdraw_snapshot
from pgtide.sinks import Sink
from pgtide.snapshot.copy_range import Altered, Rewritten, SnapshotGone
from pgtide.snapshot.ctid_ranges import missing
from pgtide.snapshot.lock_watch import LockWatch
from pgtide.spark.apply import JOB_TAG, Applier, MirrorTable
from pgtide.spark.connection_limit import ConnectionLimit
from pgtide.spark.table_load import Means, Pair, TableLoad, loaded_ranges

_ROUNDS_MAX = 5  # in which a table gets no further
_POLL_S = 0.05

LOADED = declare("load.finished", "all tables are loaded, the snapshot is still kept")


class Loader:
    def __init__(self, spark: SparkSession, config: Config, applier: Applier, sink: Sink) -> None:
        self._means = Means(spark, config, applier, sink, ConnectionLimit(config.snapshot.connections))
        self._log_location = config.log_location
        self._one_load = threading.Lock()  # one snapshot is offered at a time
        self._unloaded: set[str] = set()  # tables that failed, and will come again: the snapshot is kept for them

    def load(
        self,
        tables: list[MirrorTable],
        stop: threading.Event,
        report: Callable[[], None],
        loaded: Callable[[MirrorTable], None],
    ) -> None:
        """Loads the tables that are not loaded yet, and hands each on as soon as it is.

        One that cannot be loaded has its `error` set afterwards.
        """
        with self._one_load:
            self._load(tables, stop, report, loaded)
            if stop.is_set():
                return
            self._unloaded -= {table.name for table in tables}
            self._unloaded |= {table.name for table in tables if table.error}
            # Also when there was nothing left to load: a run that was killed before this line left its snapshot kept.
            if not self._unloaded:
                reach(LOADED)
                withdraw_snapshot(self._log_location)

    def _load(
        self,
        tables: list[MirrorTable],
        stop: threading.Event,
        report: Callable[[], None],
        loaded: Callable[[MirrorTable], None],
    ) -> None:
        """Round by round, each under a pair of its own, until all are loaded or get no further."""
        left = list(tables)
        refused: SnapshotOffer | None = None
        idle_rounds = dict.fromkeys((table.name for table in tables), 0)
        while left:
            pair = self._pair(left, refused, stop)
            if pair is None:
                return
            before = {table.name: loaded_ranges(table.version) for table in left}
            left, refused = self._round(left, pair, stop, report, loaded), pair.offer
            for table in left:
                further = missing(loaded_ranges(table.version), before[table.name])
                idle_rounds[table.name] = 0 if further else idle_rounds[table.name] + 1
                if idle_rounds[table.name] == _ROUNDS_MAX:
                    table.error = f"{table.name} could not be loaded in {_ROUNDS_MAX} attempts.\n{table.error}"
            left = [table for table in left if idle_rounds[table.name] < _ROUNDS_MAX]

    def _pair(self, tables: list[MirrorTable], refused: SnapshotOffer | None, stop: threading.Event) -> Pair | None:
        """The offered snapshot, or a new one; waits for the capture to make it, and until the log has reached it."""
        names = tuple(table.name for table in tables)
        while not stop.is_set():
            offer = offered_snapshot(self._log_location)
            if offer is not None and offer != refused and set(names) <= set(offer.tables):
                # Only then is it known which transactions of the log are in the snapshot.
                if self._means.applier.reader().end().durable_lsn >= offer.lsn:
                    return Pair(offer)
            elif requested_snapshot(self._log_location) is None:
                request_snapshot(self._log_location, names)
            stop.wait(_POLL_S)
        return None

    def _round(
        self,
        tables: list[MirrorTable],
        pair: Pair,
        stop: threading.Event,
        report: Callable[[], None],
        loaded: Callable[[MirrorTable], None],
    ) -> list[MirrorTable]:
        """Loads tables at the same time; returns those that need another snapshot."""
        again: list[MirrorTable] = []
        config = self._means.config

        def one(table: MirrorTable) -> None:
            if stop.is_set():
                return
            self._means.spark.addTag(JOB_TAG)
            try:
                TableLoad(self._means, table, pair, watch, stop, report).run()
                table.error = ""
                if table.is_loaded:
                    loaded(table)
            except (SnapshotGone, Rewritten, Altered) as error:
                table.error = str(error)
                again.append(table)
            except LogError:
                raise
            except Exception as error:  # noqa: BLE001 - told at once: the others may take hours
                if not stop.is_set():
                    table.error = _told(table, error)
            report()

        with (
            LockWatch(pair.server(config), config.source.connect_timeout_seconds) as watch,
            ThreadPoolExecutor(config.snapshot.connections, thread_name_prefix="pgtide-load") as pool,
        ):
            futures = [pool.submit(one, table) for table in tables]
            wait(futures)
        for future in futures:
            if not stop.is_set():
                future.result()
        return again


def _told(table: MirrorTable, error: BaseException) -> str:
    """Ours are told as they are.  Of Java's, which come with a hundred lines, the last cause is what happened."""
    if isinstance(error, PgtideError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by: ", ": "))]
    what = (causes or lines or [type(error).__name__])[-1].removeprefix("Caused by: ").removeprefix(": ")
    remedy = f"It is tried again. Is there room, and may we write, where {table.target} is?" if causes else ""
    return str(TableError(f"{table.name}: {what[:500]}", remedy=remedy))

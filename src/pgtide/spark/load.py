"""The first load: Spark reads the tables as of the snapshot that the capture offers, range by range.

The capture keeps a database snapshot S that agrees exactly with a place L in the stream.  Tables are read in ctid
ranges under S; each commit to the lake names the ranges it finished and the pair (S, L) they were read under, so a load
that was killed goes on with what is missing.  The closing commit sets the offset from which changes are applied: the
first transaction that ended after L.  Until then the table is *loading* and no point covers it.

If S is gone, what is loaded is brought to a new pair (`new_pair`); a table for which that cannot be done starts again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.errors import LogError, PgtideError, TableError
from pgtide.failpoints import declare, reach
from pgtide.log.control import (
    Alteration,
    SnapshotOffer,
    alterations,
    histories,
    offered_snapshot,
    request_snapshot,
    requested_snapshot,
    withdraw_snapshot,
)
from pgtide.replication.connect import RECOVERY_CONFLICT
from pgtide.sinks import Sink
from pgtide.snapshot.copy_range import Altered, Rewritten, SnapshotGone
from pgtide.snapshot.ctid_ranges import missing
from pgtide.snapshot.lock_watch import LockWatch
from pgtide.spark.apply import JOB_TAG, Applier, MirrorTable
from pgtide.spark.connection_limit import ConnectionLimit
from pgtide.spark.keys import UnusableKey
from pgtide.spark.table_load import Means, Pair, TableLoad, loaded_ranges

_ROUNDS_MAX = 5  # in which a table gets no further
_POLL_S = 0.05
_LOOK_S = 2.0  # each look writes a report, which waits for the disk that the rows go to
_RETRY_S = 10.0

LOADED = declare("load.finished", "all tables are loaded, the snapshot is still kept")


class Loader:
    def __init__(self, spark: SparkSession, config: Config, applier: Applier, sink: Sink, unloaded: set[str]) -> None:
        """`unloaded`: tables that failed, and will come again: the snapshot is kept for them."""
        self._means = Means(spark, config, applier, sink, ConnectionLimit(config.snapshot.connections))
        self._log_location = config.log_location
        self._one_load = threading.Lock()  # one snapshot is offered at a time
        self._unloaded = unloaded
        self._refused: SnapshotOffer | None = None  # a table has keys in it that must first be mended in the source

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
            failed = self._load(tables, stop, report, loaded)
            if stop.is_set():
                return
            self._unloaded -= {table.name for table in tables}
            self._unloaded |= failed
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
    ) -> set[str]:
        """Round by round, each under a pair of its own, until all are loaded or get no further.

        Names those that have failed and could go on under the same pair.
        """
        left = list(tables)
        failed: set[str] = set()
        refused = self._refused
        idle_rounds = dict.fromkeys((table.name for table in tables), 0)
        while left:
            pair = self._pair(left, refused, stop)
            if pair is None:
                break
            before = {table.name: loaded_ranges(table.version) for table in left}
            outcome, refused = self._round(left, pair, stop, report, loaded), pair.offer
            failed |= {table.name for table in outcome.failed}
            if outcome.unusable:
                self._refused = pair.offer
            for table in outcome.again:
                # Without a key everything is read again: getting further than before means nothing.
                further = table.shape.key_columns and missing(loaded_ranges(table.version), before[table.name])
                idle_rounds[table.name] = 0 if further else idle_rounds[table.name] + 1
                if idle_rounds[table.name] == _ROUNDS_MAX:
                    table.error = f"{table.name} could not be loaded in {_ROUNDS_MAX} attempts.\n{table.error}"
            left = [table for table in outcome.again if idle_rounds[table.name] < _ROUNDS_MAX]
        return failed

    def _pair(self, tables: list[MirrorTable], refused: SnapshotOffer | None, stop: threading.Event) -> Pair | None:
        """The offered snapshot, or a new one; waits for the capture to make it, and until the log has reached it."""
        names = tuple(table.name for table in tables)
        while not stop.is_set():
            offer = offered_snapshot(self._log_location)
            serves = offer is not None and offer != refused and set(names) <= set(offer.tables)
            if offer is not None and serves and offer.lsn >= self._complete_lsn(tables):
                # Only then is it known which transactions of the log are in the snapshot.
                if self._means.applier.reader().end().durable_lsn >= offer.lsn:
                    return Pair(offer)
            elif requested_snapshot(self._log_location) is None:
                request_snapshot(self._log_location, names)
            stop.wait(_POLL_S)
        return None

    def _complete_lsn(self, tables: list[MirrorTable]) -> int:
        """From where on the log has all changes of the tables: rows as of an earlier LSN would miss some."""
        known, noted, lsns = histories(self._log_location), alterations(self._log_location), [0]
        for oid in (table.shape.relation_oid for table in tables):
            lsns.append(_rewritten_lsn(noted, oid))
            if oid in known:
                lsns.append(known[oid].complete_lsn or 0)
        return max(lsns)

    def _round(
        self,
        tables: list[MirrorTable],
        pair: Pair,
        stop: threading.Event,
        report: Callable[[], None],
        loaded: Callable[[MirrorTable], None],
    ) -> _Outcome:
        """Loads tables at the same time.  One that fails is tried again for as long as others are being read."""
        config, outcome = self._means.config, _Outcome()
        known, noted = histories(self._log_location), alterations(self._log_location)
        paused: dict[str, tuple[float, MirrorTable]] = {}
        fatal: BaseException | None = None

        def one(table: MirrorTable) -> None:
            if not stop.is_set():
                self._means.spark.addTag(JOB_TAG)
                oid = table.shape.relation_oid
                TableLoad(self._means, table, known.get(oid), _rewritten_lsn(noted, oid), pair, watch, stop).run()

        with (
            LockWatch(pair.server(config), config.source.connect_timeout_seconds) as watch,
            ThreadPoolExecutor(config.snapshot.connections, thread_name_prefix="pgtide-load") as pool,
        ):
            running = {pool.submit(one, table): table for table in tables}
            while running:
                for future in wait(running, _LOOK_S, FIRST_COMPLETED).done:
                    table = running.pop(future)
                    if stop.is_set() or future.cancelled():
                        continue
                    error = future.exception()
                    if error is None:
                        table.error = ""
                        loaded(table)
                    elif isinstance(error, SnapshotGone | Rewritten | Altered):
                        table.error = _told_again(table, error, pair.offer, config.snapshot.max_age_minutes)
                        outcome.again.append(table)
                    elif isinstance(error, UnusableKey):
                        table.error = str(error)
                        outcome.unusable.append(table)
                    elif isinstance(error, LogError) or not isinstance(error, Exception):
                        # Nobody can go on; those that are being read end by themselves, with this or with all rows.
                        fatal = fatal or error
                        for waiting in running:
                            waiting.cancel()
                    else:
                        table.error = _told(table, error)
                        paused[table.name] = time.monotonic() + _RETRY_S, table
                with suppress(OSError):  # the next report will do
                    report()
                now_s = time.monotonic()
                due = [name for name, (at_s, _) in paused.items() if running and now_s >= at_s and fatal is None]
                running |= {pool.submit(one, paused[name][1]): paused.pop(name)[1] for name in due}
        if fatal is not None:
            raise fatal
        outcome.failed.extend(table for _, table in paused.values())
        return outcome


@dataclass(frozen=True, slots=True)
class _Outcome:
    again: list[MirrorTable] = field(default_factory=list)  # need another snapshot
    failed: list[MirrorTable] = field(default_factory=list)
    unusable: list[MirrorTable] = field(default_factory=list)  # only a later snapshot can have them otherwise


def _rewritten_lsn(noted: dict[int, Alteration], relation_oid: int) -> int:
    return noted[relation_oid].rewritten_lsn if relation_oid in noted else 0


def _told_again(table: MirrorTable, error: PgtideError, offer: SnapshotOffer, max_age_minutes: float) -> str:
    if isinstance(error, SnapshotGone) and not table.shape.key_columns:
        return (
            f"{error.what}\n{table.name} has no key, so all of it must be read under one snapshot: it is begun anew. "
            f"If that takes longer than snapshot.max_age_minutes ({max_age_minutes:g}), raise it."
            + (f" If the standby has ended it sooner: {RECOVERY_CONFLICT}" if offer.standby else "")
        )
    return str(error)


def _told(table: MirrorTable, error: BaseException) -> str:
    """Ours are told as they are.  Of Java's, which come with a hundred lines, the last cause is what happened."""
    if isinstance(error, PgtideError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by: ", ": "))]
    what = (causes or lines or [type(error).__name__])[-1].removeprefix("Caused by: ").removeprefix(": ")
    remedy = f"It is tried again. Is there room, and may we write, where {table.target} is?" if causes else ""
    return str(TableError(f"{table.name}: {what[:500]}", remedy=remedy))

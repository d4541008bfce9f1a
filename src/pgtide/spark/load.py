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
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.errors import LogError, TableError
from pgtide.failpoints import declare, reach
from pgtide.log.control import SnapshotOffer, offered_snapshot, request_snapshot, requested_snapshot, withdraw_snapshot
from pgtide.lsn import format_lsn, parse_lsn
from pgtide.replication.connect import Connection
from pgtide.replication.publication import publication_names
from pgtide.replication.server import Server
from pgtide.sinks import Changes, Conflict, Mark, Sink, Version
from pgtide.sinks.iceberg import check_ours
from pgtide.spark.apply import JOB_TAG, Applier, MirrorTable
from pgtide.spark.copy_range import Altered, Rewritten, SnapshotGone, SourceTable, StartAgain
from pgtide.spark.ctid_ranges import CtidRange, missing, parse_range, together
from pgtide.spark.new_pair import KeyReader, changed_keys, changes_between
from pgtide.spark.range_files import files_by_executors
from pgtide.spark.rows import frame_of
from pgtide.spark.source_rows import cut, errors_of_workers, rows_by_executors, rows_here, source_table
from pgtide.spark.targets import layout_for

_ROUNDS_MAX = 5  # in which a table gets no further
_CONFLICTS_MAX = 10
_POLL_S = 0.05
_RANGES_PER_CONNECTION = 4  # a commit costs as much as reading 16 MiB; what a kill loses is no more than one group

TABLE_BEGUN = declare("load.table.begun", "a table is marked as loading, it has no rows yet")
RANGE_APPENDED = declare("load.range.appended", "some ranges of a table are loaded, others are not")
CARRIED_OVER = declare("load.carried.over", "what is loaded of a table was brought to a new snapshot")
TABLE_CLOSED = declare("load.table.closed", "a table is loaded and its offset set")
LOADED = declare("load.finished", "all tables are loaded, the snapshot is still kept")


@dataclass(frozen=True, slots=True)
class _Pair:
    """The snapshot and the place in the stream that agree, and how a commit names them."""

    offer: SnapshotOffer

    @property
    def load(self) -> str:
        return f"{self.offer.name}@{format_lsn(self.offer.lsn)}"


class Loader:
    def __init__(self, spark: SparkSession, config: Config, applier: Applier, sink: Sink) -> None:
        self._spark = spark
        self._config = config
        self._applier = applier
        self._sink = sink
        self._log_location = config.log_location
        self._one_load = threading.Lock()  # one snapshot is offered at a time
        self._unloaded: set[str] = set()  # tables that failed, and will come again: the snapshot is kept for them

    def load(self, tables: list[MirrorTable], stop: threading.Event, report: Callable[[], None]) -> None:
        """Loads the tables that are not loaded yet.  One that cannot be loaded has its `error` set afterwards."""
        with self._one_load:
            left = list(tables)
            refused: SnapshotOffer | None = None
            rounds = dict.fromkeys((table.name for table in tables), 0)
            while left:
                pair = self._pair(left, refused, stop)
                if pair is None:
                    return
                before = {table.name: _loaded_ranges(table.version) for table in left}
                left, refused = self._round(left, pair, stop, report), pair.offer
                for table in left:
                    further = missing(_loaded_ranges(table.version), before[table.name])
                    rounds[table.name] = 0 if further else rounds[table.name] + 1
                    if rounds[table.name] == _ROUNDS_MAX:
                        table.error = f"{table.name} could not be loaded in {_ROUNDS_MAX} attempts.\n{table.error}"
                left = [table for table in left if rounds[table.name] < _ROUNDS_MAX]
            if stop.is_set():
                return
            self._unloaded -= {table.name for table in tables}
            self._unloaded |= {table.name for table in tables if table.error}
            # Also when there was nothing left to load: a run that was killed before this line left its snapshot kept.
            if not self._unloaded:
                reach(LOADED)
                withdraw_snapshot(self._log_location)

    def _pair(self, tables: list[MirrorTable], refused: SnapshotOffer | None, stop: threading.Event) -> _Pair | None:
        """The offered snapshot, or a new one; waits for the capture to make it, and until the log has reached it."""
        names = tuple(table.name for table in tables)
        while not stop.is_set():
            offer = offered_snapshot(self._log_location)
            if offer is not None and offer != refused and set(names) <= set(offer.tables):
                # Only then is it known which transactions of the log are in the snapshot.
                if self._applier.reader().end().durable_lsn >= offer.lsn:
                    return _Pair(offer)
            elif requested_snapshot(self._log_location) is None:
                request_snapshot(self._log_location, names)
            stop.wait(_POLL_S)
        return None

    def _round(
        self, tables: list[MirrorTable], pair: _Pair, stop: threading.Event, report: Callable[[], None]
    ) -> list[MirrorTable]:
        """Loads tables at the same time; returns those that need another snapshot."""
        again: list[MirrorTable] = []

        def one(table: MirrorTable) -> None:
            if stop.is_set():
                return
            self._spark.addTag(JOB_TAG)
            try:
                self._load_table(table, pair, stop)
                table.error = ""
            except (SnapshotGone, Rewritten, Altered) as error:
                table.error = str(error)
                again.append(table)
            report()

        with ThreadPoolExecutor(self._config.snapshot.connections, thread_name_prefix="pgtide-load") as pool:
            futures = {pool.submit(one, table): table for table in tables}
            wait(futures)
            for future, table in futures.items():
                error = None if stop.is_set() else future.exception()
                if error is not None and (not isinstance(error, Exception) or isinstance(error, LogError)):
                    raise error
                if error is not None:
                    table.error = str(error)
        return again

    def _load_table(self, table: MirrorTable, pair: _Pair, stop: threading.Event) -> None:
        for _ in range(_CONFLICTS_MAX):
            try:
                self._load_once(table, pair, stop)
                return
            except Conflict as conflict:
                last = conflict
        raise TableError(f"{table.target}: others keep changing it while it is loaded ({last.what}).")

    def _load_once(self, table: MirrorTable, pair: _Pair, stop: threading.Event) -> None:
        version = self._sink.recorded(table.target)
        if version is not None:
            check_ours(version, self._applier.log_id)
            if version.mark is not None and version.mark.offset is not None:
                table.version, table.clean_to = version, version.mark.offset
                return
        server = Server(self._config.source.dsn, pair.offer.server_started)
        with server.connect(timeout_s=self._config.source.connect_timeout_seconds) as connection:
            source = self._as_of(connection, table, pair)
            table.shape = source.shape
            layout = layout_for(source.shape, version)
            version = version or self._sink.create(table.target, layout.columns, layout.properties)
            version = self._sink.evolve(version, layout.columns, layout.properties, layout.alterations)
            source = replace(source, columns=layout.columns)
            table.version = version = self._begun(connection, source, version, pair)
            reach(TABLE_BEGUN)
            for group in self._groups(missing(cut(connection, source), _loaded_ranges(version))):
                if stop.is_set():
                    return
                table.version = version = self._append(connection, source, version, group)
                reach(RANGE_APPENDED)
        offset = self._applier.reader().position_after(pair.offer.lsn)
        closed = Mark(self._applier.log_id, table.shape.fingerprint, offset, load=pair.load)
        table.version = self._sink.append(version, None, closed)
        table.clean_to = offset
        reach(TABLE_CLOSED)

    def _as_of(self, connection: Connection, table: MirrorTable, pair: _Pair) -> SourceTable:
        publications = publication_names(self._config.source)
        offer, oid = pair.offer, table.shape.relation_oid
        return source_table(connection, oid, offer.name, offer.server_started, publications)

    def _begun(self, connection: Connection, source: SourceTable, version: Version, pair: _Pair) -> Version:
        """The table as one that is loading under this pair, with what could be kept of another."""
        mark = version.mark
        if mark is not None and mark.load == pair.load:
            return version
        loading = Mark(self._applier.log_id, source.shape.fingerprint, load=pair.load)
        if mark is not None and version.loaded_ranges:
            try:
                carried = self._carried_over(connection, source, version, loading, pair)
                reach(CARRIED_OVER)
                return carried
            except StartAgain:
                pass
        return self._sink.replace(version, None, loading)

    def _carried_over(
        self, connection: Connection, source: SourceTable, version: Version, loading: Mark, pair: _Pair
    ) -> Version:
        assert version.mark is not None
        name, loaded = source.shape.qualified_name, _loaded_ranges(version)
        if version.mark.shape != source.shape.fingerprint:
            raise StartAgain(f"{name} was altered")
        if not loaded:
            raise StartAgain(f"{name}: it is not known what is loaded")
        before = parse_lsn((version.mark.load or "").rpartition("@")[2])
        slices = changes_between(self._applier.reader(), source.shape, before, pair.offer.lsn)
        keys = changed_keys(self._spark, self._applier.reader(), self._log_location, source.shape, slices)
        with errors_of_workers(name):
            rows = KeyReader(self._spark, self._config, source, loaded).rows(connection, keys)
            mark = replace(loading, ranges=tuple(part.name for part in loaded))
            if rows is None:
                return self._sink.append(version, None, mark)
            key = tuple(column.name for column in source.shape.key_columns)
            return self._sink.upsert(version, Changes(rows, key), mark)

    def _groups(self, ranges: list[CtidRange]) -> list[list[CtidRange]]:
        """Ranges that are committed together: a few for each connection, which reads them one after the other."""
        count = _RANGES_PER_CONNECTION * self._config.snapshot.connections
        return [ranges[start : start + count] for start in range(0, len(ranges), count)]

    def _append(self, connection: Connection, source: SourceTable, version: Version, group: list[CtidRange]) -> Version:
        assert version.mark is not None
        mark = replace(version.mark, ranges=tuple(part.name for part in group))
        here = rows_here(connection, source, group)
        if here is not None:
            rows = frame_of(self._spark, here, source.columns) if here.num_rows else None
            return self._sink.append(version, rows, mark)
        with errors_of_workers(source.shape.qualified_name):
            layout = self._sink.file_layout(version)
            if layout is None:
                return self._sink.append(version, rows_by_executors(self._spark, self._config, source, group), mark)
            files = files_by_executors(self._spark, self._config, source, group, layout)
            return self._sink.append_files(version, files, mark)


def _loaded_ranges(version: Version | None) -> list[CtidRange]:
    """In as few ranges as can be; one whose name is not understood is as if it were not there."""
    names = version.loaded_ranges if version else ()
    return together(part for part in map(parse_range, names) if part is not None)

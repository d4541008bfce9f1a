"""The load of one table under one pair of snapshot and LSN: begin it, read what is missing, close it.

Every step is a commit of the mirror table that says how far the load is, so this can end anywhere and begin again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.errors import LogRangeError, TableError, TransientError
from pgtide.failpoints import declare, reach
from pgtide.log.control import SnapshotOffer, TableHistory
from pgtide.lsn import format_lsn, parse_lsn
from pgtide.replication.connect import Connection
from pgtide.replication.publication import publication_names
from pgtide.replication.server import OtherServerError, Server
from pgtide.replication.slot import Snapshot
from pgtide.sinks import Changes, Conflict, Mark, Sink, Version
from pgtide.sinks.iceberg_marks import check_ours
from pgtide.snapshot.copy_range import (
    Altered,
    Cancelled,
    Locked,
    ReadLimits,
    Rewritten,
    SnapshotGone,
    StartAgain,
    limit_waiting_for_locks,
)
from pgtide.snapshot.ctid_ranges import CtidRange, missing, parse_range, together
from pgtide.snapshot.lock_watch import LockWatch, MakingWay
from pgtide.snapshot.table_ranges import cut, file_blocks, partition_files, table_bytes
from pgtide.spark.apply import Applier, MirrorTable
from pgtide.spark.connection_limit import ConnectionLimit
from pgtide.spark.gap import has_gap
from pgtide.spark.keys import check_key_types
from pgtide.spark.new_pair import KeyReader, changed_keys, changes_between
from pgtide.spark.range_files import files_by_executors
from pgtide.spark.source_rows import errors_of_workers, rows_by_executors, rows_here, source_table
from pgtide.spark.source_table import SourceTable
from pgtide.spark.targets import layout_for

_RANGES_PER_CONNECTION = 4  # a commit costs as much as reading 16 MiB; what a kill loses is no more than one group
_CONFLICTS_MAX = 10
_ATTEMPTS_MAX = 3  # then the table is parked, and tried again later
_RETRY_S = 1.0

TABLE_BEGUN = declare("load.table.begun", "a table that is to be loaded exists, it has no rows yet")
RANGE_APPENDED = declare("load.range.appended", "some ranges of a table are loaded, others are not")
CARRIED_OVER = declare("load.carried.over", "what is loaded of a table was brought to a new snapshot")
TABLE_CLOSED = declare("load.table.closed", "a table is loaded and its offset set")


@dataclass(frozen=True, slots=True)
class Pair:
    """The snapshot and the place in the stream that agree, and how a commit names them."""

    offer: SnapshotOffer

    @property
    def load(self) -> str:
        return f"{self.offer.name}@{format_lsn(self.offer.lsn)}"

    def server(self, config: Config) -> Server:
        return Server(config.source.read_dsn(standby=self.offer.standby), self.offer.server_started)


@dataclass(frozen=True, slots=True)
class Means:
    """What the loads of several tables share."""

    spark: SparkSession
    config: Config
    applier: Applier
    sink: Sink
    connections: ConnectionLimit


class TableLoad:
    def __init__(
        self,
        means: Means,
        table: MirrorTable,
        history: TableHistory | None,
        rewritten_lsn: int,
        pair: Pair,
        watch: LockWatch,
        stop: threading.Event,
    ) -> None:
        """`rewritten_lsn`: before this, values of the table were changed that nothing was sent of; 0: never."""
        self._means = means
        self._table = table
        self._history = history
        self._rewritten_lsn = rewritten_lsn
        self._pair = pair
        self._watch = watch
        self._stop = stop
        self._sink = means.sink
        self._log_id = means.applier.log_id
        self._leaf_files: set[tuple[int, int]] = set()  # of the partitions that the table is cut into

    def run(self) -> None:
        """Loads what is missing of the table, unless it is stopped.  Raises what keeps it from being loaded so."""
        conflicts, loaded = 0, frozenset[str]()
        while True:
            try:
                with self._means.connections.sharing():
                    self._run_once()
                return
            except Conflict as conflict:
                now = self._table.version.loaded_ranges if self._table.version else frozenset()
                conflicts, loaded = (conflicts + 1 if now == loaded else 1), now
                if conflicts == _CONFLICTS_MAX:
                    what = f"{self._table.target}: others keep changing it while it is loaded ({conflict.what})."
                    raise TableError(what) from conflict

    def _run_once(self) -> None:
        table = self._table
        version = self._sink.recorded(table.target)
        if version is not None:
            check_ours(version, self._log_id)
            if version.mark is not None and version.mark.offset is not None and not self._lacks_changes(version.mark):
                table.version, table.clean_to = version, version.mark.offset
                return
        with self._means.connections.take(), self._connected() as connection:
            source = self._as_of_the_snapshot(connection)
        table.shape = source.shape
        check_key_types(source.shape, loading=True)
        try:
            layout = layout_for(source.shape, version)
        except TableError as error:
            if table.beside_of is not None and table.beside_of.goes_on:
                raise self._altered() from error
            raise
        version = version or self._sink.create(table.target, layout.columns, layout.properties)
        if not layout.properties.items() <= version.properties.items():
            if table.beside_of is not None and table.beside_of.goes_on:
                raise self._altered()
            version = self._sink.evolve(version, layout.columns, layout.properties, layout.alterations)
        source = replace(source, columns=layout.columns)
        table.version = self._begun(source, version)
        reach(TABLE_BEGUN)
        with self._means.connections.take(), self._connected() as connection:
            parts = cut(connection, source, self._means.config.snapshot.range_bytes)
            length_bytes = table_bytes(connection, source)
        self._leaf_files = {
            (part.relation_oid, part.file) for part in parts if part.relation_oid != source.shape.relation_oid
        }
        left = missing(parts, loaded_ranges(table.version))
        table.progress.begin(table.name, length_bytes, len(parts) - len(left), len(parts), table.version.rows)
        self._read(source, left)
        if not left and not self._stop.is_set():
            table.version = self._sink.append(table.version, None, self._closing(source))
        mark = table.version.mark
        if mark is not None and mark.offset is not None:
            table.clean_to = mark.offset
            table.progress.end()
            reach(TABLE_CLOSED)

    def _altered(self) -> Altered:
        """Columns are shared: the table itself must alter them, at the place of the alteration among its changes."""
        return Altered(f"{self._table.name} was altered.", remedy="It is loaded when its mirror has followed that.")

    def _closing(self, source: SourceTable) -> Mark:
        """The mark of the commit that completes the load.

        Partitions that have come or gone since it began send nothing: what they had must not be in the table.
        """
        with self._connected() as connection:
            if partition_files(connection, source) != self._leaf_files:
                raise Rewritten(f"Partitions of {self._table.name} have changed while it was read.")
        try:
            offset = self._means.applier.reader().position_after(self._pair.offer.lsn)
        except LogRangeError as error:
            raise SnapshotGone(f"{self._table.name}: {error.what}", remedy="It is loaded anew.") from error
        return Mark(self._log_id, source.shape.fingerprint, offset, load=self._pair.load)

    def _lacks_changes(self, mark: Mark) -> bool:
        """Whether changes since what is loaded was read are not in the log: nothing can bring it up to date."""
        return has_gap(mark, self._history, self._means.applier.reader().identity.start_lsn)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        config = self._means.config
        try:
            connection = self._pair.server(config).connect(timeout_s=config.source.connect_timeout_seconds)
        except OtherServerError as error:
            raise SnapshotGone(error.what, remedy=error.remedy) from error
        with connection:
            limit_waiting_for_locks(connection)
            yield connection

    def _as_of_the_snapshot(self, connection: Connection) -> SourceTable:
        offer, oid, config = self._pair.offer, self._table.shape.relation_oid, self._means.config
        publications = publication_names(config.source)
        snapshot = Snapshot(offer.name, offer.contents, offer.server_started)
        source = source_table(connection, oid, snapshot, publications)
        limits = ReadLimits(config.snapshot.statement_timeout_seconds, self._watch.reader_name(oid))
        return replace(source, standby=offer.standby, limits=limits)

    def _begun(self, source: SourceTable, version: Version) -> Version:
        """The table as one that is loading under this pair, with what could be kept of another."""
        mark = version.mark
        if mark is not None and mark.load == self._pair.load:
            return version
        loading = Mark(self._log_id, source.shape.fingerprint, load=self._pair.load)
        if version.snapshot_id is None:
            return replace(version, mark=loading)  # nothing to be told apart from: the first ranges bring the mark
        if mark is not None and version.loaded_ranges and not self._lacks_changes(mark):
            try:
                carried = self._carried_over(source, version, loading)
                reach(CARRIED_OVER)
                return carried
            except StartAgain:
                pass
        return self._sink.replace(version, None, loading)

    def _carried_over(self, source: SourceTable, version: Version, loading: Mark) -> Version:
        assert version.mark is not None
        means, name, loaded = self._means, source.shape.qualified_name, loaded_ranges(version)
        if version.mark.shape != source.shape.fingerprint:
            raise StartAgain(f"{name} was altered")
        if not loaded:
            raise StartAgain(f"{name}: it is not known what is loaded")
        before = parse_lsn((version.mark.load or "").rpartition("@")[2])
        if self._rewritten_lsn > before or means.config.source.origin == "none":
            raise StartAgain(f"{name}: rows have changed that are not in the log")
        reader = means.applier.reader()
        try:
            slices = changes_between(reader, source.shape, before, self._pair.offer.lsn)
            keys = changed_keys(means.spark, reader, means.config.log_location, source.shape, slices)
        except LogRangeError as error:
            raise StartAgain(f"{name}: {error.what}") from error
        mark = replace(loading, ranges=tuple(part.name for part in loaded))
        with means.connections.take(means.config.snapshot.connections) as count, errors_of_workers(name):
            keyed = KeyReader(means.spark, means.config, source, loaded, count)
            with self._connected() as connection:
                rows = keyed.rows(connection, keys)
            if rows is None:
                return self._sink.append(version, None, mark)
            key = tuple(column.name for column in source.shape.key_columns)
            return self._sink.upsert(version, Changes(rows, key), mark)

    def _read(self, source: SourceTable, ranges: list[CtidRange]) -> None:
        """Reads ranges over as many connections as there are left, a few for each, until all are in the table."""
        waiting, failures, way = deque(ranges), 0, MakingWay(self._watch, source.shape.relation_oid)
        while waiting and not self._stop.is_set():
            way.begin()
            with self._means.connections.take(len(waiting)) as count:
                group = [waiting.popleft() for _ in range(min(len(waiting), count * _RANGES_PER_CONNECTION))]
                try:
                    self._append(source, group, count, is_last=not waiting)
                    failures = 0
                    way.done()
                    continue
                except (SnapshotGone, Conflict, Locked):
                    raise  # also for a lock, which has been waited for: the other tables wait for this one
                except Cancelled:
                    if not way.made_way():
                        group = self._halved(source, group, must=True)
                    else:
                        self._table.progress.made_way()
                        group = self._halved(source, group, must=False) if way.too_often else group
                except TransientError:
                    failures += 1
                    if failures == _ATTEMPTS_MAX:
                        raise
            waiting.extendleft(reversed(group))
            self._stop.wait(_RETRY_S)

    def _append(self, source: SourceTable, group: list[CtidRange], connections: int, *, is_last: bool) -> None:
        version = self._table.version
        assert version is not None
        assert version.mark is not None
        loading, names = version.mark, tuple(part.name for part in group)
        spark, config, here = self._means.spark, self._means.config, None

        def mark() -> Mark:
            """To be asked for when the rows are read."""
            return replace(self._closing(source) if is_last else loading, ranges=names)

        if len(group) == 1:
            with self._connected() as connection:
                here = rows_here(connection, source, group)
        with errors_of_workers(source.shape.qualified_name):
            layout = self._sink.file_layout(version)
            if here is not None:
                version = self._sink.append(version, here, mark())
            elif layout is None:
                # Read while it is written: what closes the table is a commit of its own.
                rows = rows_by_executors(spark, config, source, group, connections)
                version = self._sink.append(version, rows, replace(loading, ranges=names))
                if is_last:
                    version = self._sink.append(version, None, self._closing(source))
            else:
                files = files_by_executors(spark, config, source, group, layout, connections)
                version = self._sink.append_files(version, files, mark())
        self._table.version = version
        if not is_last:
            reach(RANGE_APPENDED)
        self._table.progress.loaded(len(group), version.rows)

    def _halved(self, source: SourceTable, group: list[CtidRange], *, must: bool) -> list[CtidRange]:
        """Ranges of half the size, because reading these took too long, or longer than others leave the table alone."""
        smaller: list[CtidRange] = []
        for part in group:
            with self._connected() as connection:
                about_blocks = file_blocks(connection, part.relation_oid) - part.first_block
            smaller += part.halves(about_blocks) or [part]
        if len(smaller) == len(group) and must:
            limit_s = self._means.config.snapshot.statement_timeout_seconds
            raise TableError(
                f"{source.shape.qualified_name}: reading a single block takes longer than {limit_s:g} s.",
                remedy="Raise snapshot.statement_timeout_seconds.",
            )
        self._table.progress.cut_further(len(smaller) - len(group))
        return smaller


def loaded_ranges(version: Version | None) -> list[CtidRange]:
    """In as few ranges as can be; one whose name is not understood is as if it were not there."""
    names = version.loaded_ranges if version else ()
    return together(part for part in map(parse_range, names) if part is not None)

"""The data source `pgtide`: changes as rows, typed for one table or in one form for all, in a batch or as a stream.

Planning reads block directories only; a partition is a run of byte ranges, and executors turn those into Arrow batches.
They need the log's path, and nothing of Postgres.  A stream's offset is {"log": id, "offset": next to read, "initial":
where the query began}.  An offset of another log is refused, because its numbers mean other rows.  `initial` is there
for the first batch: Spark writes down where it ends, but not where it begins, and asks again when it runs it again.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pgtide.config import is_url
from pgtide.errors import ConfigurationError, LogRangeError, TableError
from pgtide.log.reader import LogReader, LogRows, Slice
from pgtide.schema import TableShape
from pgtide.spark.debezium_view import DebeziumView
from pgtide.spark.named_table import NamedTable
from pgtide.spark.options import SourceOptions, parse_options
from pgtide.spark.positions import Position, resolve_position
from pgtide.spark.registration import register_reader
from pgtide.spark.rows import TypeChanged
from pgtide.spark.views import AllTablesView, TypedView, View
from pgtide.spark.worker_process import end_quietly

_PARTITION_BYTES = 32 << 20
_LATEST_FOR_S, _LATEST_ON_STORE_FOR_S = 0.05, 0.5
_log = logging.getLogger("pgtide")


@dataclass(frozen=True)
class SlicePartition(InputPartition):
    """A run of slices, read one after the other by one task."""

    slices: tuple[Slice, ...]
    shapes_end: Mapping[str, int]  # by fingerprint, up to where all that was planned has it


class PgtideSource(DataSource):
    """Made in a Python process beside the driver, then pickled to wherever it is needed: holds values only."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._options = parse_options(dict(options))
        log = LogReader(self._options.path)
        table = self._options.table
        self._table = None if table is None else NamedTable(log, table, self._options.ending_offsets)
        self._view = _view(self._options, log, None if self._table is None else self._table.shape)

    @classmethod
    def name(cls) -> str:
        return "pgtide"

    def schema(self) -> StructType:
        return self._view.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        self._options.check_for_batch()
        self._check_schema(schema)
        return ChangeReader(self._options, self._view, self._table)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        self._options.check_for_stream()
        self._check_schema(schema)
        return ChangeStreamReader(self._options, self._view, self._table)

    def _check_schema(self, schema: StructType) -> None:
        own = [(field.name, field.dataType) for field in self.schema()]
        if [(field.name, field.dataType) for field in schema] != own:
            raise ConfigurationError(
                f"pgtide: the schema given for {self._options.table or 'all tables'} is not the source's.",
                remedy="Leave .schema(…) out: the log knows the columns.",
            )


def _view(options: SourceOptions, log: LogReader, shape: TableShape | None) -> View:
    if options.envelope == "debezium":
        return DebeziumView(shape, options.policy, log.identity.database, log.identity.log_id)
    if shape is None:
        return AllTablesView(options.policy)
    return TypedView(shape, options.include_preimage, options.policy)


class ChangeReader(DataSourceReader):
    """One range, fixed when the query is planned."""

    def __init__(self, options: SourceOptions, view: View, table: NamedTable | None) -> None:
        self._options = options
        self._view = view
        self._table = table

    def partitions(self) -> Sequence[InputPartition]:
        reader = LogReader(self._options.path)
        start, end = _start(reader, self._options, self._table), _end(reader, self._options, self._table)
        if start > end:
            raise ConfigurationError(
                f"pgtide: startingOffsets stands for offset {start}, endingOffsets for {end}, which comes before it.",
                remedy="Give an endingOffsets that is not before startingOffsets, or leave it out.",
            )
        return _partitions(reader, start, end, self._options, self._table)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._view, partition)

    def __getstate__(self) -> dict[str, Any]:
        # Travels to the executors: without what only planning needs.
        return {**self.__dict__, "_table": None}


class ChangeStreamReader(DataSourceStreamReader):
    """Lives as long as the query, in one Python process.  `commit` and `stop` are not to be relied on."""

    def __init__(self, options: SourceOptions, view: View, table: NamedTable | None) -> None:
        self._options = options
        self._view = view
        self._table = table
        self._log: LogReader | None = None
        self._initial: int | None = None  # where the query began; a restarted one learns it from its offsets
        self._reached: int | None = None  # where the last batch ended, as far as this process knows
        self._registered: int | None = None
        self._told_of_limit = False
        self._latest: tuple[float, int] = (float("-inf"), 0)

    def initialOffset(self) -> dict[str, Any]:
        """Asked for twice when a query begins, and again when it is restarted before its first batch was committed."""
        if self._initial is None:
            self._initial = _start(self._reader(), self._options, self._table)
        self._register(self._initial)
        return self._offset(self._initial)

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Polled every few milliseconds by a query without a trigger interval: the log is looked at less often.

        Up to Spark 4.1 there is no `start`.  A restarted query plans its last batch again, or an empty one that ends
        there, before it asks for more: so a process that has planned nothing yet serves a query that begins.
        """
        if start is not None:
            self._initial, self._reached = start.get("initial"), self._checked(start)
        if self._reached is None:
            self._reached = self._checked(self.initialOffset())
        since, latest = self._latest
        if time.monotonic() - since > (_LATEST_ON_STORE_FOR_S if is_url(self._options.path) else _LATEST_FOR_S):
            latest = self._reader().end().end_offset
            self._latest = (time.monotonic(), latest)
        offset = self._limited(self._reached, latest)
        if offset < latest and not self._told_of_limit:
            # Spark 4.1 does not let a Python source know the trigger, nor ask it a second time under this one.
            self._told_of_limit = True
            _log.warning(
                "this batch ends at offset %d of %d (maxRowsPerTrigger, maxBytesPerTrigger): under availableNow Spark "
                "ends the query there; leave the option out, or start the query again until the end is reached",
                offset,
                latest,
            )
        return self._offset(offset)

    def _limited(self, reached: int, latest: int) -> int:
        rows, nbytes = self._options.max_rows_per_trigger, self._options.max_bytes_per_trigger
        if nbytes is None and (rows is None or latest - reached <= rows):
            return latest
        log = self._reader()
        # What retention took is missed when the batch is planned, with its error or without.
        return log.boundary(max(reached, min(log.first_offset(), latest)), rows or sys.maxsize, nbytes or sys.maxsize)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = self._checked(start), self._checked(end)
        if first > last:
            raise LogRangeError(
                f"The checkpoint is at offset {first}, and the log in {self._options.path} ends at "
                f"{self._reader().end().end_offset}: it may be an older copy, whose offsets will be other changes.",
                remedy="Bring the log back, or start the query with a new checkpointLocation.",
            )
        self._initial, self._reached = end.get("initial"), last
        # A restarted query first shows the offset that it saw last, as an empty range, whatever it will do then.
        if first < last:
            self._register(first)
        return _partitions(self._reader(), first, last, self._options, self._table)

    def _register(self, offset: int) -> None:
        """Before anything is looked for: what is there then, retention leaves.

        That a batch begins says that all before it is done; `commit` and `stop` say less, and later or never.
        """
        if self._options.reader_name is not None and offset != self._registered:
            register_reader(self._reader(), self._options.reader_name, offset)
            self._registered = offset

    def stop(self) -> None:
        end_quietly()

    def commit(self, end: dict[str, Any]) -> None:
        if self._reached is None:
            self._reached = self._checked(end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._view, partition)

    def __getstate__(self) -> dict[str, Any]:
        # Travels to the executors with each batch: without what is cached here, and what only planning needs.
        return {**self.__dict__, "_log": None, "_table": None}

    def _reader(self) -> LogReader:
        if self._log is None:
            self._log = LogReader(self._options.path)
        return self._log

    def _offset(self, offset: int) -> dict[str, Any]:
        found = {"log": self._reader().identity.log_id, "offset": offset, "initial": self._initial}
        name = self._options.reader_name  # for `reader_progress`, which has nothing else to go by
        return found if name is None else {**found, "reader": name, "path": self._options.path}

    def _checked(self, offset: dict[str, Any]) -> int:
        log_id = self._reader().identity.log_id
        if offset.get("log") != log_id:
            raise LogRangeError(
                f"The checkpoint belongs to another log ({offset.get('log')}) than {self._options.path} ({log_id}).",
                remedy="Start the query with a new checkpointLocation, or give the path of the log it was started on.",
            )
        return int(offset["offset"])


def _start(reader: LogReader, options: SourceOptions, table: NamedTable | None) -> int:
    return _resolve(reader, "startingOffsets", options.starting_offsets, options, table)


def _end(reader: LogReader, options: SourceOptions, table: NamedTable | None) -> int:
    return _resolve(reader, "endingOffsets", options.ending_offsets, options, table)


def _resolve(
    reader: LogReader, option: str, position: Position, options: SourceOptions, table: NamedTable | None
) -> int:
    """Where retention took what begins there: an error, or the first change that is left (failOnDataLoss)."""
    try:
        return resolve_position(reader, option, position)
    except LogRangeError as error:
        taken = table is None or table.has_lost_changes(reader)
        if taken and options.fail_on_data_loss:
            raise
        first = reader.first_offset()
        if taken:
            _log.warning("%s: %s; going on at offset %d (failOnDataLoss)", option, error.what, first)
        return first


def _partitions(
    reader: LogReader, start: int, end: int, options: SourceOptions, table: NamedTable | None
) -> list[SlicePartition]:
    def plan(begin: int) -> list[Slice]:
        return reader.plan(begin, end) if table is None else table.plan(reader, begin, end)

    try:
        slices = plan(start)
    except LogRangeError:
        first = min(reader.first_offset(), end)
        if options.fail_on_data_loss or first <= start:
            raise
        _log.warning(
            "offsets %d to %d of %s are gone; going on at %d (failOnDataLoss)", start, first, options.path, first
        )
        slices = plan(first)
    wanted_bytes = sum(piece.nbytes for piece in slices) // options.min_partitions + 1
    runs = runs_of_slices(_cut(slices, options.min_partitions), min(_PARTITION_BYTES, wanted_bytes))
    # Of no partitions Spark would make one of its own, without slices.
    shapes_end = {} if table is None else {piece.entry.fingerprint: piece.entry.last_offset + 1 for piece in slices}
    return [SlicePartition(tuple(run), shapes_end) for run in runs or [[]]]


def _cut(slices: Sequence[Slice], least: int) -> list[Slice]:
    """At least so many slices, if there are rows for it: each is cut by offsets, and its block read by each part."""
    if not slices or len(slices) >= least:
        return list(slices)
    parts = -(-least // len(slices))
    cut = []
    for piece in slices:
        low, high = max(piece.start, piece.entry.first_offset), min(piece.end, piece.entry.last_offset + 1)
        bounds = [low + (high - low) * part // parts for part in range(parts + 1)]
        cut += [replace(piece, start=start, end=end) for start, end in itertools.pairwise(bounds) if start < end]
    return cut


def runs_of_slices(slices: Sequence[Slice], run_bytes: int) -> list[list[Slice]]:
    """Cuts slices into runs of about `run_bytes`, in order."""
    runs: list[list[Slice]] = []
    length_bytes = run_bytes
    for piece in slices:
        if length_bytes >= run_bytes:
            runs.append([])
            length_bytes = 0
        runs[-1].append(piece)
        length_bytes += piece.nbytes
    return runs


def _read(options: SourceOptions, view: View, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, SlicePartition)
    reader = worker_reader(options.path)
    for piece in partition.slices:
        found = reader.read(piece)
        if not found.rows.num_rows:
            continue
        try:
            rows = view.rows(found)
        except TypeChanged as change:
            end = partition.shapes_end.get(piece.entry.fingerprint, piece.entry.last_offset + 1)
            raise _unreadable(found, change, end) from None
        yield rows


def _unreadable(found: LogRows, change: TypeChanged, end: int) -> TableError:
    return TableError(
        f"{found.shape.qualified_name} at offset {found.rows['_offset'][0]}: {change}.",
        remedy="If the query was started before the type was changed, start it again, a stream with the same "
        "checkpointLocation: it takes the types of now. Else read the changes with the other type as a batch, "
        f'.option("endingOffsets", "{end}"), and go on behind them, .option("startingOffsets", "{end}"), a stream with '
        "a new checkpointLocation; or leave the option table out: changes of all tables come as JSON.",
    )


@lru_cache(maxsize=4)
def worker_reader(path: str) -> LogReader:
    """One reader per log and worker process: workers are reused, and so is what the reader remembers."""
    return LogReader(path)

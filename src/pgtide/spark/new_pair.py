"""Going on with a half-loaded table under a new pair (S', L') of snapshot and LSN, when the old pair (S, L) is gone.

What is loaded is made to be as of S': every key that changed in (L, L'], which the log tells, is taken out, and put in
again as it is in S', if it is now in one of the loaded ranges; if it is in another, it comes with that one.  All other
rows of the loaded ranges are in S' as they were in S, at the same place.  The missing ranges are then read under S',
and changes apply from L' on: from L on they would meet rows that are newer than they expect.

One commit does that and names the new pair and the loaded ranges, so a load that is killed has either pair whole.

A table without key starts again; so does one that was truncated, rewritten or altered in between, or whose changes
since L are no longer in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from pgtide.change import Op
from pgtide.config import Config
from pgtide.errors import LogRangeError
from pgtide.log.reader import LogReader, LogRows, Slice
from pgtide.replication.connect import Connection
from pgtide.schema import TableShape
from pgtide.snapshot.copy_range import Rewritten, StartAgain, check_files, leaves_under_snapshot
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.snapshot.table_ranges import leaves
from pgtide.spark.apply import DRIVER_BYTES, DRIVER_ROWS
from pgtide.spark.fold import moved_rows, together
from pgtide.spark.keyed_rows import KeyedTable, key_types, read_keys
from pgtide.spark.keys import UnusableKey, check_keys
from pgtide.spark.rows import arrow_schema, frame_of
from pgtide.spark.source import runs_of_slices, worker_reader
from pgtide.spark.source_table import SourceReference, SourceTable
from pgtide.types.stored import stored_text

_RUN_BYTES = 8 << 20


def changes_between(reader: LogReader, shape: TableShape, after_lsn: int, up_to_lsn: int) -> list[Slice]:
    """The table's changes in (after_lsn, up_to_lsn]; the log must have reached `up_to_lsn`."""
    name = shape.qualified_name
    if not shape.key_columns:
        raise StartAgain(f"{name} has no key")
    if up_to_lsn < after_lsn:
        raise StartAgain(f"{name}: the new snapshot is older than the one before")
    try:
        start, end = reader.position_after(after_lsn), reader.position_after(up_to_lsn)
        slices = reader.plan(start, end, shape.relation_oid)
    except LogRangeError as error:
        raise StartAgain(f"{name}: {error.what}") from error
    if any(piece.entry.fingerprint != shape.fingerprint for piece in slices):
        raise StartAgain(f"{name} was altered")
    return slices


def changed_keys(
    spark: SparkSession, reader: LogReader, log_location: str, shape: TableShape, slices: list[Slice]
) -> pa.Table | DataFrame:
    """The distinct keys that were changed, each column as text; worked out by executors if there are many."""
    if sum(piece.entry.rows for piece in slices) <= DRIVER_ROWS and sum(p.nbytes for p in slices) <= DRIVER_BYTES:
        return distinct_keys(shape, (reader.read(piece) for piece in slices))
    runs = [tuple(run) for run in runs_of_slices(slices, _RUN_BYTES)]

    def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                found = (worker_reader(log_location).read(piece) for piece in runs[number])
                yield from distinct_keys(shape, found).to_batches()

    return spark.range(0, len(runs), 1, len(runs)).mapInArrow(look, _key_schema(shape)).distinct()


def distinct_keys(shape: TableShape, pieces: Iterable[LogRows]) -> pa.Table:
    """The keys of these changes, new and old ones."""
    names = [column.storage_name for column in shape.key_columns]
    keys: set[tuple[str, ...]] = set()
    for piece in pieces:
        table = together(shape, [(piece.shape, piece.rows)])
        ops = np.asarray(table.column("_op").to_numpy(), np.int64)
        if (ops == Op.TRUNCATE).any():
            raise StartAgain(f"{shape.qualified_name} was truncated")
        try:
            check_keys(shape, table)
        except UnusableKey as error:
            # It may have gone since, and nothing loaded has it: a load refuses it too.
            raise StartAgain(error.what) from error
        rows = np.flatnonzero(np.isin(ops, (Op.INSERT, Op.UPDATE, Op.DELETE)))
        keys.update(_texts(shape, table.select(names).take(rows)))
        moved = np.flatnonzero(moved_rows(table, ops, names))
        if len(moved):
            keys.update(_texts(shape, table.select([f"_old.{name}" for name in names]).take(moved)))
    columns = list(zip(*keys, strict=True)) or [()] * len(names)
    return pa.Table.from_arrays([pa.array(c, pa.string()) for c in columns], schema=arrow_schema(_key_schema(shape)))


def _texts(shape: TableShape, keys: pa.Table) -> Iterator[tuple[str, ...]]:
    columns = [
        [stored_text(column.type, value) for value in values.to_pylist()]
        for column, values in zip(shape.key_columns, keys.columns, strict=True)
    ]
    return zip(*columns, strict=True)


def _key_schema(shape: TableShape) -> StructType:
    return StructType([StructField(f"k{place}", StringType()) for place in range(len(shape.key_columns))])


class KeyReader:
    """Reads the changed keys of one table under the new snapshot."""

    def __init__(
        self, spark: SparkSession, config: Config, source: SourceTable, loaded: list[CtidRange], connections: int
    ) -> None:
        self._spark = spark
        self._config = config
        self._source = source
        self._loaded = tuple(loaded)
        self._connections = connections

    def table(self, connection: Connection) -> KeyedTable:
        """Where to look; what was loaded must still be part of the table, and in the same files."""
        name, present = self._source.shape.qualified_name, leaves(connection, self._source)
        if {part.relation_oid for part in self._loaded} - set(present):
            raise StartAgain(f"{name}: a partition is gone")
        with leaves_under_snapshot(connection, self._source, present):
            try:
                check_files(connection, self._loaded)
            except Rewritten:
                raise StartAgain(f"{name} was truncated or rewritten") from None
            types = key_types(connection, self._source.shape)
        return KeyedTable(self._source, types, tuple(present), self._loaded)

    def rows(self, connection: Connection, keys: pa.Table | DataFrame) -> DataFrame | None:
        """A row for each key, or its deletion; None if there are no keys."""
        table = self.table(connection)
        if isinstance(keys, DataFrame):
            return self._by_executors(table, keys)
        if keys.num_rows == 0:
            return None
        batches: list[pa.RecordBatch] = []
        length_bytes = 0
        for batch in read_keys(connection, table, keys):
            batches.append(batch)
            length_bytes += batch.nbytes
            if length_bytes > DRIVER_BYTES:
                return self._by_executors(table, frame_of(self._spark, keys, _key_schema(self._source.shape)))
        rows = pa.Table.from_batches(batches, arrow_schema(table.columns))
        return frame_of(self._spark, rows, table.columns)

    def _by_executors(self, table: KeyedTable, keys: DataFrame) -> DataFrame:
        timeout_s = self._config.source.connect_timeout_seconds
        source = self._source
        reference = SourceReference(str(self._config.file), timeout_s, source.snapshot.server_started, source.standby)

        def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with reference.open() as own:
                for batch in batches:
                    yield from read_keys(own, table, pa.Table.from_batches([batch]))

        return keys.repartition(self._connections).mapInArrow(read, table.columns)

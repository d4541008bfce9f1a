"""Applying changes to one mirror table: from what it has recorded up to a given offset, exactly once.

Few rows are read and folded here in the driver and handed to Spark as one small Arrow table, which is about twice as
fast as a job for reading; many are read and folded by executors (`wide_fold`).  Either way at most one row per key
reaches the sink, and changes of one shape at a time (`parts`): where the shape changes, the table is altered first.
A write is a compare-and-swap: on a conflict everything is worked out again from what the table then records.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, StructField, StructType

from pgtide import config
from pgtide.errors import TableError
from pgtide.log.load_progress import LoadProgress
from pgtide.log.reader import LogReader, LogRows, Slice
from pgtide.schema import TableShape
from pgtide.sinks import Alterations, Changes, Conflict, Mark, Sink, Version
from pgtide.sinks.bounds import Bounds
from pgtide.sinks.iceberg_marks import check_ours
from pgtide.sinks.merge import DELETED
from pgtide.sinks.multiset import net_rows, rows_that_come
from pgtide.spark.counted import counted_rows, counted_schema, has_rows_that_go, last_truncate
from pgtide.spark.fold import fold
from pgtide.spark.folded_rows import folded_schema, key_bounds, lake_rows
from pgtide.spark.parts import Part, fitting, has_untold, parts_by_shape
from pgtide.spark.rows import DEFAULT_POLICY, arrow_schema, frame_of
from pgtide.spark.source_rows import errors_of_workers
from pgtide.spark.targets import SOFT_DELETE, Layout, check_soft_delete, layout_for
from pgtide.spark.timings import READ, WRITE, Timings
from pgtide.spark.wide_fold import WideFold

DRIVER_ROWS = 50_000
DRIVER_BYTES = 16 << 20
_DECODED_BYTES = 16 * DRIVER_BYTES
_CONFLICTS_MAX = 10
JOB_TAG = "pgtide-mirror"  # on all Spark jobs of the mirror, so that they can be interrupted


@dataclass
class MirrorTable:
    """What the driver knows of one table.  `version` is a cache that the compare-and-swap checks."""

    shape: TableShape
    target: str
    version: Version | None = None
    clean_to: int = 0  # every change below this offset is in the table
    error: str = ""  # not empty: parked
    may_pass: bool = False  # parked by something that may be over by itself
    failures: int = 0
    retry_at_s: float = 0.0
    joining: bool = False  # it is being loaded while the others stream, or waits for that, or for its turn after it
    catching_up: bool = False  # it is loaded, or was parked for long, and applies what has come since
    removed: bool = False  # it is captured no more
    needs_from: int | None = None  # while it is loaded: its changes from this offset on must stay in the log
    load_error: str = ""  # why it could not be loaded anew
    load_failures: int = 0  # not zero: it is tried again
    reload_at_s: float = 0.0
    progress: LoadProgress = field(default_factory=LoadProgress)
    beside_of: MirrorTable | None = None  # this is what is loaded beside that table

    @property
    def name(self) -> str:
        return self.shape.qualified_name

    @property
    def mark(self) -> Mark | None:
        return self.version.mark if self.version else None

    @property
    def goes_on(self) -> bool:
        """Whether it applies its changes in their order, now or when what has parked it is over."""
        is_loading = self.joining and not self.catching_up
        return not (is_loading or self.removed or (self.error and not self.may_pass))

    @property
    def is_loaded(self) -> bool:
        """False for a table of which nothing is known, and for one whose first load is not finished."""
        return self.mark is not None and self.mark.offset is not None


class Applier:
    """Used by several threads at once, each with a table of its own."""

    def __init__(
        self, spark: SparkSession, sink: Sink, log_location: str, options: config.Mirror, *, loads: bool = False
    ) -> None:
        """`loads`: tables are loaded before changes are applied; otherwise they begin empty where the log begins."""
        self._spark = spark
        self._loads = loads
        self._options = options
        self._sink = sink
        self._log_location = log_location
        self._threads = threading.local()
        self.log_id = LogReader(log_location).identity.log_id
        self.timings = Timings()

    def apply(self, table: MirrorTable, to: int) -> None:
        """Brings the table to `to`; does nothing if it is there."""
        for _ in range(_CONFLICTS_MAX):
            try:
                self._apply_once(table, to)
                return
            except Conflict as conflict:
                table.version, last = None, conflict
        raise TableError(
            f"{table.target}: others keep changing it while it is written ({last.what}).",
            remedy="Let only one mirror, and no other writer, work on it.",
        )

    def reshape(self, table: MirrorTable, shape: TableShape, place: int) -> None:
        """Brings the table to a shape without rows of it; all changes before `place` are in the table."""
        version = table.version
        assert version is not None
        assert version.mark is not None
        if version.mark.shape == shape.fingerprint:
            return
        evolved, _ = self._evolve(table, version, shape, place)
        if evolved != version:
            # A version has the columns that the table had when it was written: one without rows takes the new ones.
            mark = replace(version.mark, shape=shape.fingerprint, offset=place)
            table.version = self._sink.append(evolved, None, mark)
            table.clean_to = place
        table.shape = shape

    def refresh(self, table: MirrorTable) -> Version:
        """Reads what the table itself records; refuses one that is not ours."""
        version = self._sink.recorded(table.target)
        if self._loads and (version is None or (version.mark is None and not version.has_rows)):
            # Dropped while it was written, or another's driver is about to load it: never to begin empty.
            raise TableError(f"{table.target} is gone, or not loaded.", remedy="It is loaded by itself.")
        if version is None:
            layout = layout_for(table.shape, None)
            version = self._sink.create(table.target, layout.columns, layout.properties)
        check_ours(version, self.log_id)
        if version.mark is not None and version.mark.load is not None and version.mark.offset is None:
            raise TableError(f"{table.target} is not loaded yet.", remedy="Let pgtide run finish its load.")
        if version.mark is None:
            # Nobody loaded it: it begins empty where the log begins.  If retention has taken changes of it since, it is
            # behind these, and parks as one that has not applied them.
            begin = Mark(self.log_id, table.shape.fingerprint, offset=0)
            version = self._sink.append(version, None, begin)
        version = self._with_soft_deletes(table, version)
        assert version.mark is not None
        assert version.mark.offset is not None
        table.version, table.clean_to = version, version.mark.offset
        return version

    def begin(self, table: MirrorTable) -> None:
        """Makes a table ready for changes that was loaded just now: its version is what the load has written."""
        if table.version is None or not table.is_loaded:
            self.refresh(table)
        else:
            table.version = self._with_soft_deletes(table, table.version)

    def _with_soft_deletes(self, table: MirrorTable, version: Version) -> Version:
        """Gives the table the column that soft deletes need.  Never at its creation: as a default, it is there also in
        rows that are written without it, by a load."""
        options = self._options.options_of(table.name)
        check_soft_delete(table.name, version, options)
        if not options.soft_delete or SOFT_DELETE in version.properties:
            return version
        mark = version.mark
        assert mark is not None
        column = StructType([StructField(DELETED, BooleanType())])
        alterations = Alterations(defaults={DELETED: False})
        version = self._sink.evolve(version, column, {SOFT_DELETE: "true"}, alterations)
        return self._sink.append(version, None, mark)

    def reader(self) -> LogReader:
        """One per thread: a reader remembers what it walked, and is not made for two threads."""
        if not hasattr(self._threads, "reader"):
            self._threads.reader = LogReader(self._log_location, reads=False)
        reader: LogReader = self._threads.reader
        return reader

    def _apply_once(self, table: MirrorTable, to: int) -> None:
        version = table.version if table.version and table.is_loaded else self.refresh(table)
        if table.clean_to >= to:
            return
        slices = self.reader().plan(table.clean_to, to, table.shape.relation_oid)
        for part in parts_by_shape(slices, to):
            with errors_of_workers(table.name):
                version = table.version = self._write(table, version, part)
            table.clean_to = part.end
        table.clean_to = to

    def _write(self, table: MirrorTable, version: Version, part: Part) -> Version:
        """Changes of one shape: the table gets that shape at their place in the order, then their rows."""
        recorded = version.mark
        assert recorded is not None
        table.shape = self.reader().shape(part.relation_oid, part.fingerprint)
        fingerprint, shape = part.fingerprint, table.shape
        if fingerprint != recorded.shape or has_untold(shape):
            fingerprint, shape = fitting(shape, recorded.shape, self.reader().shapes_of(part.relation_oid))
        version, layout = self._evolve(table, version, shape, part.start)
        recorded = version.mark
        assert recorded is not None
        count, length_bytes = sum(piece.entry.rows for piece in part.slices), sum(piece.nbytes for piece in part.slices)
        small = count <= DRIVER_ROWS and length_bytes <= DRIVER_BYTES
        read = self._fold_here if small else self._fold_wide
        with self.timings.of(READ):
            batch = read(shape, layout, part.slices)
        mark = replace(recorded, shape=fingerprint, offset=part.end, changes=recorded.changes + batch.changes)
        if batch.changes == 0:
            # All was rolled back with a savepoint.  Retention cannot tell that from changes, so the table has to say
            # that it is past them.
            return self._sink.append(version, None, mark)
        with self.timings.of(WRITE):
            return self._write_batch(shape, layout, version, batch, mark)

    def _write_batch(self, shape: TableShape, layout: Layout, version: Version, batch: Batch, mark: Mark) -> Version:
        key = tuple(column.name for column in shape.key_columns)
        if batch.truncated:
            rows = rows_that_come(net_rows(batch.rows)) if batch.counted and batch.rows is not None else batch.rows
            if not layout.soft_delete:
                return self._sink.replace(version, rows, mark)
            none = self._spark.createDataFrame([], layout.columns_for(shape))
            return self._sink.supersede(version, none if rows is None else rows, key, mark)
        if not batch.counted and not shape.key_columns:
            return self._sink.append(version, batch.rows if batch.here is None else batch.here, mark)
        assert batch.rows is not None
        if batch.counted:
            return self._sink.recount(version, batch.rows, mark, soft_delete=layout.soft_delete)
        changes = Changes(batch.rows, key, batch.kept, batch.bounds, layout.soft_delete, batch.here)
        return self._sink.upsert(version, changes, mark)

    def _evolve(self, table: MirrorTable, version: Version, shape: TableShape, place: int) -> tuple[Version, Layout]:
        """Brings the table's columns to the shape; all changes before `place` are in it.  Can be repeated."""
        layout = layout_for(shape, version, self._options.options_of(table.name))
        if layout.properties.items() <= version.properties.items():
            return version, layout
        version = self._sink.evolve(version, layout.stored, layout.interim, layout.alterations)
        if layout.unfilled:
            assert version.mark is not None
            columns = StructType([field for field in layout.columns if field.name in layout.unfilled])
            one_row = pa.table(layout.unfilled).select(columns.names).cast(arrow_schema(columns))
            values = frame_of(self._spark, one_row, columns)
            version = self._sink.fill(version, values, replace(version.mark, offset=place))
            version = self._sink.evolve(version, layout.stored, layout.properties)
        return version, layout

    def _fold_here(self, shape: TableShape, layout: Layout, slices: Sequence[Slice]) -> Batch:
        pieces, decoded_bytes = [], 0
        for piece in map(self.reader().read, slices):
            decoded_bytes += piece.rows.nbytes
            if decoded_bytes > _DECODED_BYTES:  # what is small in the log may be a thousand times that
                return self._fold_wide(shape, layout, slices)
            if piece.rows.num_rows:
                pieces.append(piece)
        if not pieces:
            return Batch(None, 0)
        if not shape.key_columns and any(has_rows_that_go(piece) for piece in pieces):
            return self._count_here(shape, layout, pieces)
        folded = fold(shape, ((piece.shape, piece.rows) for piece in pieces))
        bare = folded.truncated or not shape.key_columns
        kept = () if bare else tuple(folded.kept)
        schema = folded_schema(shape, layout.columns_for(shape), kept, bare=bare)
        rows = lake_rows(folded, schema, DEFAULT_POLICY)
        frame = frame_of(self._spark, rows, schema) if rows.num_rows or not bare else None
        bounds = {} if bare else key_bounds(shape, rows)
        return Batch(frame, folded.changes, folded.truncated, kept_names(shape, kept), bounds, here=rows)

    def _count_here(self, shape: TableShape, layout: Layout, pieces: list[LogRows]) -> Batch:
        truncated_at = last_truncate(pieces)
        rows = pa.concat_tables(
            [counted_rows(shape, piece, layout.live, DEFAULT_POLICY, truncated_at) for piece in pieces]
        )
        frame = frame_of(self._spark, rows, counted_schema(layout.live)) if rows.num_rows else None
        changes = sum(piece.rows.num_rows for piece in pieces)
        return Batch(frame, changes, truncated_at is not None, counted=True)

    def _fold_wide(self, shape: TableShape, layout: Layout, slices: Sequence[Slice]) -> Batch:
        wide = WideFold(self._spark, self._log_location, shape, layout.columns_for(shape), slices)
        survey = wide.survey()
        if not shape.key_columns and survey.goes:
            return Batch(wide.counted(survey), survey.changes, survey.truncated_at is not None, counted=True)
        kept = wide.kept(survey)
        truncated = survey.truncated_at is not None
        return Batch(wide.rows(survey), survey.changes, truncated, kept_names(shape, kept), wide.bounds(survey))


@dataclass(frozen=True, slots=True)
class Batch:
    rows: DataFrame | None  # None: no row stays
    changes: int
    truncated: bool = False
    kept: tuple[str, ...] = ()
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    counted: bool = False  # rows that come and go, of a table without key
    here: pa.Table | None = None  # the rows once more, where they were read in the driver


def kept_names(shape: TableShape, kept: Iterable[str]) -> tuple[str, ...]:
    """The names of columns given by storage name."""
    names = {column.storage_name: column.name for column in shape.columns}
    return tuple(names[storage_name] for storage_name in kept)

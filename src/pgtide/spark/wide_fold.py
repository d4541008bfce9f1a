"""Folding many changes in executors: read by slices, spread by key, folded per partition with the same code.

First a survey, because two things must be known beforehand: where the last TRUNCATE is, for nothing before it counts;
and whether some row changed its key while keeping an unchanged value, for then the way back to that value crosses keys
and everything is folded in one partition.  Otherwise such a row is two: its old key goes, its new one comes.

The survey also tells whether the runs of slices have keys in common.  If not, as when rows are new or each is changed
but once, each run is folded where it is read, and nothing is shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    IntegerType,
    IntegralType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from pgtide.change import Op
from pgtide.log.reader import Slice
from pgtide.schema import TableShape
from pgtide.sinks.bounds import Bounds
from pgtide.spark.counted import counted_rows, counted_schema, has_rows_that_go
from pgtide.spark.fold import fold_together, moved_rows, together
from pgtide.spark.folded_rows import folded_schema, lake_rows
from pgtide.spark.key_marks import Marks, have_none_in_common, joined, key_marks
from pgtide.spark.keys import check_keys
from pgtide.spark.rows import DEFAULT_POLICY, arrow_schema, lake_column, spark_type
from pgtide.spark.source import runs_of_slices, worker_reader

_RUN_BYTES = 8 << 20
_PARTITION_ROWS = 500_000
_MARKED_ROWS = 2_000_000  # with more changes, the marks of their keys would be too much for the driver

_SURVEY = StructType(
    [
        StructField("changes", LongType()),
        StructField("truncated_at", LongType()),
        StructField("crossing", BooleanType()),
        StructField("unchanged", StringType()),
        StructField("goes", BooleanType()),
        StructField("lowest", ArrayType(LongType())),
        StructField("highest", ArrayType(LongType())),
        StructField("marks", BinaryType()),
    ]
)

_DOT = "__"  # mapInArrow takes a dot in a column's name for the field of a struct

Batches = Iterable[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Survey:
    changes: int
    truncated_at: int | None  # offset of the last TRUNCATE
    crossing: bool
    unchanged: frozenset[str]  # storage names of columns that some row left unchanged
    goes: bool  # some row was updated or deleted
    bounds: tuple[Bounds | None, ...]  # of the columns of the key, where they are integers
    apart: bool  # no two runs have a key in common


class WideFold:
    def __init__(
        self, spark: SparkSession, log_location: str, shape: TableShape, columns: StructType, slices: Sequence[Slice]
    ) -> None:
        self._spark = spark
        self._log_location = log_location
        self._shape = shape
        self._columns = columns
        self._runs = [tuple(run) for run in runs_of_slices(slices, _RUN_BYTES)]

    def survey(self) -> Survey:
        path, shape, runs = self._log_location, self._shape, self._runs
        marked = sum(piece.entry.rows for run in runs for piece in run) <= _MARKED_ROWS

        def look(batches: Batches) -> Batches:
            for number in _numbers(batches):
                yield _survey_run(path, shape, runs[number], marked=marked)

        found = self._each_run(look, _SURVEY).toArrow()
        truncates = [offset for offset in found["truncated_at"].to_pylist() if offset is not None]
        names = {name for listed in found["unchanged"].to_pylist() for name in listed.split()}
        lowest, highest = found["lowest"].to_pylist(), found["highest"].to_pylist()
        return Survey(
            sum(found["changes"].to_pylist()),
            max(truncates, default=None),
            any(found["crossing"].to_pylist()),
            frozenset(names),
            any(found["goes"].to_pylist()),
            _joined_bounds(len(shape.key_columns), lowest, highest),
            any(_are_apart(lowest, highest, place) for place in range(len(shape.key_columns)))
            or have_none_in_common(found["marks"].to_pylist()),
        )

    def bounds(self, survey: Survey) -> dict[str, Bounds]:
        """Where the keys of all rows lie, for the columns where that can be told."""
        columns = zip(self._shape.key_columns, survey.bounds, strict=True)
        return {
            column.name: bounds
            for column, bounds in columns
            if bounds is not None and isinstance(spark_type(column), IntegralType)
        }

    def kept(self, survey: Survey) -> tuple[str, ...]:
        """Storage names of the columns that rows may take from the target; none after a TRUNCATE."""
        if survey.truncated_at is not None or not self._shape.key_columns:
            return ()
        return tuple(c.storage_name for c in self._shape.columns if c.storage_name in survey.unchanged)

    def rows(self, survey: Survey) -> DataFrame:
        """At most one row per key, as a sink takes them."""
        path, shape, runs = self._log_location, self._shape, self._runs
        events_schema = _events_schema(shape, survey)

        def read(batches: Batches) -> Batches:
            for number in _numbers(batches):
                yield from _events_of_run(path, shape, runs[number], survey, events_schema)

        def fold_events(batches: Batches) -> Batches:
            table = pa.Table.from_batches(batches, arrow_schema(events_schema))
            table = table.rename_columns([name.replace(_DOT, ".") for name in table.column_names])
            if table.num_rows:
                yield from lake_rows(fold_together(shape, table), final_schema, None).to_batches()

        def read_and_fold(batches: Batches) -> Batches:
            for number in _numbers(batches):
                events = pa.Table.from_batches(
                    _events_of_run(path, shape, runs[number], survey, events_schema), arrow_schema(events_schema)
                )
                yield from fold_events(events.sort_by([("_offset", "ascending"), ("_op", "ascending")]).to_batches())

        bare = survey.truncated_at is not None or not shape.key_columns
        final_schema = folded_schema(shape, self._columns, self.kept(survey), bare=bare)
        if survey.apart:
            return self._each_run(read_and_fold, final_schema)
        events = self._each_run(read, events_schema)
        if shape.key_columns:
            key = [col(f"`{column.storage_name}`") for column in shape.key_columns]
            spread = 1 if survey.crossing else max(len(runs), survey.changes // _PARTITION_ROWS + 1)
            events = events.repartition(spread, *key).sortWithinPartitions("_offset", "_op")
        return events.mapInArrow(fold_events, final_schema)

    def counted(self, survey: Survey) -> DataFrame:
        """The rows of a table without key, as they come and go."""
        path, shape, runs, columns = self._log_location, self._shape, self._runs, self._columns
        after = survey.truncated_at

        def count(batches: Batches) -> Batches:
            for number in _numbers(batches):
                for piece in runs[number]:
                    found = worker_reader(path).read(piece)
                    yield from counted_rows(shape, found, columns, DEFAULT_POLICY, after).to_batches()

        return self._each_run(count, counted_schema(columns))

    def _each_run(self, function: Callable[[Batches], Batches], schema: StructType) -> DataFrame:
        """Runs `function` once per run of slices; it gets the run's number."""
        return self._spark.range(0, len(self._runs), 1, len(self._runs)).mapInArrow(function, schema)


def _numbers(batches: Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _survey_run(path: str, shape: TableShape, run: tuple[Slice, ...], *, marked: bool) -> pa.RecordBatch:
    reader = worker_reader(path)
    changes, truncated_at, crossing, goes = 0, None, False, False
    unchanged: set[str] = set()
    keys = [column.storage_name for column in shape.key_columns]
    lowest: list[int | None] = [None] * len(keys)
    highest: list[int | None] = [None] * len(keys)
    marks: list[Marks | None] = []
    for piece in run:
        found = reader.read(piece, lambda name: name.rpartition(".")[2] in keys)
        changes += found.rows.num_rows
        goes |= has_rows_that_go(found)
        ops = found.rows.column("_op").to_numpy().astype(np.int64)
        truncates = np.flatnonzero(ops == Op.TRUNCATE)
        if len(truncates):
            truncated_at = found.rows.column("_offset")[int(truncates[-1])].as_py()
        table = together(shape, [(found.shape, found.rows)])
        flags = [name for name in table.column_names if name.startswith("_u.")]
        unchanged.update(name.removeprefix("_u.") for name in flags)
        if flags and keys:
            moved = moved_rows(table, ops, keys)
            crossing |= any(bool((moved & table.column(name).to_numpy()).any()) for name in flags)
        for place, name in enumerate(keys):
            for ends in _integer_ends(table, name):
                lowest[place] = ends[0] if (known := lowest[place]) is None else min(known, ends[0])
                highest[place] = ends[1] if (known := highest[place]) is None else max(known, ends[1])
        if marked and keys:
            marks.append(key_marks(table, keys))
    names = " ".join(sorted(unchanged))
    values = ([changes], [truncated_at], [crossing], [names], [goes], [lowest], [highest], [joined(marks)])
    wanted = arrow_schema(_SURVEY)
    return pa.RecordBatch.from_arrays([pa.array(v, f.type) for v, f in zip(values, wanted, strict=True)], schema=wanted)


def _integer_ends(table: pa.Table, key: str) -> Iterator[tuple[int, int]]:
    """The least and the greatest value of a column of the key, and of what it was before, if it has integers."""
    for name in (key, f"_old.{key}"):
        if name in table.column_names and pa.types.is_integer(table.schema.field(name).type):
            ends = pc.min_max(table.column(name))
            if ends["min"].is_valid:
                yield ends["min"].as_py(), ends["max"].as_py()


def _joined_bounds(
    columns: int, lowest: list[list[int | None]], highest: list[list[int | None]]
) -> tuple[Bounds | None, ...]:
    """Those of all runs together.  A run without any has no rows with a key of integers."""
    found: list[Bounds | None] = []
    for place in range(columns):
        low = [end for ends in lowest if (end := ends[place]) is not None]
        high = [end for ends in highest if (end := ends[place]) is not None]
        found.append(Bounds(min(low), max(high)) if low and high else None)
    return tuple(found)


def _are_apart(lowest: list[list[int | None]], highest: list[list[int | None]], place: int) -> bool:
    """Whether the runs' values of this column of the key, of all rows and of what they were before, do not overlap."""
    ends = [(low[place], high[place]) for low, high in zip(lowest, highest, strict=True)]
    known = sorted((low, high) for low, high in ends if low is not None and high is not None)
    return len(known) == len(ends) and all(high < low for (_, high), (low, _) in pairwise(known))


def _events_schema(shape: TableShape, survey: Survey) -> StructType:
    fields = [StructField("_offset", LongType()), StructField("_op", IntegerType())]
    fields += [StructField(column.storage_name, spark_type(column)) for column in shape.columns]
    fields += [
        StructField(f"_u{_DOT}{column.storage_name}", BooleanType())
        for column in shape.columns
        if column.storage_name in survey.unchanged
    ]
    if survey.crossing:
        fields.append(StructField("_old", IntegerType()))
        fields += [StructField(f"_old{_DOT}{column.storage_name}", spark_type(column)) for column in shape.key_columns]
    return StructType(fields)


def _events_of_run(path: str, shape: TableShape, run: tuple[Slice, ...], survey: Survey, schema: StructType) -> Batches:
    reader = worker_reader(path)
    wanted = arrow_schema(schema)
    for piece in run:
        found = reader.read(piece)
        rows = found.rows
        if survey.truncated_at is not None:
            rows = rows.filter(pa.array(rows.column("_offset").to_numpy() > survey.truncated_at))
        if rows.num_rows == 0:
            continue
        table = together(shape, [(found.shape, rows)])
        check_keys(shape, table)
        events = _mapped(shape, table, rows.column("_offset"), wanted)
        yield from events.to_batches()
        if not survey.crossing and shape.key_columns:
            ops = rows.column("_op").to_numpy().astype(np.int64)
            moved = np.flatnonzero(moved_rows(table, ops, [column.storage_name for column in shape.key_columns]))
            if len(moved):
                yield from _old_keys(
                    shape, table.take(pa.array(moved)), rows.column("_offset").take(pa.array(moved)), wanted
                )


def _mapped(shape: TableShape, table: pa.Table, offsets: pa.Array, wanted: pa.Schema) -> pa.Table:
    names = {name.replace(_DOT, ".") for name in wanted.names}
    arrays = {"_offset": offsets, "_op": table.column("_op")}
    for column in shape.columns:
        arrays[column.storage_name] = lake_column(column, column, table, DEFAULT_POLICY)
        old = f"_old.{column.storage_name}"
        if old in names and old in table.column_names:
            arrays[old] = lake_column(column, column, table, DEFAULT_POLICY, prefix="_old.")
    arrays |= {name: table.column(name) for name in table.column_names if name == "_old" or name.startswith("_u.")}
    return _with_schema(arrays, table.num_rows, wanted)


def _old_keys(shape: TableShape, moved: pa.Table, offsets: pa.Array, wanted: pa.Schema) -> Batches:
    """Rows whose key changed, once more: as deletes of the key they had."""
    arrays: dict[str, pa.Array] = {"_offset": offsets, "_op": pa.array(np.full(moved.num_rows, Op.DELETE))}
    for column in shape.key_columns:
        arrays[column.storage_name] = lake_column(column, column, moved, DEFAULT_POLICY, prefix="_old.")
    yield from _with_schema(arrays, moved.num_rows, wanted).to_batches()


def _with_schema(arrays: dict[str, pa.Array], count: int, wanted: pa.Schema) -> pa.Table:
    ordered = []
    for field in wanted:
        array = arrays.get(field.name.replace(_DOT, "."))
        ordered.append(pa.nulls(count, field.type) if array is None else array.cast(field.type))
    return pa.Table.from_arrays(ordered, schema=wanted)

"""Folded changes as the rows that a sink takes: the mirror table's columns, then what a MERGE must know of each row."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
from pyspark.sql.types import BooleanType, StructField, StructType

from pgtide.schema import TableShape
from pgtide.sinks.bounds import Bounds, bounds_of
from pgtide.sinks.merge import DELETE, keep_name, origin_name
from pgtide.spark.fold import Folded
from pgtide.spark.rows import arrow_schema, lake_column
from pgtide.types import TypePolicy


def folded_schema(shape: TableShape, columns: StructType, kept: Collection[str], *, bare: bool) -> StructType:
    """`kept`: storage names of columns that some rows leave as they are.  `bare`: the columns alone, for appending."""
    if bare:
        return columns
    fields = [*columns, StructField(DELETE, BooleanType())]
    fields += [StructField(keep_name(c.name), BooleanType()) for c in shape.columns if c.storage_name in kept]
    if kept:
        fields += [StructField(origin_name(c.name), columns[c.name].dataType) for c in shape.key_columns]
    return StructType(fields)


def lake_rows(folded: Folded, schema: StructType, policy: TypePolicy | None) -> pa.Table:
    """The rows with exactly this schema.  `policy`: how stored values are mapped; None when they are mapped already."""
    wanted = arrow_schema(schema)
    bare = DELETE not in wanted.names
    rows = folded.rows.filter(pa.array(~folded.deleted)) if bare else folded.rows
    arrays = {}
    for column in folded.shape.columns:
        arrays[column.name] = lake_column(column, column, rows, policy) if policy else rows.column(column.storage_name)
        if not bare:
            flags = folded.kept.get(column.storage_name)
            arrays[keep_name(column.name)] = pa.nulls(rows.num_rows) if flags is None else pa.array(flags)
    arrays[DELETE] = pa.array(folded.deleted)
    if (origins := folded.origins) is not None:
        for column in folded.shape.key_columns:
            mapped = lake_column(column, column, origins, policy) if policy else origins.column(column.storage_name)
            arrays[origin_name(column.name)] = mapped
    # Not there: a column that the source no longer has, or a mark that no row of this part needs.
    ordered = [arrays[name] if name in arrays else pa.nulls(rows.num_rows) for name in wanted.names]
    cast = [_as(array, field.type) for array, field in zip(ordered, wanted, strict=True)]
    return pa.Table.from_arrays(cast, schema=wanted)


def key_bounds(shape: TableShape, rows: pa.Table) -> dict[str, Bounds]:
    """Where the keys of these rows lie, also those that they had before, for the columns where that can be told."""
    found = {}
    for column in shape.key_columns:
        names = [name for name in (column.name, origin_name(column.name)) if name in rows.column_names]
        bounds = bounds_of(rows.column(name) for name in names)
        if bounds is not None:
            found[column.name] = bounds
    return found


def _as(array: pa.Array | pa.ChunkedArray, wanted: pa.DataType) -> pa.Array | pa.ChunkedArray:
    return array if array.type == wanted else array.cast(wanted)

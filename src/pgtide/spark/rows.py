"""Rows of the log as Spark sees them: typed columns under the table's own names, then what is known of the change.

Vectorised from end to end; a row is never a Python object.  Arrays are built with exactly the Arrow schema that Spark
derives for the declared schema (UTC), which newer versions check.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from pgtide.change import OldImage, Op
from pgtide.errors import TableError
from pgtide.log.reader import LogRows
from pgtide.schema import Column, TableShape
from pgtide.spark.fold import unchanged_flags
from pgtide.spark.variant import variant_array
from pgtide.types import TypePolicy, is_variant, lake_type, to_lake

CHANGE_COLUMNS = (
    StructField("_change_type", StringType()),
    StructField("_offset", LongType()),
    StructField("_commit_version", LongType()),
    StructField("_commit_timestamp", TimestampType()),
    StructField("_xid", LongType()),
    StructField("_unchanged", ArrayType(StringType())),
)

_CHANGE_TYPES = {
    Op.INSERT: "insert",
    Op.UPDATE: "update_postimage",
    Op.DELETE: "delete",
    Op.READ: "read",
    Op.TRUNCATE: "truncate",
    Op.MESSAGE: "message",
    Op.NOTE: "note",
}
_PREIMAGE = "update_preimage"

DEFAULT_POLICY = TypePolicy()


def spark_type(column: Column, policy: TypePolicy = DEFAULT_POLICY) -> DataType:
    if is_variant(column.type, policy):
        return VariantType()
    return from_arrow_type(lake_type(column.type, policy), prefer_timestamp_ntz=True)


def table_schema(shape: TableShape, policy: TypePolicy = DEFAULT_POLICY) -> StructType:
    """The table's columns, all nullable: rows of earlier shapes and deletes leave some empty."""
    return StructType([StructField(column.name, spark_type(column, policy)) for column in shape.columns])


def change_schema(shape: TableShape, policy: TypePolicy = DEFAULT_POLICY) -> StructType:
    """The schema of the source for one table."""
    own = {field.name.lower() for field in CHANGE_COLUMNS}
    clash = [column.name for column in shape.columns if column.name.lower() in own]
    if clash:
        raise TableError(
            f"{shape.qualified_name} has a column {clash[0]}, which is also the name of a column that pgtide adds.",
            remedy="Rename the column in the source.",
        )
    return StructType([*table_schema(shape, policy), *CHANGE_COLUMNS])


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark derives for a schema, in UTC."""
    return to_arrow_schema(schema, timestamp_utc=True)


def lake_column(
    column: Column, captured: Column, rows: pa.Table | pa.RecordBatch, policy: TypePolicy, prefix: str = ""
) -> pa.Array:
    """One column of stored rows, mapped to the type of `column`; `captured` is what it was when they were captured."""
    name = f"{prefix}{captured.storage_name}"
    values = _one_array(rows.column(name))
    text_name = f"{prefix}_text.{captured.storage_name}"
    text = _one_array(rows.column(text_name)) if text_name in rows.schema.names else None
    return as_read(column, captured, to_lake(captured.type, values, text, policy), policy)


class TypeChanged(ValueError):
    """Values of a column do not fit the type that it has in another shape of the table."""


def as_read(column: Column, captured: Column, values: pa.Array, policy: TypePolicy) -> pa.Array:
    """Values of a column as the type that it is read with."""
    wanted = lake_type(column.type, policy)
    if values.type == wanted:
        return values
    try:
        return values.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        then, now = f"{captured.type.name} ({values.type})", f"{column.type.name} ({wanted})"
        raise TypeChanged(f"column {column.name} is {then} there, and is read as {now}: {error}") from None


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def change_rows(
    shape: TableShape, found: LogRows, *, preimages: bool, policy: TypePolicy = DEFAULT_POLICY
) -> pa.RecordBatch:
    """The changes of one slice with the columns of `change_schema(shape)`.

    With `preimages`, an update whose old image was sent is two rows, the old one first, under one offset.
    """
    rows = found.rows
    ops = rows.column("_op").to_numpy()
    arrays = [
        *_images(shape, found, policy, prefix=""),
        change_types(rows),
        *transaction_columns(rows),
        unchanged_names(shape, found),
    ]
    if preimages and (updates := _with_old_image(rows, ops)).size:
        before = LogRows(found.shape, rows.take(pa.array(updates)))
        old = [
            *_images(shape, before, policy, prefix="_old."),
            pa.array([_PREIMAGE] * len(updates), pa.string()),
            *transaction_columns(before.rows),
            _no_names(len(updates)),
        ]
        order = np.argsort(np.concatenate([2 * np.arange(len(ops)) + 1, 2 * updates]), kind="stable")
        arrays = [pa.concat_arrays(pair).take(pa.array(order)) for pair in zip(arrays, old, strict=True)]
    return arrow_batch(arrays, change_schema(shape, policy))


def arrow_batch(arrays: Sequence[pa.Array], schema: StructType) -> pa.RecordBatch:
    """A batch with exactly the Arrow schema of `schema`; what shall be a VARIANT comes as JSON text."""
    wanted = arrow_schema(schema)
    columns = []
    for array, field, arrow_field in zip(arrays, schema, wanted, strict=True):
        if isinstance(field.dataType, VariantType):
            columns.append(variant_array(array))
        else:
            columns.append(array if array.type == arrow_field.type else array.cast(arrow_field.type))
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def columns_then(shape: TableShape, captured: TableShape) -> list[Column | None]:
    """What each column was in a captured shape: the same attribute, whatever its name; in another relation, which had
    the table's name before or after, the column of the same name."""
    if shape.relation_oid == captured.relation_oid:
        by_number = {column.attnum: column for column in captured.columns}
        return [by_number.get(column.attnum) for column in shape.columns]
    by_name = {column.name: column for column in captured.columns}
    return [by_name.get(column.name) for column in shape.columns]


def _images(shape: TableShape, found: LogRows, policy: TypePolicy, prefix: str) -> list[pa.Array]:
    names = set(found.rows.schema.names)
    images = []
    for column, then in zip(shape.columns, columns_then(shape, found.shape), strict=True):
        if then is None or f"{prefix}{then.storage_name}" not in names:
            images.append(pa.nulls(found.rows.num_rows, lake_type(column.type, policy)))
        else:
            images.append(lake_column(column, then, found.rows, policy, prefix))
    return images


def frame_of(spark: SparkSession, rows: pa.Table, schema: StructType) -> DataFrame:
    """Rows from the driver's memory as a DataFrame, in one batch: Spark 4.1 stops reading at an empty one, so that an
    empty chunk in the middle would lose all rows behind it; and it fails where there is no chunk at all."""
    return spark.createDataFrame(rows.combine_chunks() if rows.num_rows else [], schema)


def change_types(rows: pa.RecordBatch) -> pa.Array:
    names = pa.array([_CHANGE_TYPES.get(Op(number)) if number in set(Op) else None for number in range(max(Op) + 1)])
    return names.take(rows.column("_op"))


def transaction_columns(rows: pa.RecordBatch) -> list[pa.Array]:
    return [
        rows.column("_offset"),
        rows.column("_commit_lsn").cast(pa.int64()),
        rows.column("_commit_timestamp"),
        rows.column("_xid").cast(pa.int64()),
    ]


def _with_old_image(rows: pa.RecordBatch, ops: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    if "_old" not in rows.schema.names:
        return np.empty(0, np.int64)
    return np.flatnonzero((ops == Op.UPDATE) & (rows.column("_old").to_numpy() != OldImage.NONE))


def unchanged_names(shape: TableShape, found: LogRows) -> pa.Array:
    """For each row the names of the columns whose value was not sent."""
    flags = unchanged_flags(found.shape, found.rows)
    if not flags:
        return _no_names(found.rows.num_rows)
    pairs = zip(shape.columns, columns_then(shape, found.shape), strict=True)
    names = {then.storage_name: column.name for column, then in pairs if then is not None}
    known = [name for name in flags if name in names]
    if not known:  # the columns are gone from the table since
        return _no_names(found.rows.num_rows)
    table = np.column_stack([flags[name] for name in known])
    offsets = np.concatenate([[0], np.cumsum(table.sum(axis=1))]).astype(np.int32)
    values = pa.array([names[name] for name in known], pa.string()).take(pa.array(np.nonzero(table)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _no_names(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.string()))

"""What a row of the source looks like: a table's own columns, or one form for the changes of all tables.

A view holds values only and travels to the executors; `rows` turns one slice of the log into Arrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, StringType, StructField, StructType, VariantType

from pgtide.log.reader import LogRows
from pgtide.schema import TableShape
from pgtide.spark.images import Bools, Image, keys, new_rows, old_rows
from pgtide.spark.json_text import json_objects
from pgtide.spark.rows import (
    CHANGE_COLUMNS,
    arrow_batch,
    change_rows,
    change_schema,
    change_types,
    transaction_columns,
    unchanged_names,
)
from pgtide.types import TypePolicy


class View(Protocol):
    def schema(self) -> StructType: ...

    def rows(self, found: LogRows) -> pa.RecordBatch:
        """The changes of one slice, with exactly the Arrow schema that Spark derives for `schema`.

        TypeChanged where values do not fit it.
        """


@dataclass(frozen=True)
class TypedView:
    """One table: its columns, then what is known of the change."""

    shape: TableShape
    preimages: bool
    policy: TypePolicy

    def schema(self) -> StructType:
        return change_schema(self.shape, self.policy)

    def rows(self, found: LogRows) -> pa.RecordBatch:
        return change_rows(self.shape, found, preimages=self.preimages, policy=self.policy)


@dataclass(frozen=True)
class AllTablesView:
    """All tables: the name of the table; key, old and new row as JSON or VARIANT; what is known of the change."""

    policy: TypePolicy

    def schema(self) -> StructType:
        document = document_type(self.policy)
        documents = [StructField(name, document) for name in ("key", "before", "after")]
        return StructType([StructField("table", StringType()), *documents, *CHANGE_COLUMNS])

    def rows(self, found: LogRows) -> pa.RecordBatch:
        shape = found.shape
        old, new = old_rows(found, self.policy), new_rows(found, self.policy)
        arrays = [
            pa.repeat(pa.scalar(shape.qualified_name), found.rows.num_rows),
            self._keys(found, old.present | new.present),
            document(shape, old),
            document(shape, new),
            change_types(found.rows),
            *transaction_columns(found.rows),
            unchanged_names(shape, found),
        ]
        return arrow_batch(arrays, self.schema())

    def _keys(self, found: LogRows, of_a_row: Bools) -> pa.Array:
        """Null for a truncate, a message, and a table without key."""
        names = [column.name for column in found.shape.key_columns]
        if not names:
            return pa.nulls(len(of_a_row), pa.string())
        text = json_objects(names, keys(found, self.policy), [None] * len(names))
        return pc.if_else(pa.array(of_a_row), text, None)


def document_type(policy: TypePolicy) -> DataType:
    return VariantType() if policy.json == "variant" else StringType()


def document(shape: TableShape, image: Image) -> pa.Array:
    """JSON objects of what was sent of each row; null where there is no such row."""
    text = json_objects([column.name for column in shape.columns], image.columns, image.absent)
    return pc.if_else(pa.array(image.present), text, None)

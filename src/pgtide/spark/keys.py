"""Keys in the lake: which of them a mirror can find again, and how they are compared before they get there."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from pgtide.errors import TableError
from pgtide.schema import TableShape
from pgtide.types import TypePolicy, lake_type


class UnusableKey(TableError):
    """Rows with such a key could not be found again.  Reading them again under the same snapshot changes nothing."""


def check_key_types(shape: TableShape, *, loading: bool = False) -> None:
    """Refuses a key that Spark cannot compare: one with a map (hstore) in it.  `loading`: the table will be tried again
    by itself, while changes that are in the log stay there."""
    for column in shape.key_columns:
        if _has_map(lake_type(column.type, TypePolicy())):
            raise UnusableKey(
                f"{shape.qualified_name}.{column.name}: Spark cannot compare keys of type {column.type.name}.",
                remedy=f"Choose another key (REPLICA IDENTITY USING INDEX){_then(shape, loading)}",
            )


def check_keys(shape: TableShape, rows: pa.Table | pa.RecordBatch, *, loading: bool = False) -> None:
    """Rows are found again by the mapped key: one that its type cannot hold would be found as null, as another, or not
    at all.  Such a value has a text beside it, in the row and in what the row was before."""
    check_key_types(shape, loading=loading)
    names = set(rows.schema.names)
    for column in shape.key_columns:
        for text in (f"_text.{column.storage_name}", f"_old._text.{column.storage_name}"):
            if text in names and rows.column(text).null_count < rows.num_rows:
                raise UnusableKey(
                    f"{shape.qualified_name}.{column.name}: a key has a value that the lake's type cannot hold.",
                    remedy="Correct the row in the source, or choose another key (REPLICA IDENTITY USING INDEX)"
                    f"{_then(shape, loading)}",
                )


def check_keys_told(shape: TableShape, rows: pa.Table) -> None:
    """A key is never null.  If one is, the changes came with another, and a MERGE would pass over them in silence."""
    for column in shape.key_columns:
        if rows.column(column.storage_name).null_count:
            raise UnusableKey(
                f"{shape.qualified_name}.{column.name}: a change does not say the key of its row.",
                remedy=f"Load it anew: pgtide snapshot start {shape.qualified_name} --type bulk",
            )


def comparable(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values that Arrow can number and compare.  It cannot do so with nested ones: they become Python's text of them,
    which differs exactly if they do, whether they are as the log stores them or as the lake does.  0.0 and -0.0 are one
    key to Postgres and to Spark."""
    if pa.types.is_floating(values.type):
        return pc.add(values, pa.scalar(0.0, values.type))
    if not pa.types.is_nested(values.type):
        return values
    texts = [None if value is None else repr(value) for value in values.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])


def _has_map(data_type: pa.DataType) -> bool:
    if pa.types.is_map(data_type):
        return True
    return any(_has_map(data_type.field(place).type) for place in range(data_type.num_fields))


def _then(shape: TableShape, loading: bool) -> str:
    if loading:
        return "; the load is then tried again by itself."
    return f", then load it anew: pgtide snapshot start {shape.qualified_name} --type bulk"

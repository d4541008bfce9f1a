"""Parquet files that others write for an Iceberg table: their columns carry the table's field ids.

Arrow columns written by pyarrow cost a third of what they cost as rows through Spark and Iceberg's own writer.  Iceberg
finds columns by field id, also after they were renamed, so the ids must be in the file.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from pgtide.sinks import FileLayout
from pgtide.sinks.merge import DELETED

_PRIMITIVE = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "string": pa.string(),
    "binary": pa.binary(),
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


class _NotKnownError(ValueError):
    """A type of which we do not know how Iceberg wants it in a file."""


def layout_of_files(folder: str, columns: dict[str, Any]) -> FileLayout | None:
    """None where pyarrow cannot write as Iceberg wants it, or not to that place."""
    path = _local_path(folder)
    if path is None:
        return None
    try:
        fields = [_field(found) for found in columns["fields"] if not _is_mark_of_deletes(found)]
    except _NotKnownError:
        return None
    return FileLayout(path, folder, pa.schema(fields))


def _is_mark_of_deletes(found: dict[str, Any]) -> bool:
    """Rows of a file without it have its default: they live.  A column of the source with that name has no default."""
    return found["name"] == DELETED and "initial-default" in found


def _local_path(folder: str) -> str | None:
    """Taken apart as Hadoop does it: a path may hold `#`, `?` and `%`, which mean nothing in it."""
    scheme, _, rest = folder.partition(":")
    if not rest or "/" in scheme:
        return folder
    return re.sub("^//[^/]*", "", rest) if scheme == "file" else None


def _field(found: dict[str, Any]) -> pa.Field:
    return _numbered(found["name"], found["type"], found["id"], required=found["required"])


def _numbered(name: str, of: str | dict[str, Any], field_id: int, *, required: bool) -> pa.Field:
    return pa.field(name, _type(of), nullable=not required, metadata={"PARQUET:field_id": str(field_id)})


def _type(of: str | dict[str, Any]) -> pa.DataType:
    if isinstance(of, str):
        decimal = _DECIMAL.fullmatch(of)
        if decimal:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if of not in _PRIMITIVE:
            raise _NotKnownError(of)
        return _PRIMITIVE[of]
    if of["type"] == "struct":
        return pa.struct([_field(found) for found in of["fields"]])
    if of["type"] == "list":
        return pa.list_(_numbered("element", of["element"], of["element-id"], required=of["element-required"]))
    key = _numbered("key", of["key"], of["key-id"], required=True)
    return pa.map_(key, _numbered("value", of["value"], of["value-id"], required=of["value-required"]))

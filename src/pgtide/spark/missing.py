"""What rows have in a column that came after them: null, or what ADD COLUMN … DEFAULT has filled in without a word.

Postgres fills no row for a constant default: it notes the value beside the column (`attmissingval`), and sends nothing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pgtide.decode import decode_text
from pgtide.errors import DecodeError, TableError
from pgtide.schema import Column
from pgtide.types import TypePolicy, lake_type, storage_type, to_lake


def stored_missing(column: Column, count: int) -> dict[str, pa.Array]:
    """The column in rows from before it, as the log would have stored it; with its text, if it needs one."""
    name = column.storage_name
    if column.missing is None:
        return {name: pa.nulls(count, storage_type(column.type))}
    array, text = _decoded(column)
    repeated = {name: _repeated(array, count)}
    return repeated if text is None else repeated | {f"_text.{name}": _repeated(text, count)}


def lake_missing(column: Column, count: int, policy: TypePolicy) -> pa.Array:
    """The same as the lake has it."""
    wanted = lake_type(column.type, policy)
    if column.missing is None:
        return pa.nulls(count, wanted)
    array, text = _decoded(column)
    return _repeated(to_lake(column.type, array, text, policy), count)


def _decoded(column: Column) -> tuple[pa.Array, pa.Array | None]:
    assert column.missing is not None
    try:
        values = decode_text(column.type, column.missing)
    except DecodeError as error:
        raise TableError(
            f"column {column.name}: the default that its older rows have, {column.missing!r}, cannot be read: "
            f"{error.what}",
            remedy="Drop the mirror table to load it anew.",
        ) from error
    return values.array, values.text


def _repeated(one: pa.Array, count: int) -> pa.Array:
    return one.take(pa.array(np.zeros(count, np.int64)))

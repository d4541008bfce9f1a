"""Numbers that stand for keys, to find out whether runs of changes have keys in common without looking at the keys.

Equal keys have equal numbers.  Unequal ones may, very rarely: then runs are taken for having a key in common though
they have none, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Marks = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_UUID_BYTES = 16
_MANY = 1000


def key_marks(table: pa.Table, key: Sequence[str]) -> Marks | None:
    """Those of all keys that the changes have or had; None for types of which it cannot be told quickly."""
    found = []
    for names in (list(key), [f"_old.{name}" for name in key]):
        present = [name for name in names if name in table.column_names]
        if present != names:
            if present:
                return None
            continue
        # A TRUNCATE has no key, and most changes have no old one.
        rows = table.select(names).drop_null()
        marks = np.zeros(rows.num_rows, np.uint64)
        for name in names:
            part = _numbers(rows.column(name).combine_chunks())
            if part is None:
                return None
            marks = marks * _FACTOR + part
        found.append(marks)
    return np.concatenate(found) if found else None


def joined(marks: Sequence[Marks | None]) -> bytes | None:
    """Those of a run, each once; None where some are not known, and for many new rows under growing keys: there the
    first and the last key tell as much, for less."""
    known = [found for found in marks if found is not None]
    if not known or len(known) < len(marks):
        return None
    together = np.concatenate(known)
    if len(together) >= _MANY and (together[1:] > together[:-1]).all():
        return None
    # By hash, which takes a tenth of the time that sorting takes.
    return _unique(together).tobytes()


def have_none_in_common(runs: Sequence[bytes | None]) -> bool:
    """Whether no mark is in two of these; False where some are not known."""
    known = [np.frombuffer(marks, np.uint64) for marks in runs if marks is not None]
    if len(known) < len(runs) or not known:
        return False
    together = np.concatenate(known)
    return len(_unique(together)) == len(together)


def _unique(marks: Marks) -> Marks:
    return np.asarray(pc.unique(pa.array(marks)).to_numpy())


def _numbers(column: pa.Array) -> Marks | None:
    if pa.types.is_integer(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64))
    if column.type == pa.binary(_UUID_BYTES):
        halves = np.frombuffer(column.buffers()[1], np.uint64).reshape(-1, 2)
        halves = halves[column.offset : column.offset + len(column)]
        return np.asarray(halves[:, 0] * _FACTOR + halves[:, 1])
    return None

"""What values made of values have in common.

The elements of a whole column become one column of cells of their own and go through the element's codec.
When an element needs text because its storage type cannot hold it, the value as a whole is null and its
text is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.decode.cells import I64, Bools, Cells, Values, Views, scatter, varlen
from pgtide.decode.frames import PAD
from pgtide.types.literals import Texts
from pgtide.types.pg_type import PgType, storage_type

PrintValue = Callable[[PgType, bytes], str]


def cells_of(texts: Sequence[str | None]) -> Cells:
    """Texts as a column in text form, in a buffer of their own."""
    encoded = [b"" if text is None else text.encode() for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    valid = np.fromiter((text is not None for text in texts), np.bool_, len(texts))
    views = Views(b"".join([*encoded, bytes(PAD)]))
    return Cells(views, np.cumsum(lengths) - lengths, lengths, None if valid.all() else valid)


def _strings(cells: Cells) -> list[str]:
    strings: list[str] = varlen(pa.string(), cells).to_pylist()
    return strings


class Nested(ABC):
    """What all have in common: only valid rows are decoded; rows that do not fit become null with their text."""

    def __init__(self, pg_type: PgType, print_value: PrintValue) -> None:
        self.type = storage_type(pg_type)
        self._pg_type, self._print_value = pg_type, print_value

    @abstractmethod
    def _dense(self, cells: Cells) -> tuple[pa.Array, Bools]:
        """Values of cells in binary form that are all valid, and which of them fit the storage type."""

    @abstractmethod
    def _dense_text(self, texts: list[str]) -> tuple[pa.Array, Bools]:
        """The same from their texts."""

    def binary(self, cells: Cells) -> Values:
        rows = np.arange(len(cells)) if cells.valid is None else np.flatnonzero(cells.valid)
        dense = cells if cells.valid is None else cells.select(rows)
        array, fits = self._dense(Cells(dense.views, dense.start, dense.length, None))
        return self._values(
            len(cells), rows, array, fits, lambda row: self._print_value(self._pg_type, cells.bytes_of(row))
        )

    def text(self, cells: Cells) -> Values:
        rows = np.arange(len(cells)) if cells.valid is None else np.flatnonzero(cells.valid)
        texts = _strings(cells if cells.valid is None else cells.select(rows))
        array, fits = self._dense_text(texts)
        by_row = dict(zip(rows.tolist(), texts, strict=True))
        return self._values(len(cells), rows, array, fits, by_row.__getitem__)

    def _values(self, count: int, rows: I64, array: pa.Array, fits: Bools, printed: Callable[[int], str]) -> Values:
        if fits.all():
            return Values(scatter(count, [(rows, array)], self.type))
        kept = scatter(count, [(rows[fits], array.filter(pa.array(fits)))], self.type)
        texts: Texts = [None] * count
        for row in rows[~fits].tolist():
            texts[row] = printed(row)
        return Values(kept, pa.array(texts, pa.string()))


def fitting(values: Values) -> Bools:
    """Which elements were held by their storage type."""
    if values.text is None:
        return np.ones(len(values.array), np.bool_)
    fitting: Bools = pc.is_null(values.text).to_numpy(zero_copy_only=False)
    return fitting


def all_of(elements: Bools, owner: I64, count: int) -> Bools:
    """For each owner whether all its elements are true."""
    good: Bools = np.bincount(owner[~elements], minlength=count) == 0
    return good


def list_array(list_type: pa.DataType, offsets: I64, values: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(
        list_type, len(offsets) - 1, [None, pa.py_buffer(offsets.astype(np.int32))], children=[values]
    )

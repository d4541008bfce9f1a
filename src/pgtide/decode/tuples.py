"""Tuples, a column at a time: where each value lies, then what it is.

The place of a column depends on the lengths of those before it, but in the same way for every row: so all
rows step from column to column together.  Every step checks that it stays inside its message, before
anything is read from where it leads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgtide.decode.cells import I64, U8, Bools, Cells, Values, Views, scatter
from pgtide.decode.codec import Codec
from pgtide.errors import DecodeError
from pgtide.types.pg_type import PgType

NULL, UNCHANGED, BINARY, TEXT = ord("n"), ord("u"), ord("b"), ord("t")
_IS_KIND = np.isin(np.arange(256), [NULL, UNCHANGED, BINARY, TEXT])
_HAS_VALUE = np.isin(np.arange(256), [BINARY, TEXT])


@dataclass(frozen=True, slots=True)
class RawColumn:
    """One column of many tuples; `kind` is None when all values are binary, the common case."""

    kind: U8 | None
    start: I64
    length: I64

    def where(self, kind: int) -> Bools | None:
        """The rows of that kind; None if there are none."""
        if self.kind is None:
            return None
        rows: Bools = self.kind == kind
        return rows if rows.any() else None


def walk_tuples(views: Views, at: I64, ends: I64, columns: int) -> tuple[list[RawColumn], I64]:
    """Columns of the TupleData that begin at `at`, and where each tuple ends."""
    _inside(at + 2, ends)
    if (views.i2[at] != columns).any():
        raise DecodeError(f"a tuple does not have the {columns} columns that its relation was said to have")
    at = at + 2
    walked = []
    for _ in range(columns):
        raw, at = _walk_column(views, at, ends)
        walked.append(raw)
    return walked, at


def _walk_column(views: Views, at: I64, ends: I64) -> tuple[RawColumn, I64]:
    kind = views.u1[at]
    start = at + 5
    length = views.u4[at + 1].astype(np.int64)  # unsigned: what was negative leads outside
    if (kind == BINARY).all():
        after = start + length
        _inside(after, ends)
        return RawColumn(None, start, length), after
    if not _IS_KIND[kind].all():
        raise DecodeError(
            "a value in a tuple is of an unknown kind", remedy="Only protocol versions 1 to 4 are understood."
        )
    has_value = _HAS_VALUE[kind]
    length *= has_value
    start = at + np.where(has_value, 5, 1)
    after = start + length
    _inside(after, ends)
    return RawColumn(kind, start, length), after


def walk_copied(views: Views, at: I64, ends: I64, columns: int) -> tuple[list[RawColumn], I64]:
    """The same for tuples of a binary COPY: a length of -1 stands for null, there are no kinds."""
    _inside(at + 2, ends)
    if (views.i2[at] != columns).any():
        raise DecodeError(f"a copied tuple does not have the {columns} columns of its table")
    at = at + 2
    walked = []
    for _ in range(columns):
        length = views.i4[at].astype(np.int64)
        start = at + 4
        kind = None
        if length.min(initial=0) < 0:
            null = length == -1
            kind = np.where(null, NULL, BINARY).astype(np.uint8)
            length[null] = 0
            _not_negative(length)
        at = start + length
        _inside(at, ends)
        walked.append(RawColumn(kind, start, length))
    return walked, at


def _inside(at: I64, ends: I64) -> None:
    if (at > ends).any():
        raise DecodeError("a message ends before its tuple does")


def _not_negative(length: I64) -> None:
    if length.min(initial=0) < 0:
        raise DecodeError("a value has a negative length")


def fill_unchanged(new: RawColumn, old: RawColumn, rows: I64) -> RawColumn:
    """Values sent as unchanged, taken from the old image of the same message where that has them.

    `rows` are the rows that have an old image; `old` has one value for each of them.
    """
    if new.kind is None:
        return new
    known = np.ones(len(rows), np.bool_) if old.kind is None else _HAS_VALUE[old.kind]
    fill = known & (new.kind[rows] == UNCHANGED)
    if not fill.any():
        return new
    target = rows[fill]
    kind, start, length = new.kind.copy(), new.start.copy(), new.length.copy()
    kind[target] = BINARY if old.kind is None else old.kind[fill]
    start[target], length[target] = old.start[fill], old.length[fill]
    return RawColumn(kind, start, length)


def decode_column(table: str, name: str, pg_type: PgType, codec: Codec, views: Views, raw: RawColumn) -> Values:
    """The values of a column; an error says whose they are."""
    try:
        return _decode(codec, views, raw)
    except DecodeError as error:
        raise DecodeError(f"{table}, column {name} ({pg_type.name}): {error.what}", remedy=error.remedy) from error
    except (pa.ArrowInvalid, struct.error, ValueError, IndexError, KeyError, OverflowError) as error:
        raise DecodeError(f"{table}, column {name} ({pg_type.name}): a value cannot be decoded: {error}") from error


def _decode(codec: Codec, views: Views, raw: RawColumn) -> Values:
    if raw.kind is None:
        return codec.binary(Cells(views, raw.start, raw.length, None))
    text = raw.kind == TEXT
    if not text.any():
        return codec.binary(Cells(views, raw.start, raw.length, raw.kind == BINARY))
    binary = raw.kind == BINARY
    if not binary.any() or getattr(codec, "same_in_both_forms", False):
        present = text | binary
        return codec.text(Cells(views, raw.start, raw.length, None if present.all() else present))
    return _mixed(codec, views, raw, [(codec.binary, binary), (codec.text, text)])


def _mixed(codec: Codec, views: Views, raw: RawColumn, forms: list[tuple[Callable[[Cells], Values], Bools]]) -> Values:
    """Some values in text, some in binary form: a type without binary output inside of arrays, for one."""
    arrays: list[tuple[I64, pa.Array]] = []
    texts: list[tuple[I64, pa.Array]] = []
    for decode, chosen in forms:
        rows = np.flatnonzero(chosen)
        values = decode(Cells(views, raw.start[rows], raw.length[rows], None))
        arrays.append((rows, values.array))
        if values.text is not None:
            texts.append((rows, values.text))
    count = len(raw.start)
    return Values(scatter(count, arrays, codec.type), scatter(count, texts, pa.string()) if texts else None)

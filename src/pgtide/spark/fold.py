"""Folds a range of one table's changes into at most one row per key: what the mirror has to write.  Pure.

Each change is one *event* on a key, an update that changes the key two: the old key goes, the new one comes.  The
last event per key counts.  Nothing before the last TRUNCATE counts.

A value sent as "unchanged TOAST" is the one the row had before: that of the previous event on the same key, or, for an
event that changed the key, on the key it had.  Following these links leads to the event that has the value, or to the
beginning of the batch: then the value is in the target, under the key the row had there, its *origin*.  Links are
followed for all rows at once by pointer doubling, so chains and swaps cost a logarithm of their length.

Everything works on the log's own columns (`c<n>`): keys are compared as stored, and only rows that survive are mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.change import OldImage, Op
from pgtide.errors import TableError
from pgtide.schema import Column, TableShape
from pgtide.spark.keys import check_keys, check_keys_told, comparable
from pgtide.spark.missing import stored_missing
from pgtide.types import storage_type

Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NOTHING = -1


@dataclass(frozen=True, slots=True)
class Folded:
    """`rows`: the columns c<n> (and _text.c<n>), one row per key; the arrays say what each row is."""

    shape: TableShape
    rows: pa.Table
    deleted: Flags  # the key is gone; only key columns have values
    kept: dict[str, Flags]  # storage name → rows that keep the target's value of this column
    origins: pa.Table | None  # the key columns of the row in the target; there when `kept` is not empty
    truncated: bool  # nothing that was in the target before stays
    changes: int  # how many changes were folded


def unchanged_flags(shape: TableShape, rows: pa.RecordBatch) -> dict[str, Flags]:
    """Storage name → which rows left that column unchanged; columns that no row left so are not in it."""
    if "_unchanged" not in rows.schema.names or rows.num_rows == 0:
        return {}
    column = rows.column("_unchanged")
    width = shape.unchanged_width_bytes
    data = np.frombuffer(column.buffers()[1], np.uint8, count=rows.num_rows * width, offset=column.offset * width)
    bits = np.unpackbits(data.reshape(rows.num_rows, width), axis=1, bitorder="little").astype(np.bool_)
    touched = np.flatnonzero(bits.any(axis=0))
    return {shape.columns[i].storage_name: bits[:, i] for i in touched if i < len(shape.columns)}


def fold(shape: TableShape, pieces: Iterable[tuple[TableShape, pa.RecordBatch]]) -> Folded:
    """Folds changes, given in the order of their offsets, each piece with the shape it was captured in."""
    return fold_together(shape, together(shape, pieces))


def fold_together(shape: TableShape, table: pa.Table) -> Folded:
    """Folds the rows of one table as `together` makes it; its columns may have any type."""
    changes = table.num_rows
    ops = _numbers(table, "_op")
    truncates = np.flatnonzero(ops == Op.TRUNCATE)
    if len(truncates):
        table, ops = table.slice(int(truncates[-1]) + 1), ops[truncates[-1] + 1 :]
    rows = np.flatnonzero(np.isin(ops, (Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ)))
    if len(rows) < table.num_rows:
        table, ops = table.take(rows), ops[rows]
    if not shape.key_columns:
        assert not np.isin(ops, (Op.UPDATE, Op.DELETE)).any(), "rows that go have to be counted"
        return Folded(shape, _added(table), np.zeros(len(ops), np.bool_), {}, None, bool(len(truncates)), changes)
    check_keys(shape, table)
    check_keys_told(shape, table)
    events = _events(shape, table, ops)
    last = _last_per_key(events.key)
    kept: dict[str, Flags] = {}
    sources: dict[str, Indexes] = {}
    for column in shape.columns:
        name = column.storage_name
        if f"_u.{name}" in table.column_names:
            sources[name], flags = _value_sources(events, _flags(table, f"_u.{name}"), last, shape, column)
            if flags.any():
                kept[name] = flags
    return Folded(
        shape,
        _final_rows(shape, table, events, last, sources),
        ~events.upsert[last],
        kept,
        _origins(shape, events, last) if kept else None,
        truncated=bool(len(truncates)),
        changes=changes,
    )


@dataclass(frozen=True, slots=True)
class _Events:
    row: Indexes  # row of the table that an event stands for
    upsert: Flags  # else the key goes
    key: Indexes  # number of the key; rows of `keys`
    before: Indexes  # the event that had this row before, by key; for a changed key, by the old one
    origin_key: Indexes  # number of the key the row had before this event
    keys: pa.Table  # distinct keys


def together(shape: TableShape, pieces: Iterable[tuple[TableShape, pa.RecordBatch]]) -> pa.Table:
    """One table: `_op`, `_old`, c<n>, _text.c<n>, both of the old key, and as `_u.c<n>` whether a value is unchanged.

    Columns have the types of `shape`.  One that a piece did not have yet has there what it left rows from before with.
    """
    tables = []
    names = [column.storage_name for column in shape.columns]
    wanted = {"_op", "_old", *names, *(f"_text.{name}" for name in names)}
    for column in shape.key_columns:
        wanted |= {f"_old.{column.storage_name}", f"_old._text.{column.storage_name}"}
    for piece_shape, rows in pieces:
        _check_told(shape, piece_shape)
        arrays = {name: rows.column(name) for name in rows.schema.names if name in wanted}
        captured = {column.attnum: column for column in piece_shape.columns}
        for column in shape.columns:
            if column.attnum not in captured:
                arrays |= stored_missing(column, rows.num_rows)
            else:
                _widen(arrays, column, storage_type(captured[column.attnum].type), shape)
        for name, flags in unchanged_flags(piece_shape, rows).items():
            arrays[f"_u.{name}"] = pa.array(flags)
        tables.append(pa.table(arrays))
    if not tables:
        raise ValueError("nothing to fold")
    return pa.concat_tables(tables, promote_options="default")


def _widen(arrays: dict[str, pa.Array], column: Column, captured: pa.DataType, shape: TableShape) -> None:
    """Rows from before a column got its type: as that type has their values."""
    wanted = storage_type(column.type)
    if captured == wanted:
        return
    for name in (column.storage_name, f"_old.{column.storage_name}"):
        if name in arrays:
            try:
                arrays[name] = arrays[name].cast(wanted)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise TableError(
                    f"{shape.qualified_name}: column {column.name} has changed its type, and values from before do not "
                    f"fit it ({error}).",
                    remedy=f"Drop the mirror table of {shape.qualified_name} to load it anew.",
                ) from error


def _check_told(shape: TableShape, captured: TableShape) -> None:
    """Refuses rows with a column of which nobody knows which it is, if it can be one that the table has."""
    untold = [column.name for column in captured.columns if column.attnum < 0 and column not in shape.columns]
    numbers = {column.attnum for column in captured.columns}
    if untold and any(column.attnum not in numbers for column in shape.columns):
        raise TableError(
            f"{shape.qualified_name} was altered again before its earlier changes were read: which of its columns "
            f"{', '.join(untold)} was then cannot be told.",
            remedy=f"Drop the mirror table of {shape.qualified_name} to load it anew.",
        )


def _added(table: pa.Table) -> pa.Table:
    """Rows of a table without key, where none goes (see `counted` for those that do)."""
    return table.select([name for name in table.column_names if name.startswith(("c", "_text."))])


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table.column(name).to_numpy(), np.int64)


def _flags(table: pa.Table, name: str) -> Flags:
    return np.asarray(table.column(name).fill_null(False).to_numpy(), np.bool_)


def _events(shape: TableShape, table: pa.Table, ops: npt.NDArray[np.int64]) -> _Events:
    count = table.num_rows
    key_names = [column.storage_name for column in shape.key_columns]
    new_key = table.select(key_names)
    moved = moved_rows(table, ops, key_names)
    old_key = table.select([f"_old.{name}" for name in key_names]).rename_columns(key_names) if moved.any() else None
    numbers, keys = _number_keys(new_key, None if old_key is None else old_key.take(pa.array(np.flatnonzero(moved))))
    # The old key's event comes directly before the new one's.
    place = np.arange(count) + np.cumsum(moved)
    total = count + int(moved.sum())
    row, key, upsert = np.empty(total, np.int64), np.empty(total, np.int64), np.zeros(total, np.bool_)
    row[place], key[place], upsert[place] = np.arange(count), numbers[:count], ops != Op.DELETE
    gone = place[moved] - 1
    row[gone], key[gone] = np.flatnonzero(moved), numbers[count:]
    before = _previous_of_same_key(key)
    origin_key = key.copy()
    before[place[moved]], origin_key[place[moved]] = before[gone], key[gone]
    return _Events(row, upsert, key, before, origin_key, keys)


def moved_rows(table: pa.Table, ops: npt.NDArray[np.int64], key_names: Sequence[str]) -> Flags:
    """Which rows are updates that changed their key."""
    if "_old" not in table.column_names or f"_old.{key_names[0]}" not in table.column_names:
        return np.zeros(table.num_rows, np.bool_)
    old = np.asarray(table.column("_old").fill_null(OldImage.NONE).to_numpy(), np.int64)
    differs = np.zeros(table.num_rows, np.bool_)
    for name in key_names:
        new, before = comparable(table.column(name)), comparable(table.column(f"_old.{name}"))
        unequal = pc.not_equal(new, before).fill_null(False)
        differs |= np.asarray(unequal.to_numpy(), np.bool_)
    moved: Flags = (ops == Op.UPDATE) & (old != OldImage.NONE) & differs
    return moved


def _number_keys(new: pa.Table, old: pa.Table | None) -> tuple[Indexes, pa.Table]:
    """A number for each distinct key: for all rows of `new`, then of `old`; and the keys by number."""
    keys = new if old is None else pa.concat_tables([new, old])
    numbers = np.zeros(keys.num_rows, np.int64)
    for column in keys.columns:
        coded = comparable(column).combine_chunks().dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks() if coded.num_chunks else pa.array([], coded.type)
        codes = np.asarray(coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
        # Dense again after each column, so that the product cannot overflow.
        _, numbers = np.unique(numbers * (len(coded.dictionary) + 1) + codes + 1, return_inverse=True)
    _, first = np.unique(numbers, return_index=True)
    return numbers, keys.take(pa.array(first))


def _previous_of_same_key(key: Indexes) -> Indexes:
    order = np.argsort(key, kind="stable")
    before = np.full(len(key), _NOTHING, np.int64)
    same = key[order[1:]] == key[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _last_per_key(key: Indexes) -> Indexes:
    """The last event of each key, in the order in which they happened."""
    _, from_end = np.unique(key[::-1], return_index=True)
    return np.sort(len(key) - 1 - from_end)


def _value_sources(
    events: _Events, unchanged_rows: Flags, last: Indexes, shape: TableShape, column: Column
) -> tuple[Indexes, Flags]:
    """For each surviving event: the row that has its value of this column, and whether that is the target's."""
    has_value = events.upsert & ~unchanged_rows[events.row]
    follow = np.where(has_value | ~events.upsert, np.arange(len(events.row)), events.before)
    end = _ends(follow)[last]
    survives = events.upsert[last]
    in_target = survives & (end == _NOTHING)
    if (survives & ~in_target & ~events.upsert[end]).any():
        raise TableError(
            f"{shape.qualified_name}.{column.name}: a change keeps the value of a row that was deleted before it.",
            remedy=f"Drop the mirror table of {shape.qualified_name} to load it anew.",
        )
    return np.where(in_target | ~survives, events.row[last], events.row[end]), in_target


def _ends(follow: Indexes) -> Indexes:
    """Where following the links from each event ends; _NOTHING when they lead out of the batch."""
    # One more place at the end, for "nothing", which index -1 reaches and which links to itself.
    links = np.append(follow, _NOTHING)
    while True:
        further = links[links]
        if np.array_equal(further, links):
            return links[:-1]
        links = further


def _origins(shape: TableShape, events: _Events, last: Indexes) -> pa.Table:
    """The keys that the surviving rows had before the batch."""
    index = np.arange(len(events.row))
    first = _ends(np.where(events.before == _NOTHING, index, events.before))
    return events.keys.take(pa.array(events.origin_key[first[last]]))


def _final_rows(
    shape: TableShape, table: pa.Table, events: _Events, last: Indexes, sources: dict[str, Indexes]
) -> pa.Table:
    own = pa.array(events.row[last])
    gone = pa.array(~events.upsert[last])
    key_names = {column.storage_name for column in shape.key_columns}
    keys = events.keys.take(pa.array(events.key[last]))
    arrays: dict[str, pa.ChunkedArray] = {}
    for column in shape.columns:
        name = column.storage_name
        if name in key_names:
            arrays[name] = keys.column(name)
            continue
        index = pa.array(sources[name]) if name in sources else own
        # A deleted row's other columns mean nothing; a row whose key moved away has the new row's.
        index = pc.if_else(gone, pa.scalar(None, pa.int64()), index)
        arrays[name] = table.column(name).take(index)
        if f"_text.{name}" in table.column_names:
            arrays[f"_text.{name}"] = table.column(f"_text.{name}").take(index)
    return pa.table(arrays)

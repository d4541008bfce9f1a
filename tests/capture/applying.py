"""A reader that has nothing but the log: applies changes in order, the last one wins."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pgtide.change import OldImage, Op
from pgtide.log.reader import LogReader
from tests.database import Database

Row = tuple[Any, ...]


def applied(reader: LogReader, table: str) -> Counter[Row]:
    """The rows of the table as such a reader has them at the end.

    It takes no notice of changes to rows that it has not seen, which may come before all rows of a table are read.  A
    row that comes although it is there is an error: nothing may come twice.
    """
    shape = reader.shapes()[table]
    names = [column.storage_name for column in shape.columns]
    key = [names.index(column.storage_name) for column in shape.key_columns]
    rows = Rows(key)
    found: list[dict[str, Any]] = []
    for piece in reader.plan(reader.first_offset(), reader.end().end_offset, shape.relation_oid):
        found += reader.read(piece).rows.to_pylist()
    for change in sorted(found, key=lambda one: int(one["_offset"])):
        new = [change[name] for name in names]
        unchanged = int.from_bytes(change.get("_unchanged") or b"", "little")
        old = None
        if change.get("_old", OldImage.NONE) != OldImage.NONE and change["_op"] == Op.UPDATE:
            old = tuple(change.get(f"_old.{name}") for name in names)
        rows.apply(Op(change["_op"]), tuple(new), [bool(unchanged >> place & 1) for place in range(len(names))], old)
    return rows.all()


class Rows:
    def __init__(self, key: list[int]) -> None:
        self._key = key
        self._by_key: dict[Row, Row] = {}
        self._without_key: Counter[Row] = Counter()

    def apply(self, op: Op, new: Row, unchanged: list[bool], old: Row | None) -> None:
        if op is Op.TRUNCATE:
            self._by_key.clear()
            self._without_key.clear()
        elif not self._key:
            self._apply_without_key(op, new, old)
        elif op is Op.DELETE:
            self._by_key.pop(self._key_of(new), None)
        else:
            new = tuple(
                old[place] if kept and place in self._key and old is not None else value
                for place, (value, kept) in enumerate(zip(new, unchanged, strict=True))
            )
            before = None
            if op is Op.UPDATE:
                before = self._by_key.pop(self._key_of(new if old is None else old), None)
            assert self._key_of(new) not in self._by_key, f"it is there already: {new}"
            if before is not None:
                new = tuple(
                    was if kept and place not in self._key else now
                    for place, (was, now, kept) in enumerate(zip(before, new, unchanged, strict=True))
                )
            self._by_key[self._key_of(new)] = new

    def all(self) -> Counter[Row]:
        return +self._without_key if not self._key else Counter(self._by_key.values())

    def _apply_without_key(self, op: Op, new: Row, old: Row | None) -> None:
        if op is Op.DELETE:
            self._without_key[new] -= 1
            return
        if old is not None:
            self._without_key[old] -= 1
        self._without_key[new] += 1

    def _key_of(self, row: Row) -> Row:
        return tuple(row[place] for place in self._key)


def in_source(database: Database, query: str) -> Counter[Row]:
    return Counter(database.rows(query))

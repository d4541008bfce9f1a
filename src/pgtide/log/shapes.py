"""Shapes in the log: `schemas/<relation oid>/<fingerprint>.json`, durable before a block refers to them.

A table may go back to a shape that it had before.  Each file therefore says in which turn, counted per table, its shape
was taken last: the one with the highest turn is the table's shape now, and no block has to be read to know it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from pgtide.errors import LogCorruptError, LogUnreachableError
from pgtide.log.folder import Folder
from pgtide.log.storage import Location, storage_at
from pgtide.schema import TableShape

_FOLDER = "schemas"


@dataclass(frozen=True, slots=True)
class _Recorded:
    shape: TableShape
    first_seen_offset: int
    turn: int


class ShapeStore:
    def __init__(self, location: Location, check_not_fenced: Callable[[], None] = lambda: None) -> None:
        """`check_not_fenced` raises once another writer has the log; only who saves on an object store needs it."""
        self._storage = storage_at(location)
        self._check_not_fenced = check_not_fenced
        self._known: dict[tuple[int, str], TableShape] = {}
        self._current: dict[int, _Recorded] = {}  # of the tables that this process has saved shapes of

    def save(self, shape: TableShape, offset: int) -> None:
        """Makes it durable that the table has this shape from `offset` on; does nothing while it is so already."""
        oid, name = shape.relation_oid, _name(shape.relation_oid, shape.fingerprint)
        while oid not in self._current or self._current[oid].shape.fingerprint != shape.fingerprint:
            # First the version, then the turns, then whether we still are the writer: on an object store one that was
            # thought dead may get here, or its request arrive later, and must not undo what its successor has saved.
            found = self._storage.versioned(name)
            recorded = {each.shape.fingerprint: each for each in self._recorded(f"{_FOLDER}/{oid}", readable=True)}
            newest = max(recorded.values(), key=_order, default=None)
            if newest is not None and newest.shape == shape:
                self._current[oid] = newest
                return
            if newest is not None:
                self._check_not_fenced()
            before = recorded.get(shape.fingerprint)
            first_seen_offset = offset if before is None else before.first_seen_offset
            taken = _Recorded(shape, first_seen_offset, 1 if newest is None else newest.turn + 1)
            if self._put(name, _encoded(taken), found[1] if found else None):
                self._current[oid] = taken

    def _put(self, name: str, data: bytes, version: str | None) -> bool:
        """Whether it is written; not if somebody else was faster, which only an object store has to tell."""
        if isinstance(self._storage, Folder):
            self._storage.write(name, data)
            return True
        made = self._storage.create(name, data) if version is None else self._storage.replace(name, data, version)
        return made is not None

    def load(self, relation_oid: int, fingerprint: str) -> TableShape:
        key = (relation_oid, fingerprint)
        if key not in self._known:
            self._known[key] = self._read(_name(*key)).shape
        return self._known[key]

    def seen(self) -> list[TableShape]:
        """All shapes that can be read, each table's in the order of its turns."""
        found = []
        for folder in self._folders():
            recorded = sorted(self._recorded(folder, readable=True), key=_order)
            self._current |= {each.shape.relation_oid: each for each in recorded[-1:]}
            found += [each.shape for each in recorded]
        return found

    def of(self, relation_oid: int) -> list[TableShape]:
        """The shapes of one table, in the order of their turns."""
        return [each.shape for each in sorted(self._recorded(f"{_FOLDER}/{relation_oid}"), key=_order)]

    def every(self) -> list[TableShape]:
        """All shapes, each table's in the order of its turns."""
        return [each.shape for folder in self._folders() for each in sorted(self._recorded(folder), key=_order)]

    def _folders(self) -> list[str]:
        return sorted({entry.name.rpartition("/")[0] for entry in self._storage.entries(_FOLDER)})

    def _recorded(self, folder: str, *, readable: bool = False) -> list[_Recorded]:
        """All shapes of one table; `readable`: without those that are damaged, which the writer can write again."""
        found = []
        for entry in self._storage.entries(folder):
            if entry.name.endswith(".json"):
                with contextlib.suppress(LogCorruptError) if readable else contextlib.nullcontext():
                    found.append(self._read(entry.name))
        return found

    def _read(self, name: str) -> _Recorded:
        where = f"{self._storage.location}/{name}"
        try:
            data = self._storage.read(name)
        except LogUnreachableError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise LogCorruptError(f"{where}: the shape of a table cannot be read: {reason}") from error
        recorded = _parsed(data, where)
        if not name.endswith(f"/{recorded.shape.fingerprint}.json"):
            raise LogCorruptError(
                f"{where}: the shape of {recorded.shape.qualified_name} is not the one that was saved"
            )
        return recorded


def _name(relation_oid: int, fingerprint: str) -> str:
    return f"{_FOLDER}/{relation_oid}/{fingerprint}.json"


def _encoded(recorded: _Recorded) -> bytes:
    content = {
        "first_seen_offset": recorded.first_seen_offset,
        "turn": recorded.turn,
        "shape": recorded.shape.to_json(),
    }
    return json.dumps(content, indent=1).encode()


def _parsed(data: bytes, where: str) -> _Recorded:
    try:
        content = json.loads(data)
        return _Recorded(TableShape.from_json(content["shape"]), content["first_seen_offset"], content.get("turn", 0))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise LogCorruptError(f"{where}: the shape of a table cannot be read: {reason}") from error


def _order(recorded: _Recorded) -> tuple[int, int]:
    return recorded.turn, recorded.first_seen_offset

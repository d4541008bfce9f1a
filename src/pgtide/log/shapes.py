"""Shapes in the log: `schemas/<relation oid>/<fingerprint>.json`, durable before a block refers to them.

A table may go back to a shape that it had before.  Each file therefore says in which turn, counted per table, its shape
was taken last: the one with the highest turn is the table's shape now, and no block has to be read to know it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from pgtide.errors import LogCorruptError
from pgtide.log.files import make_directory, replace_durably
from pgtide.schema import TableShape


@dataclass(frozen=True, slots=True)
class _Recorded:
    shape: TableShape
    first_seen_offset: int
    turn: int


class ShapeStore:
    def __init__(self, log_path: Path) -> None:
        self._folder = log_path / "schemas"
        self._known: dict[tuple[int, str], TableShape] = {}
        self._current: dict[int, _Recorded] = {}  # of the tables that this process has saved shapes of

    def save(self, shape: TableShape, offset: int) -> None:
        """Makes it durable that the table has this shape from `offset` on; does nothing while it is so already."""
        oid = shape.relation_oid
        if oid in self._current and self._current[oid].shape.fingerprint == shape.fingerprint:
            return
        recorded = {each.shape.fingerprint: each for each in self._recorded(self._folder / str(oid), readable=True)}
        newest = max(recorded.values(), key=_order, default=None)
        if newest is None or newest.shape != shape:
            before = recorded.get(shape.fingerprint)
            first_seen_offset = offset if before is None else before.first_seen_offset
            newest = _Recorded(shape, first_seen_offset, 1 if newest is None else newest.turn + 1)
            self._write(newest)
        self._current[oid] = newest

    def load(self, relation_oid: int, fingerprint: str) -> TableShape:
        key = (relation_oid, fingerprint)
        if key not in self._known:
            self._known[key] = self._read(self._path(*key)).shape
        return self._known[key]

    def seen(self) -> list[TableShape]:
        """All shapes that can be read, each table's in the order of its turns."""
        folders = sorted(self._folder.iterdir()) if self._folder.exists() else []
        return [each.shape for folder in folders for each in sorted(self._recorded(folder, readable=True), key=_order)]

    def latest(self) -> dict[int, TableShape]:
        """Per relation the shape that it has now."""
        folders = sorted(self._folder.iterdir()) if self._folder.exists() else []
        found = [max(self._recorded(folder), key=_order, default=None) for folder in folders]
        return {newest.shape.relation_oid: newest.shape for newest in found if newest is not None}

    def _recorded(self, folder: Path, *, readable: bool = False) -> list[_Recorded]:
        """All shapes of one table; `readable`: without those that are damaged, which the writer can write again."""
        names = os.listdir(folder) if folder.exists() else []
        found = []
        for name in names:
            if name.endswith(".json"):
                with contextlib.suppress(LogCorruptError) if readable else contextlib.nullcontext():
                    found.append(self._read(folder / name))
        return found

    def _write(self, recorded: _Recorded) -> None:
        path = self._path(recorded.shape.relation_oid, recorded.shape.fingerprint)
        content = {
            "first_seen_offset": recorded.first_seen_offset,
            "turn": recorded.turn,
            "shape": recorded.shape.to_json(),
        }
        make_directory(path.parent)
        replace_durably(path, json.dumps(content, indent=1).encode())

    def _path(self, relation_oid: int, fingerprint: str) -> Path:
        return self._folder / str(relation_oid) / f"{fingerprint}.json"

    def _read(self, path: Path) -> _Recorded:
        try:
            content = json.loads(path.read_bytes())
            recorded = _Recorded(
                TableShape.from_json(content["shape"]), content["first_seen_offset"], content.get("turn", 0)
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise LogCorruptError(f"{path}: the shape of a table cannot be read: {reason}") from error
        if recorded.shape.fingerprint != path.stem:
            raise LogCorruptError(f"{path}: the shape of {recorded.shape.qualified_name} is not the one that was saved")
        return recorded


def _order(recorded: _Recorded) -> tuple[int, int]:
    return recorded.turn, recorded.first_seen_offset

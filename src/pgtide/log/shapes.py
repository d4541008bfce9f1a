"""Shapes in the log: `schemas/<relation oid>/<fingerprint>.json`, durable before a block refers to them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pgtide.errors import LogCorruptError
from pgtide.log.files import make_directory, replace_durably
from pgtide.schema import TableShape


class ShapeStore:
    def __init__(self, log_path: Path) -> None:
        self._folder = log_path / "schemas"
        self._known: dict[tuple[int, str], TableShape] = {}

    def save(self, shape: TableShape, first_seen_offset: int) -> None:
        """Makes the shape durable; does nothing for one that is."""
        key = (shape.relation_oid, shape.fingerprint)
        if key in self._known:
            return
        path = self._path(*key)
        if not path.exists():
            make_directory(path.parent)
            content = {"first_seen_offset": first_seen_offset, "shape": shape.to_json()}
            replace_durably(path, json.dumps(content, indent=1).encode())
        self._known[key] = shape

    def load(self, relation_oid: int, fingerprint: str) -> TableShape:
        key = (relation_oid, fingerprint)
        if key not in self._known:
            self._known[key] = self._read(self._path(*key))[1]
        return self._known[key]

    def latest_seen(self) -> dict[int, TableShape]:
        """Per relation the shape that was recorded last."""
        latest: dict[int, tuple[int, TableShape]] = {}
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            for name in os.listdir(folder):
                if name.endswith(".json") and not name.startswith("."):
                    first_seen_offset, shape = self._read(folder / name)
                    if first_seen_offset >= latest.get(shape.relation_oid, (-1, shape))[0]:
                        latest[shape.relation_oid] = (first_seen_offset, shape)
        return {oid: shape for oid, (_, shape) in latest.items()}

    def _path(self, relation_oid: int, fingerprint: str) -> Path:
        return self._folder / str(relation_oid) / f"{fingerprint}.json"

    def _read(self, path: Path) -> tuple[int, TableShape]:
        try:
            content = json.loads(path.read_bytes())
            return content["first_seen_offset"], TableShape.from_json(content["shape"])
        except (OSError, ValueError, KeyError) as error:
            raise LogCorruptError(f"{path}: the shape of a table cannot be read: {error}") from error

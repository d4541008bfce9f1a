"""Objects under `large/` that no block names: of attempts that were given up, and of writers that were replaced.

One is known to be an orphan only when the log has passed its offset: before that, whoever stored it may still
create the block that names it.  Then the block at that offset tells.
"""

from __future__ import annotations

from pgtide.log.large import FOLDER, first_offset_of
from pgtide.log.reader import LogReader
from pgtide.log.storage import Storage


class OrphanSweep:
    """Remembers what it has looked at: a reference is for ever."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._named: set[str] = set()

    def sweep(self) -> int:
        """Removes orphans; returns how many."""
        log = LogReader(self._storage)
        first_offset, end_offset = log.first_offset(), log.end().end_offset
        unknown: dict[int, list[str]] = {}
        for entry in self._storage.entries(FOLDER):
            if first_offset <= first_offset_of(entry.name) < end_offset and entry.name not in self._named:
                unknown.setdefault(first_offset_of(entry.name), []).append(entry.name)
        removed = 0
        for offset, names in unknown.items():
            named = _named_at(log, offset)
            self._named |= named
            for name in set(names) - named:
                self._storage.delete(name)
                removed += 1
        return removed


def _named_at(log: LogReader, offset: int) -> set[str]:
    """The files that the block with this offset refers to."""
    return {
        f"{FOLDER}/{name}"
        for block in log.blocks(offset, offset + 1)
        if (large := log.directory(block).large) is not None
        for name, _ in large.files
    }

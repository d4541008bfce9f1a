"""Retention while the capture runs, and merging where the log is on an object store: every minute or half, in a thread
of its own, for a large log takes a while to look at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from pgtide.config import Log, is_url
from pgtide.errors import LogError
from pgtide.log.objects.merge import merge
from pgtide.log.objects.orphans import OrphanSweep
from pgtide.log.retention import plan_removal, remove
from pgtide.log.storage import storage_at
from pgtide.metrics import counter, gauge

INTERVAL_S, _STORE_INTERVAL_S = 60.0, 30.0
_losers = gauge("log_readers_losing_changes", "Readers that had not read what the last retention took.")
_merged = counter("log_objects_merged", "Objects made of many small ones.")


class Tidier:
    def __init__(self, location: str | Path, log: Log, warn: Callable[[str], None]) -> None:
        self._location = location
        self._log = log
        self._warn = warn
        self._interval_s = _STORE_INTERVAL_S if is_url(location) else INTERVAL_S
        self._next = 0.0
        self._thread: threading.Thread | None = None
        self._orphans: OrphanSweep | None = None

    def look(self, now_s: float) -> None:
        """Begins a round when it is time and the last one is over."""
        if now_s < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = now_s + self._interval_s
        self._thread = threading.Thread(target=self._tidy, name="pgtide-tidy", daemon=True)
        self._thread.start()

    def _tidy(self) -> None:
        try:
            if is_url(self._location):
                self._merge()
            self._retain()
        except (LogError, OSError) as error:
            self._warn(f"the log could not be tidied: {error}")

    def _merge(self) -> None:
        storage = storage_at(self._location)
        self._orphans = self._orphans or OrphanSweep(storage)
        _merged.inc(merge(storage))
        self._orphans.sweep()

    def _retain(self) -> None:
        hours, max_bytes = self._log.retention_hours, self._log.max_bytes
        removal = plan_removal(self._location, retention_s=hours * 3600, max_bytes=max_bytes)
        _losers.set(len(removal.losers))
        for reader in removal.losers:
            self._warn(
                f"the log is larger than log.max_bytes: reader {reader.name!r}, at offset {reader.offset}, "
                f"loses changes up to {removal.end_offset}"
            )
        remove(self._location, removal)

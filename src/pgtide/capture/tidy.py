"""Retention while the capture runs: every minute, in a thread of its own, for a large log takes a while to look at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from pgtide.config import Log
from pgtide.errors import LogError
from pgtide.log.retention import plan_removal, remove
from pgtide.metrics import gauge

INTERVAL_S = 60.0
_losers = gauge("log_readers_losing_changes", "Readers that had not read what the last retention took.")


class Tidier:
    def __init__(self, path: Path, log: Log, warn: Callable[[str], None]) -> None:
        self._path = path
        self._log = log
        self._warn = warn
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def look(self, now_s: float) -> None:
        """Begins a round when it is time and the last one is over."""
        if now_s < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = now_s + INTERVAL_S
        self._thread = threading.Thread(target=self._tidy, name="pgtide-retention", daemon=True)
        self._thread.start()

    def _tidy(self) -> None:
        try:
            hours, max_bytes = self._log.retention_hours, self._log.max_bytes
            removal = plan_removal(self._path, retention_s=hours * 3600, max_bytes=max_bytes)
            _losers.set(len(removal.losers))
            for reader in removal.losers:
                self._warn(
                    f"the log is larger than log.max_bytes: reader {reader.name!r}, at offset {reader.offset}, "
                    f"loses changes up to {removal.end_offset}"
                )
            remove(self._path, removal)
        except (LogError, OSError) as error:
            self._warn(f"retention could not work: {error}")

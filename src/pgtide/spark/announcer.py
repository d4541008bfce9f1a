"""Tells a person how loads get on: when one begins, every few seconds, and when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pgtide.log.load_progress import LoadProgress, load_line

_EVERY_S = 5.0


class Announcer:
    def __init__(
        self, tell: Callable[[str], None], every_s: float = _EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._every_s = every_s
        self._clock = clock
        self._told_at_s: dict[str, float] = {}
        self._changing = threading.Lock()

    def look(self, tables: Sequence[tuple[str, LoadProgress]]) -> None:
        """To be called whenever something may have changed, from any thread."""
        now_s = self._clock()
        with self._changing:
            for name, progress in tables:
                report = progress.report()
                if progress.is_under_way and now_s - self._told_at_s.get(name, -self._every_s) >= self._every_s:
                    self._told_at_s[name] = now_s
                    self._tell(f"{name}: {load_line(report)}")
                elif not progress.is_under_way and self._told_at_s.pop(name, None) is not None:
                    self._tell(f"{name}: loaded, {report['rows']:,} rows")

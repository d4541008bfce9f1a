"""Where the mirror's time goes, by step: kept in its report, so that a slow mirror can be looked at while it runs.

Tables are read and written several at a time, so the steps of a batch may add up to more than the batch took.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

BATCH = "batch"  # all of it; the others are parts
READ = "read"  # planning, and what the driver reads and folds itself; of many rows a survey, the rest comes with WRITE
WRITE = "write"  # branch, merge and forward; of many rows reading and folding too, because Spark does it in one go
POINT = "point"
UPKEEP = "upkeep"


class Timings:
    """Used by several threads at once."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._times: dict[str, int] = defaultdict(int)

    @contextmanager
    def of(self, step: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            with self._changing:
                self._seconds[step] += time.monotonic() - began_s
                self._times[step] += 1

    def report(self) -> dict[str, dict[str, float]]:
        with self._changing:
            return {
                step: {"times": self._times[step], "seconds": round(seconds, 3)}
                for step, seconds in self._seconds.items()
            }

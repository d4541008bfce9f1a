"""At most so many connections to the source at once, shared evenly by the tables that are being loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ConnectionLimit:
    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        self._sharing = 0
        self._changed = threading.Condition()

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """For the time in which a table may ask."""
        with self._changed:
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1

    @contextmanager
    def take(self, at_most: int = 1) -> Iterator[int]:
        """Waits until one is free; gives how many may be opened in the block: up to `at_most`, and to a fair share.

        Whoever has some must not ask for more: two who wait for each other would wait for ever.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0)
            share = max(1, self._count // max(1, self._sharing))
            taken = min(at_most, share, self._free)
            self._free -= taken
        try:
            yield taken
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()

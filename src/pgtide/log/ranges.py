"""Parts of objects that never change, fetched in few requests and kept for a while.

To plan with an object and read a table of it takes four small reads: the segment's header, a block's header, its
directory, the rows.  On a store each would be a request of some ten milliseconds; here the first brings what
usually is all of a small object, and the rest costs nothing.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_STEP_BYTES, _STEP_MAX_BYTES = 256 << 10, 4 << 20  # of one request, at least; it grows while one part follows the other
_KEPT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Part:
    position: int
    data: bytes
    total_bytes: int  # of the whole object

    def holds(self, position: int, length: int) -> bool:
        end = min(position + length, self.total_bytes)
        return self.position <= position and end <= self.position + len(self.data)


class Ranges:
    """`fetch(name, position, length)` gets a part; fewer bytes where the object ends.  Used by many threads."""

    def __init__(self, fetch: Callable[[str, int, int], Part]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._parts: OrderedDict[str, Part] = OrderedDict()  # of each object the last that was fetched
        self._kept_bytes = 0

    def read(self, name: str, position: int, length: int) -> bytes:
        with self._lock:
            part = self._parts.get(name)
        if part is None or not part.holds(position, length):
            step_bytes = _STEP_BYTES
            if part is not None and part.position < position <= part.position + len(part.data):
                step_bytes = min(2 * len(part.data), _STEP_MAX_BYTES)
            part = self._fetch(name, position, max(length, step_bytes))
            if part.data:
                self._keep(name, part)
        start = position - part.position
        return part.data[start : start + length]

    def total_bytes(self, name: str) -> int:
        with self._lock:
            part = self._parts.get(name)
        if part is None:
            part = self._fetch(name, 0, _STEP_BYTES)
            self._keep(name, part)
        return part.total_bytes

    def _keep(self, name: str, part: Part) -> None:
        with self._lock:
            before = self._parts.pop(name, None)
            self._parts[name] = part
            self._kept_bytes += len(part.data) - (len(before.data) if before else 0)
            while self._kept_bytes > _KEPT_BYTES and len(self._parts) > 1:
                self._kept_bytes -= len(self._parts.popitem(last=False)[1].data)


class RangedFile:
    """See `storage.OpenedFile`."""

    def __init__(self, ranges: Ranges, name: str) -> None:
        self._ranges = ranges
        self._name = name
        self._position = 0
        self._total_bytes = ranges.total_bytes(name)

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = (
            position + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._total_bytes}[whence]
        )
        return self._position

    def read(self, length: int, /) -> bytes:
        length = max(0, min(length, self._total_bytes - self._position))
        data = self._ranges.read(self._name, self._position, length) if length else b""
        self._position += len(data)
        return data

    def __enter__(self) -> RangedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None:
        """Nothing is open."""

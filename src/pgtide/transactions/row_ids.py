"""Which row each change of a transaction was made to, for sources that undo changes by naming rows.

Undone is the newest change of that row that is not undone yet.  Undoing goes backwards, so what is looked for is nearly
always the newest change of all, and a search from the end finds it at once.  An id is kept as a 128-bit digest, the one
of place p at byte 16 p: in memory first, and in a file beside the rows when these are spooled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from pgtide.log.block import outside
from pgtide.log.files import FILE_MODE
from pgtide.transactions.places import Places

ID_BYTES = 16
_WINDOW = 4096  # places that are looked at together

Digests = npt.NDArray[np.uint64]  # two numbers per place


class RowIds:
    def __init__(self) -> None:
        self.file: Path | None = None
        self.spooled = 0  # places below are in the file
        self.nbytes = 0  # of the others, in memory
        self._memory: list[Digests] = []
        self._window: tuple[int, Digests] = (0, np.empty((0, 2), np.uint64))  # of the file: first place, digests

    def append(self, ids: Sequence[bytes]) -> None:
        self._memory.append(np.array([_digest(row_id) for row_id in ids], np.uint64).reshape(-1, 2))
        self.nbytes += ID_BYTES * len(ids)

    def spill(self, file: Path) -> None:
        """Moves what is in memory to the file, which holds the places before already.

        Written at its place, not appended: behind what counts there may be what a process left that died.
        """
        if not self._memory:
            return
        data = np.concatenate(self._memory)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            view, at = memoryview(data.tobytes()), self.spooled * ID_BYTES
            while view:
                written = os.pwrite(descriptor, view, at)
                view, at = view[written:], at + written
        finally:
            os.close(descriptor)
        self.file, self._memory, self.nbytes = file, [], 0
        self.spooled += len(data)
        self._window = (0, np.empty((0, 2), np.uint64))

    def newest(self, row_id: bytes, places: Places) -> int | None:
        """The newest place of this row that is not left out; None if there is none."""
        wanted = np.array(_digest(row_id), np.uint64)
        end = places.end
        if end:
            first, digests = self._part_before(end)
            if digests[end - 1 - first].tobytes() == wanted.tobytes():  # nearly always: 4 µs instead of 200
                return end - 1
        while end > 0:
            first, digests = self._part_before(end)
            found = np.flatnonzero((digests[: end - first] == wanted).all(axis=1))
            if len(found):
                kept = found[outside(found + first, places.gone)]
                if len(kept):
                    return first + int(kept[-1])
            end = first
        return None

    def _part_before(self, end: int) -> tuple[int, Digests]:
        """A run of digests that holds the place before `end`, and its first place."""
        first = self.spooled + self.nbytes // ID_BYTES
        for digests in reversed(self._memory):
            first -= len(digests)
            if first < end:
                low = max(first, end - _WINDOW)
                return low, digests[low - first : end - first]
        if not self._window[0] < end <= self._window[0] + len(self._window[1]):
            assert self.file is not None
            first = max(0, end - _WINDOW)
            data = np.fromfile(self.file, np.uint64, 2 * (end - first), offset=first * ID_BYTES)
            self._window = (first, data.reshape(-1, 2))
        return self._window


def _digest(row_id: bytes) -> tuple[int, int]:
    number = xxhash.xxh3_128_intdigest(row_id)
    return number >> 64, number & (1 << 64) - 1

"""Places of a transaction: who wrote them, and which were rolled back.

A place is the number of a change within its transaction, in the order of arrival.  Changes come in long runs of one
subtransaction, so runs are kept, not rows; rolling back a savepoint turns its runs into ranges to leave out.  Sources
that do not name subtransactions tell which changes are undone, the newest first.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Range = tuple[int, int]  # from, to (exclusive)
Int64s = npt.NDArray[np.int64]


class Places:
    def __init__(self) -> None:
        self.count = 0  # places given so far
        self._runs: dict[int, list[Range]] = {}
        self._last: int | None = None  # subtransaction of the newest run
        self._gone: list[Range] = []

    def add(self, subxids: npt.NDArray[np.uint32]) -> None:
        """Gives the next places to changes of these subtransactions."""
        edges = np.flatnonzero(np.append(True, subxids[1:] != subxids[:-1])) if len(subxids) else np.empty(0, np.int64)
        bounds = [*edges.tolist(), len(subxids)]
        for low, high in itertools.pairwise(bounds):
            subxid = int(subxids[low])
            runs = self._runs.setdefault(subxid, [])
            start = self.count + low
            if runs and self._last == subxid and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], self.count + high)
            else:
                runs.append((start, self.count + high))
            self._last = subxid
        self.count += len(subxids)

    def roll_back(self, subxid: int) -> list[Range]:
        """The ranges that the subtransaction wrote: they are left out from now on."""
        gone = self._runs.pop(subxid, [])
        self._gone = merged([*self._gone, *gone])
        return gone

    def undo(self, place: int) -> None:
        """Leaves one place out from now on."""
        self._leave_out(place, place + 1)

    def undo_newest(self, count: int) -> None:
        """Leaves out the newest places that are not left out yet."""
        assert count <= self.kept, "more undone than done"
        while count:
            high = self.end
            low = next((range_high for _, range_high in reversed(self._gone) if range_high < high), 0)
            low = max(low, high - count)
            self._leave_out(low, high)
            count -= high - low

    def _leave_out(self, low: int, high: int) -> None:
        """Puts one range among those that are left out; it touches none of their places."""
        at = bisect.bisect(self._gone, (low, high))
        if at < len(self._gone) and self._gone[at][0] == high:
            high = self._gone.pop(at)[1]
        if at and self._gone[at - 1][1] == low:
            at -= 1
            low = self._gone.pop(at)[0]
        self._gone.insert(at, (low, high))

    @property
    def end(self) -> int:
        """The place behind the newest that is not left out; 0 if all are."""
        return self._gone[-1][0] if self._gone and self._gone[-1][1] == self.count else self.count

    @property
    def gone(self) -> list[Range]:
        """All places that were rolled back, ascending and apart from each other."""
        return self._gone

    @property
    def kept(self) -> int:
        return self.count - sum(high - low for low, high in self._gone)

    def forget_writers(self) -> None:
        """No subtransaction will be rolled back any more."""
        self._runs, self._last = {}, None

    def to_json(self) -> dict[str, Any]:
        runs = {str(subxid): ranges for subxid, ranges in self._runs.items()}
        return {"count": self.count, "runs": runs, "gone": self._gone}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Places:
        places = Places()
        places.count = data["count"]
        places._runs = {int(subxid): _ranges(ranges) for subxid, ranges in data["runs"].items()}
        places._gone = _ranges(data["gone"])
        return places


def _ranges(pairs: list[list[int]]) -> list[Range]:
    return [(low, high) for low, high in pairs]


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The same places in as few ranges as possible, ascending."""
    result: list[Range] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def dense(places: Int64s, ranges: Sequence[Range]) -> Int64s:
    """The places renumbered as if those in the ranges had never been; for places outside of them."""
    if not ranges:
        return places
    lows, highs = np.array(ranges, np.int64).T
    removed = np.concatenate(([0], np.cumsum(highs - lows)))
    return places - removed[np.searchsorted(lows, places, side="right")]

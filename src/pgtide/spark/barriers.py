"""Barriers, as the mirror sees them: LSNs at which somebody wants a point, to compare mirror and source there.

A barrier's place in the log is known once the log holds every transaction up to its LSN; a batch then ends there.
Until then nothing has to be held back: all that the log has lies before it.  A barrier whose asker died does no harm:
it is met like any other, and its note goes when it expires.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime

from pgtide.errors import LogRangeError
from pgtide.log.control import Barrier, BarrierState, barriers, put_barrier, remove_barrier
from pgtide.log.reader import LogReader
from pgtide.log.storage import Location

_FINAL = (BarrierState.PUBLISHED, BarrierState.PASSED)


class Barriers:
    """`look` and `answer` may be called by any thread, `placed` by the one that has the reader."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._changing = threading.Lock()
        self._open: dict[str, Barrier] = {}
        self._answered: set[str] = set()

    def look(self) -> None:
        """Takes note of new barriers, and says that they are seen."""
        with self._changing:
            present: dict[str, Barrier] = {}
            for barrier in barriers(self._location):
                if barrier.expires_at < datetime.now(UTC):
                    remove_barrier(self._location, barrier.id)
                else:
                    present[barrier.id] = barrier
            self._answered &= present.keys()
            self._open = {known: barrier for known, barrier in self._open.items() if known in present}
            for barrier in present.values():
                if barrier.state in _FINAL or barrier.id in self._answered or barrier.id in self._open:
                    continue
                put_barrier(self._location, replace(barrier, state=BarrierState.SEEN))
                if barrier.lsn is None:
                    self._answered.add(barrier.id)
                else:
                    self._open[barrier.id] = barrier

    def placed(self, reader: LogReader) -> list[tuple[int, int, Barrier]]:
        """Open barriers whose place is known: (LSN, offset, barrier), in order."""
        waiting = list(self._open.values())
        durable_lsn = reader.end().durable_lsn if waiting else 0
        known = [(barrier.lsn, barrier) for barrier in waiting if barrier.lsn is not None]
        return sorted(
            ((lsn, _place(reader, lsn), barrier) for lsn, barrier in known if lsn <= durable_lsn),
            key=lambda placed: placed[:2],
        )

    def answer(self, barrier: Barrier, state: BarrierState) -> None:
        with self._changing:
            put_barrier(self._location, replace(barrier, state=state))
            self._open.pop(barrier.id, None)
            self._answered.add(barrier.id)


def _place(reader: LogReader, lsn: int) -> int:
    try:
        return reader.position_after(lsn)
    except LogRangeError:
        return -1  # retention has taken the transactions after it: it is passed

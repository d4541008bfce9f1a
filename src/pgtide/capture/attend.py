"""What has to be looked after while changes are read: slot and publication, snapshots for loads, fences, retention.

Called by the reading thread every now and then, also while it waits for a log that cannot be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pgtide.capture.appender import Appender
from pgtide.capture.fence import Fence
from pgtide.capture.keeper import SnapshotKeeper
from pgtide.capture.start import Sides
from pgtide.capture.tidy import Tidier
from pgtide.capture.watch import SourceWatch

_INTERVAL_S = 0.2


class Attendant:
    """For one connection; what it looks after outlives it."""

    def __init__(
        self,
        sides: Sides,
        appender: Appender,
        source: SourceWatch,
        keeper: SnapshotKeeper,
        fence: Fence,
        tidier: Tidier,
        tell: Callable[[str], None],
    ) -> None:
        self._sides = sides
        self._appender = appender
        self._source = source
        self._keeper = keeper
        self._fence = fence
        self._tidier = tidier
        self._tell = tell
        self._told: tuple[str, ...] = ()
        self._next = 0.0

    def attend(self) -> None:
        """Does nothing unless it is time; raises what a person has to mend."""
        now_s = time.monotonic()
        if now_s < self._next:
            return
        self._next = now_s + _INTERVAL_S
        self._keeper.serve(self._sides.server)
        self._tidier.look(now_s)
        self._source.look(self._sides.side, now_s, self._appender.durable_lsn, self._appender.last_commit_s)
        self._fence.look(self._sides.side, now_s)
        self._tell_new(tuple(filter(None, (self._keeper.trouble, self._source.warning, *self._fence.notices))))

    def _tell_new(self, notices: tuple[str, ...]) -> None:
        """Says what has come up since the last look, once."""
        for text in notices:
            if text not in self._told:
                self._tell(text)
        self._told = notices

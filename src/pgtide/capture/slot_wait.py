"""Whom a slot that is being made waits for: told when it takes longer than a moment.

The server waits for every transaction that has written and is open, of all its databases, also for prepared ones; and
when these have ended, once or twice more for those that have begun meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgtide.replication.connect import Connection
from pgtide.replication.writers import Writer, next_transaction, open_writers

_PATIENCE_S = 3.0
_INTERVAL_S = 1.0
_NAMED_MAX = 5


class SlotWait:
    """For one slot; `look` is called now and then while it is being made."""

    def __init__(self, now_s: float) -> None:
        self._next_s = now_s + _PATIENCE_S
        self._before_xid: int | None = None
        self._writers: list[Writer] = []

    def look(self, source: Connection, now_s: float) -> str:
        """The open transactions by name; "" if the wait is short, or for nobody who can be named."""
        if now_s >= self._next_s:
            self._next_s = now_s + _INTERVAL_S
            self._before_xid = self._before_xid or next_transaction(source)
            self._writers = open_writers(source, self._before_xid)
            if not self._writers:
                self._before_xid, self._next_s = None, now_s + _PATIENCE_S
        return named(self._writers)


def named(writers: Sequence[Writer]) -> str:
    more = f" and {len(writers) - _NAMED_MAX} more" if len(writers) > _NAMED_MAX else ""
    return ", ".join(map(str, writers[:_NAMED_MAX])) + more

"""What the reading thread does besides reading: it answers the server, says what the capture is doing, and looks after
snapshots for loads, fences, retention, slot and publication now and then.

All of that goes on while nothing can be read because the log cannot be written: the connection stays alive, and
retention, which may be what makes room again, takes place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgtide.capture import watch
from pgtide.capture.alterations import AlterationWatch
from pgtide.capture.appender import Appender
from pgtide.capture.fence import Fence
from pgtide.capture.health import Health
from pgtide.capture.keeper import SnapshotKeeper
from pgtide.capture.start import Sides
from pgtide.capture.tidy import Tidier
from pgtide.failpoints import declare, reach
from pgtide.replication.stream import ReplicationStream

_ACKNOWLEDGED = declare("capture.acknowledged", "the server was told how far the log is durable")

# Walsenders miss wake-ups now and then; a status message releases them.  At least one in a second, whatever comes.
STATUS_INTERVAL_S = 0.9
_CONTROL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class CaptureState:
    """What the capture is doing, for people: streaming, or why not."""

    phase: str  # starting, streaming, reading, waiting, stopped
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Charges:
    """What is looked after; it outlives a connection."""

    source: watch.SourceWatch
    alterations: AlterationWatch
    keeper: SnapshotKeeper
    fence: Fence
    tidier: Tidier
    health: Health


class Attendant:
    """For the time of one connection."""

    def __init__(
        self,
        stream: ReplicationStream,
        sides: Sides,
        appender: Appender,
        charges: Charges,
        on_state: Callable[[CaptureState], None],
        warn: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._sides = sides
        self._appender = appender
        self._charges = charges
        self._on_state = on_state
        self._warn = warn
        self._acknowledged, self._answered_at = 0, 0.0
        self._next_control = 0.0
        self._said: str | None = None
        self._notices: tuple[str, ...] = ()
        self.spool_trouble: str | None = None  # why the spool cannot be written just now

    def answer_due_ms(self) -> int:
        """How long the next answer to the server can wait."""
        return max(0, math.ceil((self._answered_at + STATUS_INTERVAL_S - time.monotonic()) * 1000))

    def attend(self, *, asked: bool = False) -> None:
        """Does what is due, and returns at once; raises what a person has to mend.  `asked`: by the server."""
        self._appender.raise_failure()
        self._tell_trouble()
        now_s = time.monotonic()
        self._answer(now_s, asked)
        if now_s >= self._next_control:
            self._next_control = now_s + _CONTROL_INTERVAL_S
            self._look(now_s)

    def _tell_trouble(self) -> None:
        """Says once that the log cannot be written, and once that it can again."""
        trouble = self._appender.trouble or self.spool_trouble
        self._charges.health.beat(trouble or self._appender.delay)
        if trouble != self._said:
            self._said = trouble
            self._on_state(CaptureState("waiting", trouble) if trouble else CaptureState("streaming"))

    def _answer(self, now_s: float, asked: bool) -> None:
        durable_lsn = self._appender.durable_lsn
        if asked or durable_lsn > self._acknowledged or now_s - self._answered_at >= STATUS_INTERVAL_S:
            self._stream.send_status(durable_lsn)
            if durable_lsn > self._acknowledged:
                reach(_ACKNOWLEDGED)
            self._acknowledged, self._answered_at = durable_lsn, now_s
            watch.durable_lsn.set(durable_lsn)

    def _look(self, now_s: float) -> None:
        charges, side = self._charges, self._sides.side
        charges.keeper.serve(self._sides.server)
        charges.keeper.look_for_writers(side, now_s)
        charges.tidier.look(now_s)
        charges.source.look(side, now_s, self._appender.durable_lsn, self._appender.last_commit_s)
        charges.fence.look(side, now_s)
        charges.alterations.look(side, now_s)
        self._tell_new(tuple(filter(None, (charges.keeper.trouble, charges.source.warning, *charges.fence.notices))))

    def _tell_new(self, notices: tuple[str, ...]) -> None:
        """Says what has come up since the last look, once."""
        for text in notices:
            if text not in self._notices:
                self._warn(text)
        self._notices = notices

"""Upkeep of the lake tables: small files are put together, and versions that no kept point needs are let go.

A round comes every `compact_minutes` and is done in pieces, between batches: points first, so that it is known which
versions are needed, then each table.  No batch runs during a piece, and a piece is bounded, so batches wait for
seconds at most.  When the last round was is noted beside the log: short runs come to a round too.

Nothing depends on upkeep.  What fails is told and left to the next round; parked tables, which may not even be ours,
are left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from pgtide.config.model import Mirror
from pgtide.failpoints import declare, reach
from pgtide.log.control import last_upkeep, record_upkeep
from pgtide.log.storage import Location
from pgtide.sinks import Sink
from pgtide.spark.apply import MirrorTable
from pgtide.spark.kept_points import all_kept_since
from pgtide.spark.points import Points
from pgtide.spark.reason import reason

_STEP_S = 1.0
_GOES_MAX = 100  # of one piece, in one round
# Whoever looks for a point reads the points table in several queries at one version.
_POINTS_READABLE_FOR = timedelta(minutes=10)

COMPACTED = declare("mirror.upkeep.compacted", "a table is compacted, old versions are still there")
EXPIRED = declare("mirror.upkeep.expired", "old versions of a table are gone, those of others are still there")

Piece = Callable[[], bool]  # true: it wants another go

_log = logging.getLogger("pgtide")


class Upkeep:
    def __init__(self, sink: Sink, points: Points, log_location: Location, settings: Mirror) -> None:
        self._sink = sink
        self._points = points
        self._log_location = log_location
        self._every = timedelta(minutes=settings.compact_minutes)
        self._keep_s = settings.keep_points_hours * 3600
        self._pieces: deque[tuple[str, Piece, int]] = deque()
        self._needed: dict[str, set[int]] | None = None  # versions that kept points name, by table
        self._expire_before = datetime.min.replace(tzinfo=UTC)
        self._compacted: dict[str, int | None] = {}  # the version that the last compaction left
        self._finished_at = last_upkeep(log_location)
        self._errors: dict[str, str] = {}

    def is_due(self) -> bool:
        """Whether there is something to do now."""
        if self._pieces:
            return True
        if not self._every:
            return False
        if self._finished_at is None:
            self._note_round()  # a new mirror has nothing to keep up yet
        return self._finished_at is None or datetime.now(UTC) - self._finished_at >= self._every

    def step(self, tables: Iterable[MirrorTable], stop: threading.Event) -> bool:
        """Does some pieces of a round, for a second or until one has taken longer; returns whether more are left."""
        if not self._pieces:
            self._begin_round(list(tables))
        began_s = time.monotonic()
        while self._pieces and time.monotonic() - began_s < _STEP_S and not stop.is_set():
            name, piece, goes = self._pieces.popleft()
            try:
                if piece() and goes < _GOES_MAX:
                    self._pieces.appendleft((name, piece, goes + 1))
            except Exception as error:  # noqa: BLE001 - the mirror is right without upkeep
                if stop.is_set():
                    return False  # it was interrupted
                self._errors[name] = reason(error)
                _log.warning("upkeep of %s failed, and will be tried again: %s", name, self._errors[name])
        if not self._pieces:
            self._note_round()
        return bool(self._pieces)

    def report(self) -> dict[str, Any]:
        """For people: when the last round ended, and what failed in it."""
        return {"finished_at": self._finished_at and self._finished_at.isoformat(), "errors": dict(self._errors)}

    def _note_round(self) -> None:
        self._finished_at = datetime.now(UTC)
        record_upkeep(self._log_location, self._finished_at)

    def _begin_round(self, tables: list[MirrorTable]) -> None:
        self._errors.clear()
        self._needed = None
        # Versions made after this moment stay, whatever points name them in the course of the round.
        self._expire_before = all_kept_since(datetime.now(UTC), self._keep_s)
        self._pieces.append((self._points.target, self._prune_points, 1))
        for table in tables:
            self._pieces.append((table.name, partial(self._compact, table), 1))
            self._pieces.append((table.name, partial(self._expire, table), 1))
        self._pieces.append((self._points.target, self._expire_points, 1))

    def _prune_points(self) -> bool:
        self._points.prune(self._keep_s)
        self._needed = self._points.versions()
        return False

    def _compact(self, table: MirrorTable) -> bool:
        version = table.version
        if table.error or version is None or self._compacted.get(table.target) == version.snapshot_id:
            return False
        more = self._sink.compact(table.target)
        reach(COMPACTED)
        recorded = self._sink.recorded(table.target)
        # With another mark it is somebody else's doing: the next write meets a Conflict, and looks closer.
        if recorded is not None and recorded.mark == version.mark:
            table.version = recorded
            if not more:
                self._compacted[table.target] = recorded.snapshot_id
        return more

    def _expire(self, table: MirrorTable) -> bool:
        if table.error or table.version is None or self._needed is None:
            return False
        needed = {*self._needed.get(table.name, ()), table.version.snapshot_id or 0}
        self._sink.sweep(table.target)
        more = self._sink.expire(table.target, needed, self._expire_before)
        reach(EXPIRED)
        return more

    def _expire_points(self) -> bool:
        self._sink.sweep(self._points.target)
        before = datetime.now(UTC) - _POINTS_READABLE_FOR
        return self._sink.expire(self._points.target, (), before)

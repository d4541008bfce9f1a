"""What there is to see at one moment: rows on both sides, how far log and mirror are, how much traffic there was."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from pgtide.config import Config
from pgtide.demo import shop
from pgtide.demo.lake import mirror_rows
from pgtide.demo.traffic import Tally, Traffic
from pgtide.errors import LogError
from pgtide.log.reader import LogEnd, LogReader
from pgtide.lsn import parse_lsn


@dataclass(frozen=True, slots=True)
class PointSeen:
    """The newest consistent point that the mirror says it has published."""

    lsn: int
    offset: int
    commit_timestamp: datetime | None  # None: the tables as they were loaded, before the first change

    @property
    def age_s(self) -> float | None:
        if self.commit_timestamp is None:
            return None
        return max(0.0, (datetime.now(UTC) - self.commit_timestamp).total_seconds())


@dataclass(frozen=True, slots=True)
class Seen:
    at_s: float  # time.monotonic()
    source_rows: dict[str, int]
    mirror_rows: dict[str, int | None]
    tally: Tally
    wal_lsn: int
    log: LogEnd | None  # None: not created yet
    applied_offset: int | None  # None: the mirror has not reported yet
    point: PointSeen | None
    states: dict[str, str]
    troubles: tuple[str, ...]  # of parked tables

    @property
    def log_lag_bytes(self) -> int | None:
        return None if self.log is None else max(0, self.wal_lsn - self.log.durable_lsn)

    @property
    def mirror_lag_changes(self) -> int | None:
        """Changes that are in the log and not in the mirror."""
        if self.log is None or self.applied_offset is None:
            return None
        return max(0, self.log.end_offset - self.applied_offset)

    @property
    def loaded(self) -> bool:
        """Whether every table has its first rows, none is parked, and there is a point."""
        streaming = all(self.states.get(table.qualified_name) == "streaming" for table in shop.TABLES)
        return streaming and self.point is not None


class Observer:
    """Looks at the source by one connection of its own, and at log and lake by their files."""

    def __init__(self, dsn: str, config: Config, traffic: Traffic) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._config = config
        self._traffic = traffic
        self._reader: LogReader | None = None
        self._point: PointSeen | None = None

    def close(self) -> None:
        self._connection.close()

    def look(self) -> Seen:
        mirror = self._mirror_report()
        if mirror.get("point"):
            self._point = _point(
                mirror["point"]
            )  # a mirror that has just started has none to tell; the last one stands
        tables: dict[str, dict[str, Any]] = mirror.get("tables", {})
        lake = Path(self._config.warehouse) / (self._config.mirror.namespace or shop.SCHEMA)
        return Seen(
            at_s=time.monotonic(),
            source_rows=shop.counts(self._connection),
            mirror_rows={table.name: mirror_rows(lake / table.name) for table in shop.TABLES},
            tally=self._traffic.tally(),
            wal_lsn=self._wal_lsn(),
            log=self._log_end(),
            applied_offset=mirror.get("offset"),
            point=self._point,
            states={name: found["state"] for name, found in tables.items()},
            troubles=tuple(f"{name}: {found['error']}" for name, found in tables.items() if found.get("error")),
        )

    def _wal_lsn(self) -> int:
        row = self._connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def _log_end(self) -> LogEnd | None:
        try:
            self._reader = self._reader or LogReader(self._config.log_location)
            return self._reader.end()
        except LogError:
            return None  # the capture has not created it yet; if it cannot, it ends and says so

    def _mirror_report(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads((self._config.log_path / "readers" / "mirror.json").read_bytes())
        except FileNotFoundError:
            return {}
        return report


def _point(report: dict[str, Any]) -> PointSeen:
    committed = report["commit_timestamp"]
    return PointSeen(parse_lsn(report["lsn"]), report["offset"], committed and datetime.fromisoformat(committed))


class CatchUp:
    """Whether the mirror holds all that was committed up to an LSN of the source, with a point published for it."""

    def __init__(self, lsn: int) -> None:
        self._lsn = lsn
        self._offset: int | None = None

    def __call__(self, seen: Seen) -> bool:
        if self._offset is None and seen.log is not None and seen.log.durable_lsn >= self._lsn:
            self._offset = seen.log.end_offset
        if self._offset is None or seen.applied_offset is None or seen.point is None:
            return False
        return seen.applied_offset >= self._offset and seen.point.offset >= self._offset

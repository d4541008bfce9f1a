"""Keeps the database snapshot of a load alive up to an age, and makes another one when a load asks for it.

A snapshot that is kept for hours keeps vacuum from all rows that have died since, in the whole database.  So it is let
go when it is too old, whoever reads under it: a load goes on under a new one.

Making one waits until the transactions that are writing now have ended, so it happens in a thread of its own: the
stream goes on being read and answered meanwhile, and they are named.  So does looking for notes where that takes a
request to a store.
"""

from __future__ import annotations

import contextlib
import threading
import time

import psycopg

from pgtide.capture.slot_wait import SlotWait
from pgtide.capture.standby_snapshot import create_standby_slot, feedback_warning
from pgtide.capture.start import keep, new_snapshot
from pgtide.config import Config, is_url
from pgtide.errors import LogUnreachableError, PgtideError
from pgtide.log.control import offered_snapshot, requested_snapshot, withdraw_request, withdraw_snapshot
from pgtide.replication.connect import Connection, connect
from pgtide.replication.server import Server, reached
from pgtide.replication.slot import KeptSnapshot

_RETRY_S = 5.0
_STORE_INTERVAL_S = 1.0


class SnapshotKeeper:
    """Serves the notes in the log's control folder; `serve` is called now and then by one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kept: KeptSnapshot | None = None
        self._kept_until = 0.0
        self._maker: threading.Thread | None = None
        self._wanted: tuple[str, ...] = ()
        self._wait = SlotWait(0.0)
        self._waiting = ""  # for whom, while a snapshot is being made
        self._behind = ""  # that it is the standby that is waited for
        self._warning = ""  # why the one that is kept may not last
        self._looker: threading.Thread | None = None
        self._next_look = 0.0
        self._making: Connection | None = None
        self._closed = False
        self._not_before = 0.0
        self._failure: str | None = None  # why the last request could not be met; it is tried again

    @property
    def trouble(self) -> str | None:
        """Why a load that has asked for a snapshot has none yet, or may lose it; None if there is nothing to tell."""
        return self._behind or self._waiting or self._failure or self._warning or None

    def keep(self, kept: KeptSnapshot) -> None:
        self._release()
        self._hold(kept)

    def _hold(self, kept: KeptSnapshot) -> None:
        self._kept, self._kept_until = kept, time.monotonic() + self._config.snapshot.max_age_minutes * 60

    def serve(self, server: Server) -> None:
        """Lets a snapshot go that nobody needs any more, and begins to make the one that a load asks for."""
        if not is_url(self._config.log_location):
            self._look(server)
        elif (self._looker is None or not self._looker.is_alive()) and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _STORE_INTERVAL_S
            self._looker = threading.Thread(target=self._look_at_store, args=[server], name="pgtide-notes", daemon=True)
            self._looker.start()

    def look_for_writers(self, source: Connection, now_s: float) -> None:
        """Finds out who keeps a snapshot from being made, if it takes long."""
        if self._maker is None or not self._maker.is_alive():
            self._waiting = ""
            return
        named = self._wait.look(source, now_s)
        tables = ", ".join(self._wanted)
        self._waiting = (
            f"the snapshot to load {tables} is made when open transactions have ended: {named}" if named else ""
        )

    def _look_at_store(self, server: Server) -> None:
        # A store that does not answer keeps the log from being written, and that is said.
        with contextlib.suppress(LogUnreachableError):
            self._look(server)

    def _look(self, server: Server) -> None:
        if self._closed or (self._maker is not None and self._maker.is_alive()) or time.monotonic() < self._not_before:
            return
        location = self._config.log_location
        if self._kept is not None and time.monotonic() >= self._kept_until:
            withdraw_snapshot(location)
        if self._kept is not None and offered_snapshot(location) is None:
            self._release()
        wanted = requested_snapshot(location)
        if wanted is None:
            self._failure = None
        else:
            self._release()
            self._wanted, self._wait = wanted, SlotWait(time.monotonic())
            self._maker = threading.Thread(
                target=self._make, args=[server, wanted], name="pgtide-snapshot", daemon=True
            )
            self._maker.start()

    def close(self) -> None:
        self._closed = True
        if self._making is not None:
            with contextlib.suppress(psycopg.Error):
                self._making.cancel()
        if self._maker is not None:
            self._maker.join(1)
        self._release()

    def _make(self, server: Server, tables: tuple[str, ...]) -> None:
        try:
            timeout_s = self._config.source.connect_timeout_seconds
            if self._config.source.read_from:
                self._make_on_standby(server, tables, timeout_s)
            else:
                with server.connect(replication=True, timeout_s=timeout_s) as self._making:
                    self._hold(new_snapshot(self._config, server, self._making, tables))
            withdraw_request(self._config.log_location)
        except (PgtideError, psycopg.Error, OSError) as error:
            self._failure = str(error)
            self._not_before = time.monotonic() + _RETRY_S
            return
        finally:
            self._making, self._behind = None, ""
        self._failure = None
        if self._closed:
            self._release()

    def _make_on_standby(self, server: Server, tables: tuple[str, ...], timeout_s: float) -> None:
        dsn = self._config.source.read_from
        with connect(dsn, replication=True, timeout_s=timeout_s) as self._making:
            standby = reached(dsn, self._making)
            created = create_standby_slot(self._making, server, timeout_s, lambda: self._closed, self._tell_behind)
            self._hold(keep(self._config, standby, created, tables, standby=True))
            self._warning = feedback_warning(self._making)

    def _tell_behind(self, text: str) -> None:
        self._behind = text

    def _release(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept, self._warning = None, ""

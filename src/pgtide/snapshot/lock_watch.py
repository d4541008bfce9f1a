"""Lets others through who wait for a load: whoever has waited for one of its locks for two seconds gets it.

A migration that waits for ACCESS EXCLUSIVE makes every later query on the table wait behind it, so a lock that is
harmless by itself stops an application.  The reading statement is cancelled, its range is read again later.

Readers are known by their application_name, which also says what they read, so that the load can tell a range that was
taken from it from one that took too long.  One that makes way again and again is longer than the pauses between others'
locks: it is cut as well.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import Counter

import psycopg

from pgtide.errors import PgtideError
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.server import Server

PATIENCE_S = 2.0
_POLL_S = 0.5
_IN_A_ROW_MAX = 3

# Not pg_stat_activity for those who wait: what others do is shown to few roles, who waits for a lock to all.
_IN_THE_WAY = """
SELECT r.application_name, r.pid
FROM pg_stat_activity r
WHERE starts_with(r.application_name, %(load)s) AND r.pid IN (
    SELECT unnest(pg_blocking_pids(w.pid)) FROM pg_locks w
    WHERE NOT w.granted AND w.locktype = 'relation'
      AND w.waitstart < clock_timestamp() - make_interval(secs => %(patience_s)s))"""


class LockWatch:
    """Watches for as long as the block lasts, over one connection of its own."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._load = f"pgtide load {secrets.token_hex(4)} "
        self._let_through: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pgtide-lock-watch", daemon=True)

    def __enter__(self) -> LockWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def reader_name(self, relation_oid: int) -> str:
        """The application_name of those who read this table."""
        return f"{self._load}{relation_oid}"

    def let_through(self, relation_oid: int) -> int:
        """How often readers of this table have made way so far."""
        return self._let_through[self.reader_name(relation_oid)]

    def _watch(self) -> None:
        connection: Connection | None = None
        while not self._over.wait(_POLL_S):
            try:
                connection = connection or self._server.connect(timeout_s=self._timeout_s)
                self._look(connection)
            except PgtideError:  # the readers notice it as well, and tell
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    def _look(self, connection: Connection) -> None:
        with postgres_errors("looking for who waits"):
            found = connection.execute(_IN_THE_WAY, {"load": self._load, "patience_s": PATIENCE_S}).fetchall()
            for name, pid in found:
                # Counted first: whoever is cancelled asks at once whether it was for this.
                self._let_through[name] += 1
                connection.execute("SELECT pg_cancel_backend(%s)", [pid])


class MakingWay:
    """How often one reader of a table has made way since it last got something read."""

    def __init__(self, watch: LockWatch, relation_oid: int) -> None:
        self._watch = watch
        self._relation_oid = relation_oid
        self._before = 0
        self._in_a_row = 0

    def begin(self) -> None:
        """Something is about to be read."""
        self._before = self._watch.let_through(self._relation_oid)

    def done(self) -> None:
        """It was read."""
        self._in_a_row = 0

    def made_way(self) -> bool:
        """Whether what was cancelled made way for somebody; if not, it took too long.  Asked once for each."""
        made_way = self._watch.let_through(self._relation_oid) > self._before
        self._in_a_row += made_way
        return made_way

    @property
    def too_often(self) -> bool:
        """Whether it is time to read less at once."""
        return self._in_a_row > 0 and self._in_a_row % _IN_A_ROW_MAX == 0

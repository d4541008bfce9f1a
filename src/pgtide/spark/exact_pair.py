"""A database snapshot and the LSN that agrees with it exactly, made beside a running capture.

A temporary slot gives the pair: the snapshot holds precisely the transactions whose end LSN is at or below the LSN.
The slot goes as soon as another connection has imported the snapshot, so it holds no WAL back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pgtide.config import Config
from pgtide.errors import TransientError
from pgtide.replication.connect import Connection, connect, postgres_errors
from pgtide.replication.server import reached
from pgtide.replication.slot import CreatedSlot, KeptSnapshot, Snapshot, create_slot

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ExactPair:
    snapshot: Snapshot
    lsn: int


@contextmanager
def exact_pair(config: Config, stop: threading.Event, limit_s: float) -> Iterator[ExactPair]:
    """A new pair; the snapshot can be imported until the end of the block."""
    dsn, timeout_s = config.source.dsn, config.source.connect_timeout_seconds
    with ExitStack() as opened:
        with connect(dsn, replication=True, timeout_s=timeout_s) as replication:
            server = reached(dsn, replication)
            keeper = opened.enter_context(server.connect(timeout_s=timeout_s))
            created = _created(replication, keeper, stop, limit_s)
            with postgres_errors("keeping a snapshot"):
                kept = KeptSnapshot(keeper, created.snapshot_name, server.started)
        yield ExactPair(kept.snapshot, created.consistent_lsn)


def _created(replication: Connection, side: Connection, stop: threading.Event, limit_s: float) -> CreatedSlot:
    """Making a slot waits for every transaction that is writing now: there is a limit to that, and `stop` ends it."""
    over = threading.Event()
    cancelled = threading.Event()
    deadline = time.monotonic() + limit_s

    def watch() -> None:
        while not over.wait(_POLL_S):
            if stop.is_set() or time.monotonic() > deadline:
                cancelled.set()
                replication.cancel_safe(timeout=1.0)
                return

    threading.Thread(target=watch, name="pgtide-pair", daemon=True).start()
    try:
        with postgres_errors("making a snapshot"):
            return create_slot(replication, f"pgtide_tmp_{replication.info.backend_pid}", temporary=True)
    except TransientError:
        if stop.is_set():
            raise KeyboardInterrupt from None
        if not cancelled.is_set():
            raise
        raise TransientError(
            f"no snapshot within {limit_s:g} s: it waits for transactions that are writing now: {_writers(side)}",
            remedy="Let them end, or end them (SELECT pg_terminate_backend(…)), and verify again.",
        ) from None
    finally:
        over.set()


def _writers(connection: Connection) -> str:
    with postgres_errors("looking at open transactions"):
        rows = connection.execute(
            "SELECT format('server process %s (%L, for %s s)', pid, application_name, "
            "              extract(epoch FROM clock_timestamp() - xact_start)::int8) "
            "FROM pg_catalog.pg_stat_activity WHERE backend_xid IS NOT NULL "
            "UNION ALL SELECT format('prepared transaction %L', gid) FROM pg_catalog.pg_prepared_xacts LIMIT 5"
        ).fetchall()
    return ", ".join(row[0] for row in rows) or "none any more"

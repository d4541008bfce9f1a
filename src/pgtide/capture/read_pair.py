"""The database snapshot under which the capture itself reads tables, and the LSN that agrees with it exactly.

At the first start it is the slot's own.  Later another one is made, from a temporary slot, while the stream is held
back before its LSN; so making it has a limit, since it waits for all transactions that are open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psycopg

from pgtide.capture.slot_wait import named
from pgtide.capture.standby_snapshot import StandbyBehindError, create_standby_slot, feedback_warning
from pgtide.config import Config
from pgtide.errors import TransientError
from pgtide.replication.connect import Connection, connect, postgres_errors, unless_stopped
from pgtide.replication.server import Server, reached
from pgtide.replication.slot import CreatedSlot, KeptSnapshot, create_slot
from pgtide.replication.writers import next_transaction, open_writers

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ReadPair:
    kept: KeptSnapshot
    lsn: int
    server: Server
    timestamp_us: int  # when the snapshot was taken, by the server's clock
    is_first: bool  # the slot's own: the log has nothing from before it
    made_s: float = field(default_factory=time.monotonic)

    def is_older_than(self, limit_s: float) -> bool:
        return time.monotonic() - self.made_s >= limit_s


def hold(config: Config, server: Server, created: CreatedSlot, *, is_first: bool) -> ReadPair:
    """Keeps the exported snapshot of a slot that was just made."""
    connection = server.connect(timeout_s=config.source.connect_timeout_seconds)
    try:
        with postgres_errors("keeping the snapshot"):
            kept = KeptSnapshot(connection, created.snapshot_name, server.started)
            row = connection.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8").fetchone()
    except BaseException:
        connection.close()
        raise
    assert row is not None
    return ReadPair(kept, created.consistent_lsn, server, int(row[0]), is_first)


def make_pair(
    config: Config, source: Server, limit_s: float, stop: threading.Event, warn: Callable[[str], None]
) -> ReadPair:
    """Another pair; TransientError if it cannot be had in time, or `stop` is set.  `warn`: that it may not last."""
    timeout_s, standby = config.source.connect_timeout_seconds, config.source.read_from
    with contextlib.ExitStack() as opened:
        if standby:
            replication = unless_stopped(stop, lambda: connect(standby, replication=True, timeout_s=timeout_s))
        else:
            replication = unless_stopped(stop, lambda: source.connect(replication=True, timeout_s=timeout_s))
        opened.enter_context(replication)
        server = reached(standby, replication) if standby else source
        side = opened.enter_context(unless_stopped(stop, lambda: source.connect(timeout_s=timeout_s)))
        before_xid = next_transaction(side)
        ended = opened.enter_context(_limited(replication, limit_s, stop))
        try:
            if standby:
                created = create_standby_slot(replication, source, timeout_s, ended.is_set, lambda _: None)
            else:
                with postgres_errors("making a snapshot"):
                    created = create_slot(replication, f"pgtide_tmp_{replication.info.backend_pid}", temporary=True)
        except TransientError as error:
            if ended.is_set() and not isinstance(error, StandbyBehindError):
                who = named(open_writers(side, before_xid))
                what = f"a snapshot could not be made within {limit_s:g} s"
                raise TransientError(what + (f", because of open transactions: {who}" if who else "")) from error
            raise
        pair = hold(config, server, created, is_first=False)
        if standby and (warning := feedback_warning(replication)):
            warn(warning)
        return pair


@contextlib.contextmanager
def _limited(connection: Connection, limit_s: float, stop: threading.Event) -> Iterator[threading.Event]:
    """Cancels what the connection does when the time is over or `stop` is set; the event says that it was so."""
    over, ended = threading.Event(), threading.Event()
    deadline_s = time.monotonic() + limit_s

    def watch() -> None:
        while not over.wait(_POLL_S):
            if stop.is_set() or time.monotonic() >= deadline_s:
                ended.set()
                with contextlib.suppress(psycopg.Error):
                    connection.cancel_safe(timeout=1.0)  # until it is over: one between two statements does nothing

    thread = threading.Thread(target=watch, name="pgtide-pair-limit", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()

"""An exact pair of snapshot and LSN on a standby, so that a load reads there and not from the source itself.

A temporary logical slot on the standby gives it, as on a primary; standbys can have one since Postgres 16.  The pair
must not be older than the log's history, so the standby has to have replayed the WAL that the source had when the pair
was asked for.  Making the slot waits for a record of the running transactions, which the source writes every 15 seconds
while something happens there, or at once when it is asked and the role may ask.

A standby that does not tell the source what its readers need (hot_standby_feedback) ends them, and the snapshot, when
it has to replay the vacuum of rows that they see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from pgtide.errors import SourceNotReadyError, TransientError
from pgtide.lsn import format_lsn, parse_lsn
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.server import Server
from pgtide.replication.slot import CreatedSlot, create_slot

_OLDEST_VERSION = 160000
_ASK_S = 0.5
_POLL_S = 0.1
_PATIENCE_S = 3.0


class StandbyBehindError(TransientError):
    """The wait for a standby that is behind was ended."""


def create_standby_slot(
    replication: Connection, source: Server, timeout_s: float, stopped: Callable[[], bool], tell: Callable[[str], None]
) -> CreatedSlot:
    """A temporary slot on the standby that `replication` leads to, with the snapshot that it exports.

    `tell` is called with what it waits for if that takes longer than a moment, and with "" when it does not any more.
    """
    with source.connect(timeout_s=timeout_s) as primary:
        needed_lsn = _checked_wal_end(replication, primary)
        _wait_for_replay(replication, needed_lsn, stopped, tell)
        with _asking_for_running_transactions(primary), postgres_errors("making a snapshot on the standby"):
            created = create_slot(replication, f"pgtide_tmp_{replication.info.backend_pid}", temporary=True)
    if created.consistent_lsn < needed_lsn:
        raise TransientError(f"the standby's snapshot is older than {format_lsn(needed_lsn)}")
    return created


def _checked_wal_end(standby: Connection, primary: Connection) -> int:
    """The WAL end of the source, if the standby is one of its own that can make snapshots."""
    with postgres_errors("looking at source and standby"):
        ours = primary.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()
        theirs = standby.execute("IDENTIFY_SYSTEM").fetchone()
        recovering = standby.execute("SELECT pg_is_in_recovery()").fetchone()
        wal_end = primary.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert ours
    assert theirs
    assert wal_end
    if theirs[0] != ours[0] or recovering != (True,):
        raise SourceNotReadyError(
            "source.read_from is not a standby of source.dsn", remedy="Name one of its standbys, or none."
        )
    if standby.info.server_version < _OLDEST_VERSION:
        raise SourceNotReadyError(
            f"the standby in source.read_from is Postgres {standby.info.server_version // 10000}; "
            "snapshots that agree with a place in the stream can be made on standbys since 16",
            remedy='Upgrade it, or read from the source itself: source.read_from = ""',
        )
    return parse_lsn(str(wal_end[0]))


def feedback_warning(standby: Connection) -> str:
    """What to set on a standby on which snapshots may not last; "" if it is set."""
    with postgres_errors("looking at the standby"):
        row = standby.execute("SELECT current_setting('hot_standby_feedback')::bool").fetchone()
    if row == (True,):
        return ""
    return (
        "the standby in source.read_from has hot_standby_feedback = off: it ends the snapshot of a load when rows that "
        "the load sees are vacuumed in the source. On the standby: "
        "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();"
    )


def _wait_for_replay(standby: Connection, lsn: int, stopped: Callable[[], bool], tell: Callable[[str], None]) -> None:
    pause, patient_until_s = threading.Event(), time.monotonic() + _PATIENCE_S
    while True:
        with postgres_errors("looking at the standby"):
            row = standby.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone()
        if row and row[0] and parse_lsn(row[0]) >= lsn:
            tell("")
            return
        behind = f"the standby is behind: a snapshot can be made there when it has replayed up to {format_lsn(lsn)}"
        if stopped():
            raise StandbyBehindError(behind)
        if time.monotonic() > patient_until_s:
            tell(behind)
        pause.wait(_POLL_S)


@contextmanager
def _asking_for_running_transactions(primary: Connection) -> Iterator[None]:
    """Asks until the block is over; a role that may not ask waits for the server to do it by itself."""
    over = threading.Event()

    def ask() -> None:
        try:
            while not over.wait(_ASK_S):
                primary.execute("SELECT pg_log_standby_snapshot()")
        except psycopg.Error:
            pass

    thread = threading.Thread(target=ask, name="pgtide-standby", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

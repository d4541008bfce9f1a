"""Who may still have rows of a table that the stream will never carry, and whom the making of a slot waits for.

The stream carries what is written after a table was published, and a transaction that began earlier may have written
before: it stays unseen until its commit, and then its earlier rows are not sent.  It holds its lock on the table until
it ends, so the locks tell when history is complete.  What such a transaction writes after the publication does arrive
(tried on 15, 16 and 18), so one that has not touched the table yet need not be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pgtide.lsn import parse_lsn
from pgtide.replication.connect import Connection, postgres_errors


@dataclass(frozen=True, slots=True)
class Writer:
    """An open transaction that has written; what a role may not see of others is None."""

    pid: int | None  # None: it is prepared, and belongs to no session
    gid: str | None
    user: str | None
    application: str | None
    since: datetime | None

    def __str__(self) -> str:
        since = f", since {self.since:%Y-%m-%d %H:%M:%S %Z}" if self.since else ""
        if self.pid is None:
            return f"prepared transaction {self.gid!r}{since}"
        return f"server process {self.pid} (user {self.user}, application {self.application!r}{since})"


def next_transaction(connection: Connection) -> int:
    """An xid, in 64 bits, above those of all transactions that have one now.

    One of our own: a snapshot's xmax follows the last transaction that has ended, and those that have begun since are
    above it.  A standby gives out none; there nothing is opened anyway.
    """
    query = """SELECT CASE WHEN pg_is_in_recovery() THEN pg_snapshot_xmax(pg_current_snapshot())::text
                           ELSE pg_current_xact_id()::text END"""
    with postgres_errors("reading the snapshot"):
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def older_writers(connection: Connection, relation_oid: int, before_xid: int) -> list[Writer]:
    """Open transactions below `before_xid` that have written to the table or one of its partitions."""
    with postgres_errors("looking for open transactions"):
        rows = connection.execute(_WRITERS, {"oid": relation_oid}).fetchall()
    return [Writer(*described) for xid, near_xid, *described in rows if _in_64_bits(xid, near_xid) < before_xid]


def open_writers(connection: Connection, before_xid: int) -> list[Writer]:
    """Open transactions below `before_xid`, of all databases: a slot that is being made waits for each of them."""
    with postgres_errors("looking for open transactions"):
        rows = connection.execute(_OPEN).fetchall()
    return [Writer(*described) for xid, near_xid, *described in rows if _in_64_bits(xid, near_xid) < before_xid]


def prepared_and_open(connection: Connection, xid: int) -> str | None:
    """The identifier of a prepared transaction that has not ended; None if it has, and a new snapshot shows its end."""
    with postgres_errors("looking at a prepared transaction"):
        near = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8").fetchone()
        assert near is not None
        row = connection.execute(
            """SELECT coalesce((SELECT gid FROM pg_prepared_xacts WHERE transaction = %(short)s::text::xid), '')
               WHERE pg_xact_status(%(long)s::text::xid8) = 'in progress'""",
            {"short": xid, "long": _in_64_bits(xid, near[0])},
        ).fetchone()
    return row[0] if row is not None else None


def insert_lsn(connection: Connection) -> int | None:
    """The end of the WAL that is being written; None on a standby, which writes none."""
    query = "SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_insert_lsn()::text END"
    with postgres_errors("reading the end of the WAL"):
        row = connection.execute(query).fetchone()
    return parse_lsn(row[0]) if row and row[0] else None


def wal_end_lsn(connection: Connection) -> int:
    """What commits behind this LSN commits after all that can be seen now; on a standby, too."""
    query = """SELECT (CASE WHEN pg_is_in_recovery() THEN greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn())
                            ELSE pg_current_wal_insert_lsn() END - '0/0')::int8"""
    with postgres_errors("reading the end of the WAL"):
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def _in_64_bits(xid: int, near_xid: int) -> int:
    """The 64-bit value with these lower 32 bits that is nearest to `near_xid`."""
    return near_xid + ((xid - near_xid + (1 << 31)) % (1 << 32)) - (1 << 31)


# A transaction holds a lock on its own xid, the oldest of which is that of the transaction as a whole.
# Asked from the leaf upwards: pg_partition_tree() would wait for the very locks that are looked at.
_WRITERS = """
SELECT min(own.transactionid::text::int8),
       (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8),
       held.pid, max(p.gid), max(a.usename::text), max(a.application_name), max(coalesce(a.xact_start, p.prepared))
FROM pg_locks held
JOIN pg_locks own ON own.virtualtransaction = held.virtualtransaction
     AND own.locktype = 'transactionid' AND own.mode = 'ExclusiveLock' AND own.granted
LEFT JOIN pg_stat_activity a ON a.pid = held.pid
LEFT JOIN pg_prepared_xacts p ON held.pid IS NULL AND p.transaction = own.transactionid
WHERE held.locktype = 'relation' AND held.granted
  AND held.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (held.relation = %(oid)s
       OR EXISTS (SELECT FROM pg_partition_ancestors(held.relation) a WHERE a.relid = %(oid)s::oid))
GROUP BY held.virtualtransaction, held.pid
ORDER BY max(coalesce(a.xact_start, p.prepared)), held.pid"""

_OPEN = """
SELECT min(own.transactionid::text::int8),
       (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8),
       own.pid, max(p.gid), max(a.usename::text), max(a.application_name), max(coalesce(a.xact_start, p.prepared))
FROM pg_locks own
LEFT JOIN pg_stat_activity a ON a.pid = own.pid
LEFT JOIN pg_prepared_xacts p ON own.pid IS NULL AND p.transaction = own.transactionid
WHERE own.locktype = 'transactionid' AND own.mode = 'ExclusiveLock' AND own.granted
GROUP BY own.virtualtransaction, own.pid
ORDER BY max(coalesce(a.xact_start, p.prepared)), own.pid"""

"""Rows that are there already, as changes in the log (`snapshot.reads_in_log`): for readers that have nothing else.

A snapshot S agrees with a place L in the stream: a transaction is in S if and only if it ends at or before L.  The
stream is read up to L and no further, then the rows as of S are written, then the stream goes on.  So whoever applies
the log in order has every table as of L when its rows have come, and every later change comes after them.  The server
keeps the WAL meanwhile.

Which tables are read is known from the log: the last transaction of a table says that it is.  A table that was not
finished is read from its beginning under the next pair, and its rows begin with a truncate, so that nothing of what
came before counts.  The same goes for tables that are captured later.

A pair is made while nothing is streamed, since nothing behind L may be in the log.  It waits for open transactions; if
they take too long the stream goes on, and the next attempt is made later, over a new connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psycopg

from pgtide.capture import watch
from pgtide.capture.appender import Reset, Work
from pgtide.capture.read_pair import ReadPair, make_pair
from pgtide.capture.read_round import ReadRound, ReadTable, RoundOver, TableBegun, TableFailed, TableRead
from pgtide.capture.start import Sides
from pgtide.change import Committed
from pgtide.config import Config
from pgtide.errors import LogNotWritableError, PgtideError, TransientError
from pgtide.failpoints import declare, reach
from pgtide.log.control import TableHistory, histories
from pgtide.log.reader import LogReader
from pgtide.log.reads import TableReads, finished_since, noted_reads, record_reads
from pgtide.log.storage import storage_at
from pgtide.replication.catalog import TableInfo
from pgtide.replication.connect import postgres_errors

_BEGUN = declare(
    "capture.reads.begun", "it is noted that tables are being read into the log, none of their rows is there"
)
_RANGE = declare("capture.reads.range", "some rows of a table were handed to the log as reads, others were not")
_WRITTEN = declare("capture.reads.written", "the rows of a table are in the log as reads, and that is not noted yet")
_NOTED = declare("capture.reads.noted", "it is noted that the rows of a table are in the log as reads")

_PAIR_LIMIT_S = 10.0
_WAIT_S = 0.2
_RETRY_FIRST_S, _RETRY_LAST_S = 2.0, 600.0


class Reads:
    """What is left to read; outlives a connection."""

    def __init__(self, config: Config, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._config = config
        self._tell = tell  # what it is doing, for people; "" when it is done
        self._warn = warn
        self._storage = storage_at(config.log_location, patience_s=0)
        self._pair: ReadPair | None = None
        self._noted: dict[int, TableReads] = {}
        self._due_s = float("inf")
        self._pause_s = _RETRY_FIRST_S

    def take(self, pair: ReadPair | None) -> None:
        """The slot's own pair, at a first start."""
        self._release()
        self._pair = pair

    def begin(
        self, sides: Sides, tables: Sequence[TableInfo], durable_lsn: int, stop: threading.Event
    ) -> ReadRound | None:
        """A round for the tables whose rows the log lacks; None if there are none, or no snapshot can be had now.

        To be called before anything is streamed: the stream must not have passed the round's LSN.
        """
        self._due_s = float("inf")
        if not self._config.snapshot.reads_in_log:
            return None
        with postgres_errors("looking for tables to read"):
            self._noted, left = self._left(tables, histories(self._storage), _existing(sides, tables))
        if not left:
            self._release()
            return None
        pair = self._usable(durable_lsn)
        if pair is None:
            self._tell("making a snapshot, to read tables into the log")
            try:
                pair = self._pair = make_pair(self._config, sides.server, _PAIR_LIMIT_S, stop, self._warn)
                if pair.lsn < durable_lsn:
                    raise TransientError("the snapshot is older than the log's end")
            except (PgtideError, psycopg.Error) as error:
                if stop.is_set():
                    return None
                self._try_later(f"tables cannot be read into the log now: {str(error).partition(chr(10))[0]}")
                return None
        begins = [
            ReadTable(table.oid, table.qualified_name, not pair.is_first or table.oid in self._noted) for table in left
        ]
        return ReadRound(self._config, pair, begins, sides.publications)

    def is_due(self) -> bool:
        """Whether it is time for another connection, because something is left to read."""
        return time.monotonic() >= self._due_s

    def run(
        self,
        round_: ReadRound,
        send: Callable[[list[Work]], None],
        settle: Callable[[], None],
        attend: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """Writes the round's rows; the log has everything up to its LSN, durably, and nothing behind it.

        `send` queues for the log, `settle` waits until that is durable, `attend` does what else is due.
        """
        self._note_begun(round_)
        failed: list[str] = []
        round_.start()
        try:
            while not stop.is_set():
                event = round_.next(_WAIT_S)
                attend()
                if isinstance(event, Committed | Reset):
                    send([event])
                    self._count(event)
                elif isinstance(event, TableBegun):
                    place = round_.tables.index(event.table) + 1
                    self._tell(f"reading {event.table.name} into the log (table {place} of {len(round_.tables)})")
                elif isinstance(event, TableRead):
                    settle()
                    if not stop.is_set():
                        self._note_finished(event.table)
                elif isinstance(event, TableFailed):
                    failed.append(event.why)
                elif isinstance(event, RoundOver):
                    settle()
                    self._over(event, failed)
                    return
        finally:
            round_.close()

    def close(self) -> None:
        self._release()

    def _left(
        self, tables: Sequence[TableInfo], known: Mapping[int, TableHistory], existing: set[int]
    ) -> tuple[dict[int, TableReads], list[TableInfo]]:
        """What is noted of tables that have not been away since, and the tables that are not finished."""
        before = noted_reads(self._storage)
        noted = {
            table.oid: before[table.oid]
            for table in tables
            if table.oid in before and before[table.oid].fence_xid == _fence_xid(known, table.oid)
        }
        begun = [note.from_offset for note in noted.values() if not note.finished]
        if begun:
            finished = finished_since(LogReader(self._storage), min(begun))
            noted = {oid: replace(note, finished=note.finished or oid in finished) for oid, note in noted.items()}
        if noted != before:
            self._record(noted)
        unread = [table for table in tables if table.oid not in noted or not noted[table.oid].finished]
        return noted, [table for table in unread if table.oid in existing]

    def _usable(self, durable_lsn: int) -> ReadPair | None:
        """The pair of an interrupted round, if nothing behind it is in the log and its snapshot still lives."""
        pair = self._pair
        if pair is not None and (durable_lsn > pair.lsn or not pair.kept.is_alive()):
            self._release()
        return self._pair

    def _note_begun(self, round_: ReadRound) -> None:
        known, end_offset = histories(self._storage), LogReader(self._storage).end().end_offset
        begun = {
            table.relation_oid: TableReads(table.name, _fence_xid(known, table.relation_oid), end_offset)
            for table in round_.tables
        }
        self._record(self._noted | begun)
        reach(_BEGUN)

    def _note_finished(self, table: ReadTable) -> None:
        reach(_WRITTEN)
        note = replace(self._noted[table.relation_oid], finished=True)
        self._record(self._noted | {table.relation_oid: note})
        reach(_NOTED)
        self._pause_s = _RETRY_FIRST_S

    def _record(self, noted: dict[int, TableReads]) -> None:
        try:
            record_reads(self._storage, noted)
        except OSError as error:
            reason = error.strerror or error
            raise LogNotWritableError(f"the log in {self._storage.location} cannot be written: {reason}") from error
        self._noted = noted

    def _count(self, event: Committed | Reset) -> None:
        if isinstance(event, Committed):
            watch.read_rows.inc(sum(table.rows.num_rows for table in event.tables))
            reach(_RANGE)

    def _over(self, event: RoundOver, failed: Sequence[str]) -> None:
        if event.error is not None:
            if isinstance(event.error, PgtideError):
                raise TransientError(f"reading tables into the log: {event.error.what}") from event.error
            raise event.error
        self._release()
        if failed:
            self._try_later(f"not all tables could be read into the log: {failed[0]}")
        elif not all(note.finished for note in self._noted.values()):
            self._due_s = time.monotonic()  # the snapshot became too old: the rest goes under another one
        else:
            self._tell("")

    def _try_later(self, why: str) -> None:
        self._release()
        self._tell("")
        self._warn(f"{why}; it is tried again in {self._pause_s:g} s")
        self._due_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_LAST_S)

    def _release(self) -> None:
        if self._pair is not None:
            self._pair.kept.release()
            self._pair = None


def _fence_xid(known: Mapping[int, TableHistory], relation_oid: int) -> int:
    return known[relation_oid].fence_xid if relation_oid in known else 0


def _existing(sides: Sides, tables: Sequence[TableInfo]) -> set[int]:
    """Those that were not dropped since."""
    rows = sides.side.execute(
        "SELECT oid::int8 FROM pg_catalog.pg_class WHERE oid::int8 = ANY(%s)", [[table.oid for table in tables]]
    ).fetchall()
    return {int(row[0]) for row in rows}

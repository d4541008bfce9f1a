"""What the stream has not said of tables, as the capture has noted it from the catalog (`control/alterations.json`).

A table that was altered, and none of whose rows was changed since, is brought to its shape by the note.  A table whose
rows were rewritten with other values since it was loaded, or came or went with a partition, is parked until it is
loaded anew: nothing that was sent can mend it.
"""

from __future__ import annotations

import time

from pgtide.errors import LogRangeError, TableError
from pgtide.log.control import Alteration, alterations
from pgtide.log.reader import LogReader
from pgtide.log.storage import Location
from pgtide.lsn import parse_lsn
from pgtide.schema import TableShape
from pgtide.sinks import Mark
from pgtide.spark.apply import Applier, MirrorTable

_LOOK_S = 1.0


class Alterations:
    """`look` is called by one thread; `follow` by several, each with a table of its own."""

    def __init__(self, location: Location, applier: Applier) -> None:
        self._location = location
        self._applier = applier
        self._noted: dict[int, Alteration] = {}
        self._unseen: set[int] = set()  # relations whose notes are news
        self._next = 0.0

    def look(self, reader: LogReader, done: int) -> tuple[set[int], int]:
        """The tables of which something new is noted that lies before offset `done`, and the LSN it was seen at."""
        now_s = time.monotonic()
        if now_s >= self._next:
            self._next = now_s + _LOOK_S
            found = alterations(self._location)
            self._unseen |= {oid for oid, note in found.items() if _is_news(note, self._noted.get(oid))}
            self._noted = found
        due = {oid for oid in self._unseen if _place(reader, self._noted[oid].seen_lsn) <= done}
        return due, max((self._noted[oid].seen_lsn for oid in due), default=0)

    def shapes(self, relation_oids: set[int], to: int) -> dict[int, TableShape]:
        """What these tables are like at `to`, as far as only a note says it."""
        found = {oid: self._unsent(oid, to) for oid in relation_oids}
        return {oid: shape for oid, shape in found.items() if shape is not None}

    def followed(self, relation_oids: set[int]) -> None:
        """These are done with, or have parked their tables, which come again by themselves."""
        self._unseen -= relation_oids

    def is_rewritten(self, table: MirrorTable, mark: Mark | None) -> bool:
        """Whether rows of the table have got other values in the source, unsent, since it was loaded."""
        note = self._noted.get(table.shape.relation_oid)
        if note is None or mark is None:
            return False
        start_lsn = self._applier.reader().identity.start_lsn
        _, at, lsn = (mark.load or "").rpartition("@")
        return note.rewritten_lsn > (parse_lsn(lsn) if at else start_lsn)

    def check(self, table: MirrorTable) -> None:
        """Refuses a table whose rows have other values in the source than were ever sent."""
        if self.is_rewritten(table, table.mark):
            raise TableError(
                f"{table.name} was rewritten in the source (ALTER … TYPE, a default that is worked out for each row, a "
                "partition that was attached, detached, dropped or truncated, a label of an enum that was renamed): "
                "rows have come, gone, or got other values, and nothing was sent. It is loaded anew.",
                remedy=f"If that does not help, drop the mirror table: DROP TABLE {table.target}",
            )

    def follow(self, table: MirrorTable, to: int) -> None:
        """To be called when all changes before `to` are in the table."""
        self.check(table)
        note = self._noted.get(table.shape.relation_oid)
        if note is None or note.shape is None or table.mark is None or table.mark.shape == note.shape.fingerprint:
            return
        shape = self._unsent(table.shape.relation_oid, to)
        if shape is not None:
            self._applier.reshape(table, shape, to)

    def _unsent(self, relation_oid: int, to: int) -> TableShape | None:
        """The shape that is noted, unless changes before `to` have brought it with them, or a newer one."""
        note, reader = self._noted[relation_oid], self._applier.reader()
        place = _place(reader, note.seen_lsn)
        sent = not _LONG_AGO < place <= to or reader.plan(place, to, relation_oid)
        return None if sent else note.shape


_LONG_AGO, _NOT_YET = -1, 1 << 62


def _place(reader: LogReader, lsn: int) -> int:
    """The first offset that comes after the LSN."""
    if reader.end().durable_lsn < lsn:
        return _NOT_YET
    try:
        return reader.position_after(lsn)
    except LogRangeError:  # retention has taken what came next: that was read long ago
        return _LONG_AGO


def _is_news(note: Alteration, before: Alteration | None) -> bool:
    """A first look that finds a table as it is says nothing."""
    return note != before and bool(note.rewritten_lsn or note.shape)

"""Notes what the catalog shows of altered and rewritten tables, for the mirror, which reads only the log.

A table's shape comes with the next change of a row, which may be never.  So a shape that is seen to be another is
noted, with an LSN from which on it holds.  Two looks are needed to be sure of that: a first that sees the change, and
a second that finds everything as the first left it; whatever commits between them has this shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pgtide.errors import LogError, LogUnreachableError
from pgtide.failpoints import declare, reach
from pgtide.log.control import Alteration, alterations, record_alterations
from pgtide.log.storage import Location
from pgtide.replication.catalog import Catalog
from pgtide.replication.connect import Connection
from pgtide.replication.rewrites import State, bring_rows, is_rewritten, new_branches, table_states

INTERVAL_S = 2.0

ALTERATION_NOTED = declare("capture.alteration.noted", "it is noted that a table was altered or rewritten")


class AlterationWatch:
    """Looks every few seconds.  What is noted outlives the process: a change while it is down is found as well."""

    def __init__(self, storage: Location, publications: Sequence[str], relation_oids: Sequence[int]) -> None:
        self._storage = storage
        self._publications = publications
        self._relation_oids = relation_oids
        self._noted: dict[int, Alteration] | None = None
        self._next = 0.0

    def look(self, connection: Connection, now_s: float) -> None:
        """Does nothing unless it is time."""
        if now_s < self._next:
            return
        self._next = now_s + INTERVAL_S
        if self._noted is None:
            try:
                self._noted = alterations(self._storage)
            except (LogUnreachableError, OSError):
                return  # told elsewhere, too
        states, lsn = table_states(connection, self._relation_oids)
        now: dict[int, Alteration] = {}
        settled = []
        for oid, state in states.items():
            before = self._noted.get(oid)
            if before is None:
                now[oid] = Alteration(state)
            elif not before.state.items() <= state.items():  # an older version has noted less
                rewritten_lsn = lsn if _is_rewritten(connection, before.state, state) else before.rewritten_lsn
                now[oid] = Alteration(state, lsn, rewritten_lsn)
            else:
                now[oid] = replace(before, state=state)
                if before.seen_lsn and before.shape is None:
                    settled.append(oid)
        if settled:
            shapes = Catalog(connection).shapes(settled, self._publications)
            again, _ = table_states(connection, settled)
            for oid in shapes.keys() & again.keys():
                if again[oid] == now[oid].state:
                    now[oid] = replace(now[oid], shape=shapes[oid])
        if now != self._noted:
            self._note(now)

    def _note(self, now: dict[int, Alteration]) -> None:
        try:
            record_alterations(self._storage, now)
        except (LogError, OSError):
            return  # the log cannot be written just now, which is told elsewhere: noted at a later look
        self._noted = now
        reach(ALTERATION_NOTED)


def _is_rewritten(connection: Connection, before: State, now: State) -> bool:
    if is_rewritten(before, now):
        return True
    new = new_branches(before, now)
    return bool(new) and bring_rows(connection, new)

"""Random histories as redo records, and what should come out of them.

Sessions insert, update and delete rows of two tables, in transactions that interleave and may go on for long; they roll
back to savepoints, run into failing statements, and roll back as a whole, and each change that is taken back is listed
as an undo record.  A row that an open transaction has changed is locked for the others, as it would be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pgtide.redo.records import Operation, Record, Values

_CLOCK_US = 1_700_000_000_000_000
_UNDOES = {
    Operation.INSERT: Operation.DELETE,
    Operation.UPDATE: Operation.UPDATE,
    Operation.DELETE: Operation.INSERT,
}

TABLES: tuple[dict[str, Any], ...] = (
    {
        "data_obj": 73001,
        "owner": "SHOP",
        "name": "ORDERS",
        "columns": [
            {"id": 1, "name": "ID", "type": "NUMBER(10)", "key": True},
            {"id": 2, "name": "TOTAL", "type": "NUMBER(12,2)"},
            {"id": 3, "name": "NOTE", "type": "VARCHAR2(400)"},
        ],
    },
    {
        "data_obj": 73002,
        "owner": "SHOP",
        "name": "ITEMS",
        "columns": [
            {"id": 1, "name": "ID", "type": "NUMBER(10)", "key": True},
            {"id": 2, "name": "TAKEN", "type": "TIMESTAMP(6)"},
            {"id": 3, "name": "CODE", "type": "RAW(16)"},
        ],
    },
)


@dataclass(slots=True)
class _Session:
    """An open transaction: what it did, newest last, and where its savepoints are in that."""

    xid: str
    long: bool
    done: list[Record] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)


@dataclass(slots=True)
class History:
    """`records()` once; afterwards `committed` has the changes that belong in the log, and `rows` the tables."""

    seed: int
    steps: int
    sessions: int = 5
    committed: list[list[Record]] = field(default_factory=list)  # by transaction, in commit order
    rows: dict[tuple[int, str], Values] = field(default_factory=dict)  # table and row id → values
    _random: random.Random = field(default_factory=random.Random)
    _inserted: list[tuple[int, str]] = field(default_factory=list)
    _locked: dict[tuple[int, str], str] = field(default_factory=dict)
    _scn: int = 1000
    _number: int = 0

    def records(self) -> Iterator[Record]:
        self._random.seed(self.seed)
        for table in TABLES:
            yield self._record(Operation.DDL, table=table)
        open_sessions: list[_Session] = []
        for _ in range(self.steps):
            if len(open_sessions) < self.sessions and self._random.random() < 0.3:
                open_sessions.append(self._begin())
                yield self._record(Operation.START, open_sessions[-1].xid)
            elif open_sessions:
                session = self._random.choice(open_sessions)
                yield from self._step(session, open_sessions)
        for session in open_sessions:
            yield from self._commit(session)

    def _begin(self) -> _Session:
        self._number += 1
        undo_segment, slot = self._random.randint(1, 20), self._random.randint(0, 33)
        return _Session(f"{undo_segment:04X}{slot:04X}{self._number:08X}", long=self._random.random() < 0.2)

    def _step(self, session: _Session, open_sessions: list[_Session]) -> Iterator[Record]:
        ending = 0.2 if session.long else 2
        kinds = ["change", "many changes", "savepoint", "roll back to savepoint", "failing statement", "end"]
        (kind,) = self._random.choices(kinds, [8, 2, 2, 2, 1, ending])
        if kind == "change":
            yield from self._changes(session, 1)
        elif kind == "many changes":
            yield from self._changes(session, self._random.randint(2, 30))
        elif kind == "savepoint":
            session.savepoints.append(len(session.done))
        elif kind == "roll back to savepoint" and session.savepoints:
            chosen = self._random.randrange(len(session.savepoints))
            yield from self._undo(session, session.savepoints[chosen])
            del session.savepoints[chosen + 1 :]
        elif kind == "failing statement":
            before = len(session.done)
            yield from self._changes(session, self._random.randint(1, 3))
            yield from self._undo(session, before)
        elif kind == "end":
            open_sessions.remove(session)
            yield from self._rollback(session) if self._random.random() < 0.3 else self._commit(session)

    def _changes(self, session: _Session, count: int) -> Iterator[Record]:
        for _ in range(count):
            row = self._random.choice(self._inserted) if self._inserted and self._random.random() < 0.5 else None
            if row in self.rows and self._locked.get(row, session.xid) == session.xid:
                record = self._change(session, row)
            else:
                record = self._insert(session)
            self._apply(session.xid, record)
            session.done.append(record)
            yield record

    def _insert(self, session: _Session) -> Record:
        table = self._random.choice(TABLES)["data_obj"]
        self._number += 1
        row_id = f"AAAR{self._number:014d}"
        self._inserted.append((table, row_id))
        values = self._values(table, self._number)
        return self._record(Operation.INSERT, session.xid, data_obj=table, row_id=row_id, new=values)

    def _change(self, session: _Session, row: tuple[int, str]) -> Record:
        (table, row_id), old = row, self.rows[row]
        if self._random.random() < 0.3:
            return self._record(Operation.DELETE, session.xid, data_obj=table, row_id=row_id, old=old)
        new = self._values(table, old["ID"])
        return self._record(Operation.UPDATE, session.xid, data_obj=table, row_id=row_id, new=new, old=old)

    def _values(self, table: int, key: int) -> Values:
        chance = self._random
        if table == TABLES[0]["data_obj"]:
            total = f"{chance.randint(-(10**9), 10**9) / 100:.2f}"
            note = None if chance.random() < 0.2 else "é" * chance.randint(0, 100)
            return {"ID": key, "TOTAL": total, "NOTE": note}
        taken = f"2024-02-29T12:{chance.randint(0, 59):02d}:00.{chance.randint(0, 999_999):06d}"
        return {"ID": key, "TAKEN": taken, "CODE": chance.randbytes(8).hex()}

    def _undo(self, session: _Session, down_to: int) -> Iterator[Record]:
        """Undo records for everything after that point, the newest first."""
        while len(session.done) > down_to:
            done = session.done.pop()
            undo = self._record(
                _UNDOES[done.operation], session.xid, data_obj=done.data_obj, row_id=done.row_id, rollback=True,
                new=done.old, old=done.new,
            )  # fmt: skip
            self._apply(session.xid, undo)
            yield undo

    def _apply(self, xid: str, record: Record) -> None:
        row = (record.data_obj, record.row_id)
        self._locked[row] = xid
        if record.new is None:
            del self.rows[row]
        else:
            self.rows[row] = record.new

    def _commit(self, session: _Session) -> Iterator[Record]:
        self.committed.append(session.done)
        yield self._end(Operation.COMMIT, session)

    def _rollback(self, session: _Session) -> Iterator[Record]:
        yield from self._undo(session, 0)
        yield self._end(Operation.ROLLBACK, session)

    def _end(self, operation: Operation, session: _Session) -> Record:
        self._locked = {row: xid for row, xid in self._locked.items() if xid != session.xid}
        return self._record(operation, session.xid)

    def _record(self, operation: Operation, xid: str = "", **fields: Any) -> Record:
        self._scn += self._random.choice([0, 0, 1, 2])  # records of one moment share their number
        return Record(self._scn, operation, xid, timestamp_us=_CLOCK_US + self._scn, **fields)

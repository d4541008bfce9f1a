"""The reader of redo logs: recorded files → transaction buffer → change log.

Everything is read once.  At a checkpoint open transactions are durable in the spool, committed ones in the log, and the
position, with the dictionary of tables, is where the next start goes on; the source may remove the files before it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pgtide.change import Committed, LargeTransaction
from pgtide.errors import DecodeError, LogError
from pgtide.failpoints import declare, reach
from pgtide.log.identity import FILE_NAME, LogIdentity, create_identity, read_identity
from pgtide.log.writer import LogWriter
from pgtide.lsn import format_lsn, parse_lsn
from pgtide.redo.dictionary import Change, rows_of, shape_of
from pgtide.redo.files import Located, numbers, read_from
from pgtide.redo.records import CHANGES, Operation, Record
from pgtide.schema import TableShape
from pgtide.transactions.persistent import PersistentBuffer
from pgtide.transactions.pieces import Commit
from pgtide.transactions.spool import Spool

_WRITTEN = declare(
    "redo.written", "committed transactions of the redo log are in the change log, the position is older"
)

_SYSTEM = "redo"
_HELD_CHANGES, _HELD_BYTES = 1000, 1 << 20  # of all transactions, before they are made columns
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int = 256 << 20  # of open transactions; beyond, they go to the spool
    piece_bytes: int = 8 << 20  # a transaction that was spooled enters the log as files if it is larger
    spool_max_bytes: int = 0  # 0: no limit
    checkpoint_bytes: int = 64 << 20  # of redo records between two checkpoints
    write_bytes: int = 4 << 20  # of committed rows that are made durable together


class RedoReader:
    """Reads a folder of recorded files into a log.  After an exception another one goes on from the last checkpoint.

    `on_position` is told an LSN at every checkpoint: files with lower numbers than its own are not needed any more.
    """

    def __init__(
        self,
        folder: Path,
        log_path: Path,
        *,
        database: str = "redo",
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
        on_position: Callable[[int], None] = lambda lsn: None,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._on_position = on_position
        self._tables: dict[int, dict[str, Any]] = {}
        self._shapes: dict[int, TableShape] = {}
        identity = _identity(folder, log_path, database)
        spool = Spool(log_path / "spool", limits.spool_max_bytes)
        self._buffer = PersistentBuffer(spool, limits.memory_bytes, limits.piece_bytes)  # alone from here on
        try:
            self._next_lsn = self._checkpoint_lsn = self._resume(identity)
            self._writer = LogWriter(log_path)
        except BaseException:
            self._buffer.close()
            raise
        self._durable_lsn = self._writer.durable_lsn  # what ends here or before is in the log
        self._held: dict[int, list[Change]] = {}
        self._held_changes = self._held_bytes = 0
        self._out: list[Committed] = []
        self._out_bytes = 0
        self._read_bytes = 0  # since the last checkpoint

    @property
    def position(self) -> int:
        """Where the next start would go on."""
        return self._checkpoint_lsn

    def run(self, stop: threading.Event) -> None:
        """Reads what is there and what is added, until `stop`."""
        while not stop.is_set():
            self.read_all(stop)
            stop.wait(_POLL_S)

    def read_all(self, stop: threading.Event | None = None) -> None:
        """Reads what is there now."""
        for located in read_from(self._folder, self._next_lsn):
            self._take(located)
            self._next_lsn = located.end_lsn
            self._read_bytes += located.end_lsn - located.lsn
            if self._read_bytes >= self._limits.checkpoint_bytes:
                self._checkpoint()
            if stop is not None and stop.is_set():
                break
        if self._next_lsn != self._checkpoint_lsn:
            self._checkpoint()

    def close(self) -> None:
        self._writer.close()
        self._buffer.close()

    def _resume(self, identity: LogIdentity) -> int:
        position = self._buffer.position
        if position is None:
            if numbers(self._folder)[:1] > [identity.start_lsn >> 32]:
                raise LogError(
                    f"the read position is lost, and so are the first files in {self._folder}: the log was begun at "
                    f"{format_lsn(identity.start_lsn)}",
                    remedy="bring the log's spool/position.json back, or the files, or begin a new log",
                )
            return identity.start_lsn
        for table in position["tables"]:
            self._describe(table)
        return parse_lsn(position["lsn"])

    def _describe(self, table: dict[str, Any]) -> None:
        self._tables[table["data_obj"]] = table
        self._shapes[table["data_obj"]] = shape_of(table)

    def _take(self, located: Located) -> None:
        record = located.record
        if record.operation is Operation.DDL:
            assert record.table is not None
            self._describe(record.table)
        elif record.operation is Operation.START:
            self._buffer.begin(record.xid_number)
        elif record.operation in CHANGES:
            self._undo(record) if record.rollback else self._hold(record, located.end_lsn - located.lsn)
        elif record.operation is Operation.ROLLBACK:
            self._held_changes -= len(self._held.pop(record.xid_number, ()))
            self._buffer.forget(record.xid_number)
        else:
            self._commit(located)

    def _hold(self, record: Record, nbytes: int) -> None:
        """Collects changes, because columns of a single row cost as much as columns of a hundred."""
        shape = self._shapes.get(record.data_obj)
        if shape is None:
            raise DecodeError(f"a change of table number {record.data_obj}, which no DDL record has described")
        self._held.setdefault(record.xid_number, []).append(Change(shape, record))
        self._held_changes += 1
        self._held_bytes += nbytes  # at most: those that are appended or undone meanwhile still count
        if self._held_changes >= _HELD_CHANGES or self._held_bytes >= _HELD_BYTES:
            self._append_all()

    def _append_all(self) -> None:
        for xid in list(self._held):
            self._append(xid)
        self._held_bytes = 0

    def _append(self, xid: int) -> None:
        changes = self._held.pop(xid, [])
        if changes:
            self._held_changes -= len(changes)
            writers = np.zeros(len(changes), np.uint32)  # the redo log does not name savepoints
            tables = rows_of(changes, self._buffer.next_place(xid))
            self._buffer.append(xid, writers, tables, [change.record.row_key for change in changes])

    def _undo(self, record: Record) -> None:
        """Takes back the newest change of the row, which may not be in the buffer yet."""
        held = self._held.get(record.xid_number, [])
        if held and held[-1].record.row_key == record.row_key:
            held.pop()
            self._held_changes -= 1
            return
        self._append(record.xid_number)
        self._buffer.undo(record.xid_number, [record.row_key])

    def _commit(self, located: Located) -> None:
        record, xid = located.record, located.record.xid_number
        self._append(xid)
        if located.end_lsn <= self._durable_lsn:
            self._buffer.forget(xid)
            return
        extra = json.dumps({"scn": record.scn, "xid": record.xid}).encode()
        commit = Commit(located.lsn, located.end_lsn, record.timestamp_us, extra=extra)
        out = self._buffer.commit(xid, commit)
        if isinstance(out, LargeTransaction):
            self._write()
            self._writer.write_large(out)
            return
        self._out += out
        self._out_bytes += sum(piece.nbytes for piece in out)
        if self._out_bytes >= self._limits.write_bytes:
            self._write()

    def _write(self) -> None:
        if self._out:
            self._writer.write(self._out)
            self._out, self._out_bytes = [], 0

    def _checkpoint(self) -> None:
        """Committed transactions first, then what is open with the position; only then files may go."""
        self._append_all()
        self._write()
        self._writer.advance(self._next_lsn)
        reach(_WRITTEN)
        position = {"lsn": format_lsn(self._next_lsn), "tables": list(self._tables.values())}
        self._buffer.checkpoint(position, self._writer.durable_lsn)
        self._checkpoint_lsn, self._read_bytes = self._next_lsn, 0
        self._on_position(self._checkpoint_lsn)


def _identity(folder: Path, log_path: Path, database: str) -> LogIdentity:
    """Of a log that is there, or of a new one that begins with the oldest file."""
    if not (log_path / FILE_NAME).exists():
        first = (numbers(folder) or [1])[0]
        create_identity(log_path, LogIdentity(_SYSTEM, database, 1, slot="", start_lsn=first << 32))
    identity = read_identity(log_path)
    if (identity.system_identifier, identity.database) != (_SYSTEM, database):
        raise LogError(
            f"the log in {log_path} belongs to database {identity.database!r}, not to the redo logs of {database!r}",
            remedy="choose another folder for this log",
        )
    return identity

"""One transaction whose end is not known yet: the older of its rows may be in files, the rest is in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.errors import PgtideError
from pgtide.transactions.pieces import UNKNOWN, Commit, Piece, committed, entry, groups, row_bytes, row_count, without
from pgtide.transactions.places import Places, Range
from pgtide.transactions.row_ids import RowIds
from pgtide.transactions.spool import Spool, SpooledFiles


@dataclass(slots=True)
class Pending:
    xid: int
    places: Places = field(default_factory=Places)
    ids: RowIds | None = None  # of all changes, if the source names rows
    pieces: list[Piece] = field(default_factory=list)  # rows in memory, with `_place` and a `_txn` of 0
    files: SpooledFiles | None = None
    spooled_places: int = 0  # places below are in files
    _row_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        return self._row_bytes + (self.ids.nbytes if self.ids else 0)

    @property
    def row_bytes(self) -> int:
        """What all rows would take in memory."""
        return self._row_bytes + (self.files.row_bytes if self.files else 0)

    def append(
        self, subxids: npt.NDArray[np.uint32], tables: Sequence[TableRows], row_ids: Sequence[bytes] | None
    ) -> None:
        if row_ids is not None:
            if self.ids is None and not self.places.count:
                self.ids = RowIds()
            if self.ids is None or len(row_ids) != len(subxids):
                raise PgtideError(f"transaction {self.xid}: either all changes have row ids or none has")
            self.ids.append(row_ids)
        self.places.add(subxids)
        self.pieces.append(tuple(tables))
        self._row_bytes += row_bytes(tables)

    def drop_rows(self, gone: list[Range]) -> None:
        """Takes rolled-back rows out of memory; in files they are left out by their places."""
        self.pieces = [piece for piece in (without(piece, gone) for piece in self.pieces) if piece]
        self._row_bytes = sum(row_bytes(piece) for piece in self.pieces)

    def undo(self, rows: int | Sequence[bytes]) -> None:
        """Leaves out the newest changes, or of each of these rows in turn the newest one.

        Rows in memory stay there for now: undoing goes change by change, and each would cost a look at all of them.
        """
        if isinstance(rows, int):
            if rows > self.places.kept:
                raise PgtideError(f"transaction {self.xid}: {rows} changes are undone, but it has {self.places.kept}")
            self.places.undo_newest(rows)
            return
        for row_id in rows:
            place = self.ids.newest(row_id, self.places) if self.ids else None
            if place is None:
                raise PgtideError(f"transaction {self.xid}: a change of row {row_id!r} is undone, but it has none")
            self.places.undo(place)

    def spill(self, spool: Spool, block_bytes: int) -> None:
        """Moves what is in memory to files, in blocks of about this size."""
        if self.files is None:
            self.files = spool.new_files(str(self.xid))
        self.drop_rows(self.places.gone)
        for group in groups(self.pieces, block_bytes):
            blocks = [Committed(entry(self.xid, UNKNOWN, row_count(piece), ends=False), piece) for piece in group]
            self.files.append(blocks, self.spooled_places)
        if self.ids is not None and self.ids.nbytes:
            self.ids.spill(self.files.ids)
            self.files.dirty.add(self.files.ids)
        self.spooled_places = self.places.count
        self.pieces, self._row_bytes = [], 0

    def whole(self, commit: Commit) -> list[Committed]:
        """The committed transaction as rows, read back from the files where it has some."""
        pieces = itertools.chain(self.files.pieces() if self.files else (), self.pieces)
        return committed(self.xid, pieces, self.places.gone, commit)

    def by_reference(self, commit: Commit, *, kept: bool) -> LargeTransaction:
        """The committed transaction as the names of its files."""
        assert self.files is not None
        return LargeTransaction(
            transaction=entry(self.xid, commit, self.places.kept, ends=True),
            places=self.places.count,
            gone=tuple(self.places.gone),
            files=tuple(self.files.paths),
            lengths_bytes=tuple(self.files.lengths),
            shapes=tuple(self.files.shapes.values()),
            kept=kept,
        )

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Of rows and of their ids."""
        if self.files is None:
            return ()
        return (*self.files.paths, self.files.ids) if self.ids is not None else tuple(self.files.paths)

    def to_json(self) -> dict[str, Any]:
        """What is to be known of it besides its files, once nothing of it is in memory."""
        assert not self.pieces
        return {
            "xid": self.xid,
            "places": self.places.to_json(),
            "ids": self.ids is not None,
            "rows": self.files.to_json() if self.files else None,
        }

    @staticmethod
    def from_json(data: dict[str, Any], spool: Spool) -> Pending:
        places = Places.from_json(data["places"])
        pending = Pending(data["xid"], places, spooled_places=places.count)
        if data["rows"] is not None:
            pending.files = SpooledFiles.from_json(data["rows"], spool, str(data["xid"]))
        if data["ids"]:
            assert pending.files is not None
            pending.ids = RowIds()
            pending.ids.file, pending.ids.spooled = pending.files.ids, places.count
        return pending

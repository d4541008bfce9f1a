"""One transaction whose end is not known yet: the older of its rows may be in files, the rest is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.transactions.pieces import UNKNOWN, Commit, Piece, committed, entry, groups, row_bytes, row_count, without
from pgtide.transactions.places import Places, Range
from pgtide.transactions.spool import Spool, SpooledFiles


@dataclass(slots=True)
class Pending:
    xid: int
    places: Places = field(default_factory=Places)
    pieces: list[Piece] = field(default_factory=list)  # rows in memory, with `_place` and a `_txn` of 0
    memory_bytes: int = 0
    files: SpooledFiles | None = None
    spooled_places: int = 0  # places below are in files

    def append(self, tables: Sequence[TableRows]) -> None:
        self.pieces.append(tuple(tables))
        self.memory_bytes += row_bytes(tables)

    def drop_rows(self, gone: list[Range]) -> None:
        """Takes rolled-back rows out of memory; in files they are left out by their places."""
        self.pieces = [piece for piece in (without(piece, gone) for piece in self.pieces) if piece]
        self.memory_bytes = sum(row_bytes(piece) for piece in self.pieces)

    def spill(self, spool: Spool, block_bytes: int) -> None:
        """Moves what is in memory to files, in blocks of about this size."""
        if self.files is None:
            self.files = spool.new_files(str(self.xid))
        for group in groups(self.pieces, block_bytes):
            blocks = [Committed(entry(self.xid, UNKNOWN, row_count(piece), ends=False), piece) for piece in group]
            self.files.append(blocks, self.spooled_places)
        self.spooled_places = self.places.count
        self.pieces, self.memory_bytes = [], 0

    def in_memory(self, commit: Commit) -> list[Committed]:
        """The committed transaction, from memory."""
        return committed(self.xid, self.pieces, self.places.gone, commit)

    def read_back(self, commit: Commit) -> list[Committed]:
        """The committed transaction, read from its files: for one that is too small to be a file of the log."""
        assert self.files is not None
        return committed(self.xid, self.files.pieces(), self.places.gone, commit)

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

    def to_json(self) -> dict[str, Any]:
        """What is to be known of it besides its files, once nothing of it is in memory."""
        assert self.files is not None
        assert not self.pieces
        return {"xid": self.xid, "places": self.places.to_json(), "rows": self.files.to_json()}

    @staticmethod
    def from_json(data: dict[str, Any], spool: Spool) -> Pending:
        places = Places.from_json(data["places"])
        files = SpooledFiles.from_json(data["rows"], spool, str(data["xid"]))
        return Pending(data["xid"], places, files=files, spooled_places=places.count)

"""Prepared transactions: durable in the spool from their prepare to their end, across restarts.

Once a source is told that a prepared transaction was taken, it sends only the end of it, without the rows.  So rows
and a note that names them (`<number>.prepared`) are durable before anything at or past the prepare is acknowledged, and
they stay until the log has the commit durably.  What has to happen in between happens in the order of the log: the
buffer hands out steps, and whoever writes the log takes them between what comes before and what comes after.

    prepare     Keep
    commit      NoteCommit, the transaction itself, Forget
    rollback    Forget

The noted commit tells a start that comes after a crash whether the log has the transaction already: nobody asks for it
again then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgtide.errors import LogError
from pgtide.failpoints import declare, reach
from pgtide.log.files import fsync_path, replace_durably
from pgtide.transactions.pending import Pending
from pgtide.transactions.spool import NOTE_SUFFIX, Spool, fsync_files

_SYNCED = declare("spool.prepared.synced", "the rows of a prepared transaction are durable, no note names them yet")
_KEPT = declare("spool.prepared.kept", "a prepared transaction is durable in the spool, nothing past it acknowledged")
_NOTED = declare("spool.commit.noted", "the commit of a prepared transaction is noted, the log does not have it yet")
_ENDED = declare(
    "spool.prepared.ended", "a prepared transaction is committed in the log or rolled back, and still kept"
)
_FORGOTTEN = declare("spool.prepared.forgotten", "the note of a prepared transaction is gone, its rows are not")

Key = tuple[str, int]  # global identifier and xid: an identifier may be used again


@dataclass(frozen=True, slots=True)
class Prepare:
    """What the source says of a transaction when it prepares it."""

    gid: str
    end_lsn: int
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transaction that is prepared: all of its rows are in files."""

    prepare: Prepare
    transaction: Pending

    @property
    def key(self) -> Key:
        return self.prepare.gid, self.transaction.xid

    @property
    def note(self) -> Path:
        assert self.transaction.files is not None
        return self.transaction.files.folder / (self.transaction.files.stem + NOTE_SUFFIX)

    @property
    def rows(self) -> tuple[Path, ...]:
        return self.transaction.all_files

    def encoded(self, committed_end_lsn: int = 0) -> bytes:
        """The note; once the transaction commits, with the end LSN of the commit."""
        content = {
            "gid": self.prepare.gid,
            "prepare_end_lsn": self.prepare.end_lsn,
            "origin": self.prepare.origin,
            "committed_end_lsn": committed_end_lsn,
            "transaction": self.transaction.to_json(),
        }
        return json.dumps(content).encode()


@dataclass(frozen=True, slots=True)
class Keep:
    """Makes a prepared transaction durable: its rows, then the note that names them."""

    note: Path
    rows: tuple[Path, ...]
    content: bytes

    def run(self) -> None:
        fsync_files(self.rows, self.note.parent)
        reach(_SYNCED)
        replace_durably(self.note, self.content)
        reach(_KEPT)


@dataclass(frozen=True, slots=True)
class NoteCommit:
    """Notes where the transaction commits; it is in the log once that is durable up to there."""

    note: Path
    content: bytes

    def run(self) -> None:
        replace_durably(self.note, self.content)
        reach(_NOTED)


@dataclass(frozen=True, slots=True)
class Forget:
    """Removes what was kept of a transaction that was rolled back, or that the log has."""

    note: Path
    rows: tuple[Path, ...]

    def run(self) -> None:
        reach(_ENDED)
        self.note.unlink(missing_ok=True)
        fsync_path(self.note.parent)
        reach(_FORGOTTEN)
        for path in self.rows:
            path.unlink(missing_ok=True)


SpoolStep = Keep | NoteCommit | Forget


def load_prepared(spool: Spool, durable_lsn: int) -> list[Prepared]:
    """Those that an earlier process kept, without those whose commit the log has."""
    found = []
    # A note whose writer died before it was done may be here by name alone; it is about to be relied on.
    fsync_path(spool.folder)
    for path in spool.files():
        if path.suffix != NOTE_SUFFIX:
            continue
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            if not 0 < data["committed_end_lsn"] <= durable_lsn:
                prepare = Prepare(data["gid"], data["prepare_end_lsn"], data["origin"])
                found.append(Prepared(prepare, Pending.from_json(data["transaction"], spool)))
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(
                f"{path}: not the note of a prepared transaction: {error}",
                remedy="restore the file from a copy; without it the transaction's rows are lost",
            ) from error
    return found

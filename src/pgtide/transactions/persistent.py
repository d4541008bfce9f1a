"""The buffer for sources that cannot send again: what is open, and how far the source was read, survive a restart.

`checkpoint(position)` writes everything that is open to the spool, makes it durable, and then puts the position and a
description of the open transactions into one file, `position.json`, in one step.  A start finds the newest such file,
takes the open transactions from it, and the source is read on from its position: changes that came after it come again.
So a file that the position names stays as it is until a later position does not name it any more: more rows go behind
what counts, or into other files, a commit gives the log a second name for it, and a rollback leaves it.

What is committed is handed out once more if the process dies before the next checkpoint; as with every source, what
ends at or below the log's `durable_lsn` is there already.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pgtide.change import Committed, LargeTransaction
from pgtide.errors import LogError, PgtideError
from pgtide.failpoints import declare, reach
from pgtide.log.files import FILE_MODE, replace_durably
from pgtide.lsn import format_lsn
from pgtide.transactions.buffer import TransactionBuffer
from pgtide.transactions.pending import Pending
from pgtide.transactions.pieces import Commit
from pgtide.transactions.prepared import Prepare, Prepared, SpoolStep
from pgtide.transactions.spool import fsync_files

_SYNCED = declare("position.synced", "what is open is durable in the spool, the read position has not moved")
_MOVED = declare("position.moved", "the read position has moved, files that it does not name are still there")

FILE_NAME = "position.json"
LOCK_NAME = "lock"


class PersistentBuffer(TransactionBuffer):
    """Made again after a restart it goes on where the last checkpoint was: `position` is what was given then.

    One at a time for a spool, which is locked until `close` or the end of the process.  After an exception it is of no
    further use: close it, and make another one.
    """

    position: dict[str, Any] | None = None
    _delivered_lsn = 0
    _lock = -1

    def close(self) -> None:
        """Lets the spool go, as the end of the process would: what came after the last checkpoint is not kept."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def commit(self, xid: int, commit: Commit) -> list[Committed] | LargeTransaction:
        """The whole transaction; an empty list if nothing of it is left."""
        transaction = self._open.pop(xid, None)
        return [] if transaction is None else self._committed(transaction, commit)

    def prepare(self, xid: int, prepare: Prepare) -> list[SpoolStep]:
        """The transaction waits for its end, and is durable with the next checkpoint: there is nothing to be done."""
        self.begin(xid)
        transaction = self._open[xid]
        self._spill(transaction)
        del self._open[xid]
        self._prepared[prepare.gid, xid] = Prepared(prepare, transaction)
        return []

    def commit_prepared(self, gid: str, xid: int, commit: Commit) -> list[SpoolStep | Committed | LargeTransaction]:
        """The whole transaction; one that is not known is an error."""
        prepared = self._take_prepared(gid, xid, commit)
        out = self._committed(prepared.transaction, replace(commit, origin=prepared.prepare.origin))
        return [out] if isinstance(out, LargeTransaction) else [*out]

    def rollback_prepared(self, gid: str, xid: int) -> list[SpoolStep]:
        prepared = self._prepared.pop((gid, xid), None)
        if prepared is not None and prepared.transaction.files is not None:
            prepared.transaction.files.remove()
        return []

    def checkpoint(self, position: Mapping[str, Any], durable_lsn: int) -> None:
        """From now on a restart goes on from `position`: everything before it was given to this buffer.

        `durable_lsn`: of the log, which must have everything that was handed out by now.
        """
        if self._delivered_lsn > durable_lsn:
            raise PgtideError(
                f"a transaction that ends at {format_lsn(self._delivered_lsn)} was handed out, but the log is durable "
                f"up to {format_lsn(durable_lsn)}: the read position cannot move past it"
            )
        pending = [*self._open.values(), *(prepared.transaction for prepared in self._prepared.values())]
        for transaction in pending:
            if transaction.spooled_places < transaction.places.count:
                self._spill(transaction)
        self._make_durable(pending)
        reach(_SYNCED)
        replace_durably(self._spool.folder / FILE_NAME, self._encoded(position))
        reach(_MOVED)
        self.position = dict(position)
        self._spool.named = frozenset(path for transaction in pending for path in transaction.all_files)
        self._spool.remove_all_but(self._spool.named)

    def _committed(self, transaction: Pending, commit: Commit) -> list[Committed] | LargeTransaction:
        """Its files stay: the last position may name them, and the log has not taken them yet."""
        self._delivered_lsn = max(self._delivered_lsn, commit.end_lsn)
        out: list[Committed] | LargeTransaction = []
        if transaction.files is None or transaction.row_bytes <= self._piece_bytes:
            self.memory_bytes -= transaction.memory_bytes
            out = transaction.whole(commit)
        else:
            self._spill(transaction)
            if transaction.places.kept:
                out = transaction.by_reference(commit, kept=True)
        if transaction.files is not None:
            transaction.files.release()
        return out

    def _make_durable(self, pending: list[Pending]) -> None:
        files = [transaction.files for transaction in pending if transaction.files is not None]
        dirty = [path for each in files for path in sorted(each.dirty)]
        if dirty:
            fsync_files(dirty, self._spool.folder)
        for each in files:
            each.dirty.clear()

    def _encoded(self, position: Mapping[str, Any]) -> bytes:
        """Shapes once, however many transactions have rows of them."""
        opened = [transaction.to_json() for transaction in self._open.values()]
        prepared: list[dict[str, Any]] = [
            {"gid": each.prepare.gid, "end_lsn": each.prepare.end_lsn, "origin": each.prepare.origin}
            | {"transaction": each.transaction.to_json()}
            for each in self._prepared.values()
        ]
        shapes: dict[str, Any] = {}
        for data in (*opened, *(each["transaction"] for each in prepared)):
            if data["rows"] is not None:
                shapes |= data["rows"]["shapes"]
                data["rows"]["shapes"] = list(data["rows"]["shapes"])
        return json.dumps({"position": position, "open": opened, "prepared": prepared, "shapes": shapes}).encode()

    def _restore(self, durable_lsn: int) -> None:
        """What is open as of the last checkpoint; what was written later is removed, for it is read again."""
        self._take_lock()
        try:
            self._read_position()
        except BaseException:
            self.close()
            raise
        restored = [*self._open.values(), *(prepared.transaction for prepared in self._prepared.values())]
        self._spool.named = frozenset(path for transaction in restored for path in transaction.all_files)
        self._spool.remove_all_but(self._spool.named)

    def _take_lock(self) -> None:
        self._lock = os.open(self._spool.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise PgtideError(
                f"the spool {self._spool.folder} is in use by another reader",
                remedy="stop that one: a log has one writer",
            ) from None

    def _read_position(self) -> None:
        file = self._spool.folder / FILE_NAME
        if not file.exists():
            return
        try:
            content = json.loads(file.read_bytes())
            for data in content["open"]:
                transaction = self._restored(data, content["shapes"])
                self._open[transaction.xid] = transaction
            for data in content["prepared"]:
                prepare = Prepare(data["gid"], data["end_lsn"], data["origin"])
                prepared = Prepared(prepare, self._restored(data["transaction"], content["shapes"]))
                self._prepared[prepared.key] = prepared
            self.position = content["position"]
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(f"{file}: not a read position: {error}", remedy="restore the spool from a copy") from error

    def _restored(self, data: dict[str, Any], shapes: Mapping[str, Any]) -> Pending:
        if data["rows"] is not None:
            data["rows"]["shapes"] = {fingerprint: shapes[fingerprint] for fingerprint in data["rows"]["shapes"]}
        transaction = Pending.from_json(data, self._spool)
        if transaction.files is not None and not transaction.files.are_there():
            raise LogError(
                f"the spool {self._spool.folder} has lost rows of transaction {transaction.xid}, which the read "
                "position names",
                remedy="restore the spool from a copy, or begin a new log from a position that the source still has",
            )
        return transaction

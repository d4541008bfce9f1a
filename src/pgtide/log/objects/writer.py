"""The writer on an object store: every flush is an object of whole transactions, and then the marker moves.

An object is only ever created, under the name of its first offset, behind the last one that there is.  When the
name is taken, somebody else has gone on from the same place: either this writer has been replaced and stops, or its
predecessor was slower to die than thought; then what that one wrote is as good as what this one was about to
write, and stays.  Nothing above the marker was acknowledged, and nothing is ever taken back.

A transaction too large to wait for its end in memory goes into objects under `large/` as it comes, and one block
names them all when it ends.  So the marker is always the end of an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from pgtide.change import TRANSACTIONS, Committed, LargeTransaction, TableRows
from pgtide.errors import LogCorruptError, LogError, TransientError
from pgtide.failpoints import declare, reach
from pgtide.log.block import (
    EncodedBlock,
    LargeReference,
    OpenTransaction,
    encode_block,
    encode_large_block,
    encode_reference,
    split_unfinished,
)
from pgtide.log.identity import LogIdentity, read_identity
from pgtide.log.large import FOLDER as LARGE
from pgtide.log.objects.contents import read_object
from pgtide.log.objects.marker import MarkerObject
from pgtide.log.objects.names import ObjectName
from pgtide.log.segment import FOLDER, SegmentHeader
from pgtide.log.shapes import ShapeStore
from pgtide.log.storage import Storage
from pgtide.schema import TableShape

_TAKEN = declare("log.object.taken", "a writer has taken the marker object, nothing recovered yet")
_FOUND = declare("log.object.found", "a new writer has found objects above the marker, which it has not moved yet")
_RECOVERED = declare("log.object.recovered", "a new writer on an object store knows where to go on")
_CREATED = declare("log.object.created", "an object is stored, the marker not yet moved")
_MARKED = declare("log.object.marked", "the marker object is moved, nothing acknowledged yet")
_IDLE_MARKED = declare("log.object.idle", "an idle position is in the marker object, not yet acknowledged")
_LARGE_STORED = declare("log.object.large", "the rows of a large transaction are stored, no block refers to them")


@dataclass(slots=True)
class _Unfinished:
    """A transaction whose end has not come yet: its rows so far, by object and length."""

    places: int = 0
    files: list[tuple[str, int]] = field(default_factory=list)


class ObjectLogWriter:
    """See `opening.Writer`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._identity: LogIdentity = read_identity(storage)
        self._shapes = ShapeStore(storage, self.check_not_fenced)
        self._unfinished: _Unfinished | None = None
        self._large_files = 0
        self._previous = ""
        self._marker = self._take(None)

    @property
    def location(self) -> str:
        return self._storage.location

    @property
    def durable_lsn(self) -> int:
        """Every transaction with end LSN up to here is in the log, durably."""
        return max(self._marker.marker.durable_lsn, self._identity.start_lsn)

    @property
    def end_offset(self) -> int:
        return self._marker.marker.end_offset

    @property
    def last_commit_lsn(self) -> int:
        return self._marker.marker.last_commit_lsn

    @property
    def unfinished(self) -> bool:
        """Whether the beginning of a transaction is stored whose end has not come yet."""
        return self._unfinished is not None

    def write(self, pieces: Sequence[Committed]) -> None:
        """Stores what is whole as one object; readers see it when this returns."""
        if self._unfinished is not None:
            pieces = self._go_on(self._unfinished, pieces)
        whole, unfinished = split_unfinished(pieces)
        if whole:
            block = encode_block(whole, self.end_offset, None)
            assert block.header.end_offset > block.header.first_offset, "no range of offsets would contain this block"
            self._append(block)
        for piece in unfinished:
            self._unfinished = self._unfinished or _Unfinished()
            self._keep(self._unfinished, piece)

    def write_large(self, large: LargeTransaction) -> None:
        """Stores a transaction whose rows are in local files, which go when the log has them, unless `kept`."""
        for shape in large.shapes:
            self._shapes.save(shape, self.end_offset)
        names = [self._new_large_name() for _ in large.files]
        for name, file in zip(names, large.files, strict=True):
            self._storage.copy_in(f"{LARGE}/{name}", file)
        reach(_LARGE_STORED)
        self._append(encode_large_block(large, list(zip(names, large.lengths_bytes, strict=True)), self.end_offset))
        for file in () if large.kept else large.files:
            file.unlink(missing_ok=True)

    def recorded_shapes(self) -> list[TableShape]:
        """Every shape that the log has, oldest first."""
        return self._shapes.seen()

    def record_shape(self, shape: TableShape) -> None:
        """Makes a table's shape known to readers before it has any change."""
        self._shapes.save(shape, self.end_offset)

    def advance(self, durable_lsn: int) -> None:
        """Records that nothing up to `durable_lsn` is missing, although no transaction ends there."""
        assert self._unfinished is None, "an idle position inside a transaction"
        if durable_lsn > self.durable_lsn:
            self._marker.record(replace(self._marker.marker, durable_lsn=durable_lsn))
            reach(_IDLE_MARKED)

    def check_not_fenced(self) -> None:
        """Raises when another writer has taken over."""
        self._marker.check_not_fenced()

    def forget_unfinished(self) -> None:
        """The transaction whose beginning is stored comes again from its start; no block will name those objects."""
        self._unfinished = None

    def restart(self) -> None:
        """After a failed request, which may have succeeded all the same: looks at what there is now."""
        self._unfinished = None
        self._marker = self._take(self._marker)

    def close(self) -> None:
        """Nothing is held back: what is not marked is not durable yet, and comes again."""

    def _take(self, before: MarkerObject | None) -> MarkerObject:
        """Takes the marker, and moves it behind all objects that there are.

        None of those above it was acknowledged, but their names are taken.  Each holds whole transactions, those that
        came next when it was written: from one slot nothing else can come next.
        """
        taken = MarkerObject.take(self._storage, before)
        reach(_TAKEN)
        if before is None:
            _check_conditions_hold(self._storage, taken)
        marker = taken.marker
        while (found := read_object(self._storage, ObjectName(marker.end_offset))) is not None:
            if not found.headers or not found.headers[-1].ends_transaction:
                raise LogCorruptError(
                    f"{self.location}/{found.name}: does not end with a transaction",
                    remedy="nothing in it was acknowledged: remove the object and start again",
                )
            last = found.headers[-1]
            marker = replace(
                marker,
                end_offset=last.end_offset,
                durable_lsn=max(marker.durable_lsn, last.last_end_lsn),
                last_commit_lsn=last.last_commit_lsn,
            )
            self._previous = found.name
        if marker != taken.marker:
            reach(_FOUND)
            taken.record(marker)
        reach(_RECOVERED)
        return taken

    def _append(self, block: EncodedBlock) -> None:
        """Shapes, then the object, then the marker."""
        for shape in block.shapes:
            self._shapes.save(shape, self.end_offset)
        name = f"{FOLDER}/{ObjectName(block.header.first_offset)}"
        header = SegmentHeader(
            first_offset=block.header.first_offset,
            epoch=self._marker.epoch,
            timeline=self._identity.timeline,
            previous=self._previous,
            writer=self._marker.writer,
        )
        if self._storage.create(name, header.encode() + block.data) is None:
            self._check_it_is_ours(ObjectName(block.header.first_offset))
        reach(_CREATED)
        marker = replace(
            self._marker.marker,
            end_offset=block.header.end_offset,
            durable_lsn=max(self._marker.marker.durable_lsn, block.header.last_end_lsn),
            last_commit_lsn=block.header.last_commit_lsn,
        )
        self._marker.record(marker)
        self._previous = name
        reach(_MARKED)

    def _check_it_is_ours(self, name: ObjectName) -> None:
        """The name was taken: by an attempt of our own whose answer was lost, by a successor, or by a predecessor."""
        found = read_object(self._storage, name)
        if found is not None and found.header.writer == self._marker.writer:
            return
        self._marker.check_not_fenced()
        raise TransientError(
            f"{self.location}/{FOLDER}/{name} was written by a capture that ran here before and was thought gone; "
            "it stays, and what comes after it is read again"
        )

    def _go_on(self, unfinished: _Unfinished, pieces: Sequence[Committed]) -> Sequence[Committed]:
        """Takes from the front what belongs to the unfinished transaction, and writes its block if it ends."""
        for number, piece in enumerate(pieces):
            first, rest = _split_after_first(piece)
            self._keep(unfinished, first)
            if first.transactions["ends"][0].as_py():
                self._end(unfinished, first.transactions)
                return [*([rest] if rest is not None else []), *pieces[number + 1 :]]
        return []

    def _keep(self, unfinished: _Unfinished, piece: Committed) -> None:
        if not any(table.rows.num_rows for table in piece.tables):
            return
        block = encode_block([piece], unfinished.places, OpenTransaction(0))
        for shape in block.shapes:
            self._shapes.save(shape, self.end_offset)
        name = self._new_large_name()
        self._storage.create(f"{LARGE}/{name}", block.data)
        unfinished.files.append((name, len(block.data)))
        unfinished.places = block.header.end_offset

    def _end(self, unfinished: _Unfinished, transaction: pa.RecordBatch) -> None:
        reach(_LARGE_STORED)
        number = TRANSACTIONS.get_field_index("changes")
        changes = pa.array([unfinished.places], pa.int64())
        transaction = transaction.set_column(number, TRANSACTIONS.field(number), changes)
        reference = LargeReference(tuple(unfinished.files), ())
        self._append(encode_reference(transaction, unfinished.places, reference, self.end_offset))
        self._unfinished = None

    def _new_large_name(self) -> str:
        """Never given twice: an attempt that was given up may still arrive."""
        self._large_files += 1
        return f"{self.end_offset:020d}-{self._marker.epoch:010d}-{self._large_files:04d}.seg"


def _split_after_first(piece: Committed) -> tuple[Committed, Committed | None]:
    """The first transaction of a piece, and the others."""
    if piece.transactions.num_rows == 1:
        return piece, None
    first, rest = [], []
    for table in piece.tables:
        transactions = table.rows["_txn"].to_numpy()
        cut = int((transactions == 0).sum())  # rows are in the order of their transactions
        number = table.rows.schema.get_field_index("_txn")
        first.append(TableRows(table.shape, table.rows.slice(0, cut)))
        later = table.rows.slice(cut)
        renumbered = pa.array(transactions[cut:] - 1, pa.uint32())
        rest.append(TableRows(table.shape, later.set_column(number, later.schema.field(number), renumbered)))
    return (
        Committed(piece.transactions.slice(0, 1), tuple(first)),
        Committed(piece.transactions.slice(1), tuple(rest)),
    )


def _check_conditions_hold(storage: Storage, taken: MarkerObject) -> None:
    """A store that ignores If-None-Match and If-Match would let two writers overwrite each other."""
    if not taken.is_protected():
        raise LogError(
            f"the store of the log in {storage.location} ignores conditional writes (If-None-Match, If-Match)",
            remedy="use a store that honours them, or a folder",
        )

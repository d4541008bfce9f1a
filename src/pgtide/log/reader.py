"""Reading the log: plans from headers and directories, rows from byte ranges.  Needs its storage and nothing else.

A reader never goes past the durable marker, so all it sees is whole transactions whose offsets stay as they are.
Headers of blocks that were walked once are remembered; a growing segment is only walked on.  Which segments count is
remembered too, by `layout`.  So a plan costs the same over ten segments and over ten thousand.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import pyarrow as pa

from pgtide.change import TIMESTAMP, TRANSACTIONS
from pgtide.errors import LogCorruptError, LogRangeError
from pgtide.log.block import (
    HEADER_BYTES,
    BlockHeader,
    Directory,
    LargeReference,
    TableEntry,
    decode_rows,
    holds_reads,
    outside,
    parse_header,
)
from pgtide.log.control import removed
from pgtide.log.identity import read_identity
from pgtide.log.large import FOLDER as LARGE
from pgtide.log.large import blocks_of, first_offset_of
from pgtide.log.layout import layout_of
from pgtide.log.segment import FOLDER as SEGMENTS
from pgtide.log.segment import BlockIndex, Extent, View, read_directory
from pgtide.log.shapes import ShapeStore
from pgtide.log.storage import Location, Storage, Stored, storage_at
from pgtide.lsn import format_lsn
from pgtide.schema import TableShape

_KEPT_DIRECTORIES = 4096
_KEPT_BLOCKS = 200_000  # of which the headers are remembered, over all segments


@dataclass(frozen=True, slots=True)
class LogEnd:
    end_offset: int  # exclusive: the next offset to be given
    durable_lsn: int
    last_commit_lsn: int


@dataclass(frozen=True, slots=True)
class LargePart:
    """The transaction of a block in `large/`, which does not know it, and which of its places are not part of it."""

    first_offset: int
    xid: int
    commit_lsn: int
    commit_timestamp_us: int
    gone: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one table in one block, clipped to [start, end); travels to executors."""

    segment: str  # relative to the log
    position: int
    entry: TableEntry  # with offsets, also for a block in `large/`
    start: int
    end: int
    large: LargePart | None = None

    @property
    def relation_oid(self) -> int:
        return self.entry.relation_oid

    @property
    def nbytes(self) -> int:
        return self.entry.length_bytes


@dataclass(frozen=True, slots=True)
class LogRows:
    """Changes as stored, each with its offset, and its transaction's fields in place of `_txn`."""

    shape: TableShape
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block is, and its header."""

    segment: str  # relative to the log
    position: int
    header: BlockHeader


class LogReader:
    """Used by one thread.  A store that does not answer at the beginning is an error; later it is asked again.

    Without `reads`, plans pass over rows that are in the log for those who have nothing else: a mirror has loaded them.
    """

    def __init__(self, location: Location, *, reads: bool = True) -> None:
        self._reads = reads
        self.identity = read_identity(location, patience_s=0)
        self.storage: Storage = storage_at(location)
        self._layout = layout_of(self.storage)
        self._shapes = ShapeStore(self.storage)
        self._indexes: OrderedDict[str, BlockIndex] = OrderedDict()
        self._indexed_blocks = 0
        self._directories: OrderedDict[tuple[str, int], Directory] = OrderedDict()

    @property
    def location(self) -> str:
        return self.storage.location

    def end(self) -> LogEnd:
        """How far the log can be read now."""
        marker = self._layout.marker()
        return LogEnd(marker.end_offset, max(marker.durable_lsn, self.identity.start_lsn), marker.last_commit_lsn)

    def first_offset(self) -> int:
        """The oldest offset that is still there (the end, when the log is empty)."""
        return self._first_of(self._layout.look())

    def _first_of(self, view: View) -> int:
        if view.first_offset and removed(self.storage).end_offset < view.first_offset:
            self._raise_missing(removed(self.storage).end_offset, view.first_offset)
        return view.first_offset

    def shape(self, relation_oid: int, fingerprint: str) -> TableShape:
        return self._shapes.load(relation_oid, fingerprint)

    def shapes_of(self, relation_oid: int) -> list[TableShape]:
        """All shapes that a table has had, the present one last."""
        return self._shapes.of(relation_oid)

    def every_shape(self) -> list[TableShape]:
        """All shapes of all tables, each table's present one behind its others."""
        return self._shapes.every()

    def shapes(self, of: Iterable[TableShape] | None = None) -> dict[str, TableShape]:
        """The latest shape of every table, by qualified name; `of`: what `every_shape` gave, if it is there already."""
        latest = {shape.relation_oid: shape for shape in (self.every_shape() if of is None else of)}
        names: dict[str, list[int]] = {}
        for oid, shape in latest.items():
            names.setdefault(shape.qualified_name, []).append(oid)
        # Of relations that had the same name one after the other the one with the newest change counts.
        return {name: latest[oids[0] if len(oids) == 1 else self._newest(oids)] for name, oids in names.items()}

    def _newest(self, relation_oids: list[int]) -> int:
        """The relation with the newest change; without any, the one that was made last."""
        newest = self.newest(self.end().end_offset, lambda piece: piece.relation_oid in relation_oids)
        return max(relation_oids) if newest is None else newest.relation_oid

    def newest(self, end: int, wanted: Callable[[Slice], bool]) -> Slice | None:
        """The last of the wanted slices that has rows before `end`; looked for from there backwards."""
        for extent in reversed(self.extents()):
            if extent.first_offset < end:
                for block in reversed(list(self.blocks_of(extent))):
                    pieces = [piece for piece in self._slices(block, 0, end) if wanted(piece)]
                    if pieces:
                        return max(pieces, key=lambda piece: piece.entry.last_offset)
        return None

    def plan(self, start: int, end: int, relation_oid: int | None = None) -> list[Slice]:
        """Where the rows with start <= offset < end are, in the order of the log.

        What retention took is an error, but not for a table none of whose changes from `start` on were taken.
        """
        if relation_oid is None:
            return list(self._planned(self._layout.look(), start, end))
        return [piece for piece in self.plan_around(start, end, (relation_oid,)) if piece.relation_oid == relation_oid]

    def plan_around(self, start: int, end: int, relation_oids: Collection[int]) -> list[Slice]:
        """All rows, for who wants only some: what retention took is no error if it was nothing of these relations."""
        view = self._layout.look()
        if start < view.first_offset:
            taken = removed(self.storage)
            if all(taken.last_offset(relation_oid, reads=self._reads) < start for relation_oid in relation_oids):
                start = min(self._first_of(view), end)
        return list(self._planned(view, start, end))

    def _planned(self, view: View, start: int, end: int) -> Iterator[Slice]:
        for block in self._blocks(view, start, end):
            yield from self._slices(block, start, end)

    def read(self, piece: Slice, wanted: Callable[[str], bool] | None = None) -> LogRows:
        """The rows of one slice, checked against their checksum.

        `wanted` tells by name which of the table's columns are read, new images and old ones.
        """
        try:
            return self._read(piece, wanted)
        except FileNotFoundError:
            again = self._moved(piece.segment, piece.entry.first_offset, piece.entry.last_offset + 1)
            return self.read(replace(piece, segment=again.segment, position=again.position), wanted)

    def _read(self, piece: Slice, wanted: Callable[[str], bool] | None) -> LogRows:
        entry, where = piece.entry, self._where(piece.segment, piece.position)
        data = self.storage.read_range(piece.segment, piece.position + entry.position, entry.length_bytes)
        large = piece.large is not None
        head = b"" if large else self.storage.read_range(piece.segment, piece.position, HEADER_BYTES)
        rows = decode_rows(data, entry, where, wanted and (lambda name: _is_own(name) or wanted(name)))
        shape = self._shapes.load(piece.relation_oid, entry.fingerprint)
        if piece.large is not None:
            rows, transactions = _without_gone(rows, piece.large.gone), _one_transaction(piece.large)
        else:
            block = Block(piece.segment, piece.position, parse_header(head, where))
            transactions = self._directory(block).transactions
        return LogRows(shape, _resolve(rows, transactions, piece.start, piece.end))

    def _moved(self, segment: str, start: int, end: int) -> Block:
        """Where the block with these offsets is, now that its segment is gone: objects that were merged go after a
        while.  An error if it is nowhere."""
        self._layout.forget()
        if self._layout.merges and not segment.startswith(LARGE):
            for block in self.blocks(start, start + 1):
                if block.segment != segment:
                    return block
        return self._raise_missing(start, end, segment)

    def touched(self, start: int, end: int) -> dict[int, tuple[int, int]]:
        """Relations that may have changes in the range, and outer bounds of their offsets: directories tell no more."""
        found: dict[int, tuple[int, int]] = {}
        for piece in self.plan(start, end):
            first, last = max(piece.entry.first_offset, start), min(piece.entry.last_offset, end - 1)
            known = found.get(piece.relation_oid, (first, last))
            found[piece.relation_oid] = min(known[0], first), max(known[1], last)
        return found

    def boundary(self, start: int, max_rows: int, max_bytes: int) -> int:
        """The furthest end of a transaction within both limits; at least one transaction, or `start` at the end."""
        view = self._layout.look()
        best, used_bytes = start, 0
        for block in self._blocks(view, start, view.end_offset):
            used_bytes += self._row_bytes(block)
            fits = block.header.end_offset - start <= max_rows and used_bytes <= max_bytes
            if fits and block.header.ends_transaction:
                best = block.header.end_offset
            elif not fits:
                transactions = self.directory(block).transactions
                ends = transactions["end_offset"].to_numpy()[transactions["ends"].to_numpy(zero_copy_only=False)]
                end: int
                for end in ends[ends > start].tolist():
                    if best > start and (end - start > max_rows or used_bytes > max_bytes):
                        return best
                    best = end
                    if end - start > max_rows:
                        return best
        return best

    def _row_bytes(self, block: Block) -> int:
        if block.header.body_bytes:
            return block.header.body_bytes
        large = self.directory(block).large
        return sum(length for _, length in large.files) if large else 0

    def position_after(self, lsn: int) -> int:
        """First offset of the first transaction with an end LSN above `lsn`; the end, when there is none."""
        if lsn < removed(self.storage).end_lsn:
            raise LogRangeError(
                f"transactions after {format_lsn(lsn)} are no longer in the log in {self.location}: "
                "retention removed them",
                remedy="start from a later position, or take a new snapshot of the tables",
            )
        view = self._layout.look()
        extents, end_offset = view.extents, view.end_offset
        # Commits are in the order of their LSNs: the segments before the first with a later one need no look.
        begin = bisect.bisect_right(range(len(extents)), lsn, key=lambda number: self._last_end_lsn(extents, number))
        first = extents[begin].first_offset if begin < len(extents) else end_offset
        for block in self._blocks(view, first, end_offset):
            if block.header.last_end_lsn <= lsn:
                continue
            transactions = self.directory(block).transactions
            later = np.flatnonzero(transactions["end_lsn"].to_numpy() > lsn)
            if len(later):
                return int(transactions["first_offset"][int(later[0])].as_py())
        return end_offset

    def _last_end_lsn(self, extents: list[Extent], number: int) -> int:
        """End LSN of the last transaction that ends in this segment or, if none does, in one before it."""
        while number >= 0:
            for block in reversed(list(self.blocks_of(extents[number]))):
                if block.header.last_end_lsn:
                    return block.header.last_end_lsn
            number -= 1
        return 0

    def transactions(self, start: int, end: int) -> pa.Table:
        """The transactions that end after `start` and not after `end`, with the schema TRANSACTIONS."""
        batches = []
        for block in self.blocks(start, end):
            batch = self.directory(block).transactions
            ends = batch["end_offset"].to_numpy()
            kept = batch["ends"].to_numpy(zero_copy_only=False) & (ends > start) & (ends <= end)
            batches.append(batch.filter(pa.array(kept)))
        return pa.Table.from_batches(batches, TRANSACTIONS)

    def _slices(self, block: Block, start: int, end: int) -> Iterator[Slice]:
        """The block's tables with rows in [start, end), also those in the files that it refers to."""
        directory = self.directory(block)
        if not self._reads and holds_reads(directory.transactions):
            return
        for entry in directory.tables:
            if entry.first_offset < end and entry.last_offset >= start:
                yield Slice(block.segment, block.position, entry, start, end)
        if directory.large is not None:
            yield from self._large_slices(directory, directory.large, start, end)

    def _large_slices(self, directory: Directory, large: LargeReference, start: int, end: int) -> Iterator[Slice]:
        row = directory.transactions.slice(0, 1).cast(_NUMERIC_TIME).to_pylist()[0]
        first_offset = row["first_offset"]
        for name, length_bytes in large.files:
            segment = f"{LARGE}/{name}"
            for position, header in self._large_blocks(segment, length_bytes, first_offset, row["end_offset"]):
                for entry in self.directory(Block(segment, position, header)).tables:
                    low, high = first_offset + entry.first_offset, first_offset + entry.last_offset
                    if low < end and high >= start:
                        gone = tuple(
                            span for span in large.gone if span[0] <= entry.last_offset and span[1] > entry.first_offset
                        )
                        part = LargePart(first_offset, row["xid"], row["commit_lsn"], row["commit_timestamp"], gone)
                        shifted = replace(entry, first_offset=low, last_offset=high)
                        yield Slice(segment, position, shifted, start, end, part)

    def _large_blocks(self, segment: str, length_bytes: int, start: int, end: int) -> Iterator[tuple[int, BlockHeader]]:
        try:
            yield from blocks_of(self.storage, segment, length_bytes)
        except FileNotFoundError:
            self._raise_missing(start, end, segment)

    def look(self) -> View:
        """How far the log goes now, and the segments that count, in order, each with the offset where it stops to."""
        return self._layout.look()

    def extents(self) -> list[Extent]:
        return list(self.look().extents)

    def stored(self, extent: Extent) -> Stored:
        """Size and age of a segment."""
        return self._layout.stored(extent)

    def superseded(self, now_s: float) -> list[Stored]:
        """Segments of which no row is needed, as far as the last look at the segments saw."""
        return self._layout.superseded(now_s)

    def ends_transaction(self, extent: Extent) -> bool:
        """Whether a transaction ends where the segment stops to count."""
        return list(self.blocks_of(extent))[-1].header.ends_transaction

    def blocks_of(self, extent: Extent) -> Iterator[Block]:
        """The blocks of a segment; those in front of a damaged one come before the error."""
        damage = None
        try:
            index = self._index(extent)
        except LogCorruptError as error:
            index, damage = self._indexes[extent.file], error
        except FileNotFoundError:
            yield from self.blocks(extent.first_offset, extent.end_offset)
            return
        yield from _blocks_within(index, extent.first_offset, extent.end_offset)
        if damage is not None:
            raise damage

    def slices(self, block: Block) -> Iterator[Slice]:
        """All tables of a block."""
        return self._slices(block, block.header.first_offset, block.header.end_offset)

    def blocks(self, start: int, end: int) -> Iterator[Block]:
        """Blocks with rows in [start, end), ascending."""
        return self._blocks(self._layout.look(), start, end)

    def _blocks(self, view: View, start: int, end: int) -> Iterator[Block]:
        if end > view.end_offset:
            raise LogRangeError(f"offset {end} is beyond the end of the log in {self.location} ({view.end_offset})")
        has_looked_again = False
        while start < end:
            if start < view.first_offset:
                self._raise_missing(start, view.first_offset)
            begin = bisect.bisect_right(view.extents, start, key=lambda extent: extent.first_offset) - 1
            for number in range(begin, len(view.extents)):
                extent = view.extents[number]
                if start >= end:
                    return
                try:
                    index = self._index(extent)
                except FileNotFoundError:
                    # It is gone since it was listed: removed, or merged into another one.
                    self._layout.forget()
                    view = self._layout.look()
                    if extent in view.extents:
                        self._raise_missing(start, extent.end_offset, extent.file)
                    break
                except LogCorruptError:
                    # It may only seem to end too early: what followed it was merged and removed unseen by who slept.
                    if has_looked_again or not self._layout.merges:
                        raise
                    has_looked_again = True
                    self._layout.forget()
                    view = self._layout.look()
                    break
                yield from _blocks_within(index, start, min(end, extent.end_offset))
                start = extent.end_offset

    def _raise_missing(self, start: int, end: int, file: str = SEGMENTS) -> NoReturn:
        """Why there is nothing at these offsets, or no such file: retention took it, or it is lost."""
        self._layout.forget()
        taken = removed(self.storage).end_offset
        if start < taken:
            raise LogRangeError(
                f"offsets {start} to {taken} are no longer in the log in {self.location}: retention removed them",
                remedy="start from a later offset (startingOffsets), or take a new snapshot of the tables",
            )
        raise LogCorruptError(
            f"{self.location}/{file}: offsets {start} to {end} are missing, and retention did not remove them"
        )

    def _index(self, extent: Extent) -> BlockIndex:
        """FileNotFoundError where it may be found in another segment."""
        index = self._indexes.setdefault(extent.file, BlockIndex(extent.file))
        self._indexes.move_to_end(extent.file)
        self._indexed_blocks -= len(index.headers)
        try:
            index.extend(self.storage, extent.end_offset)
        except FileNotFoundError:
            if self._layout.merges:
                raise
            self._raise_missing(extent.first_offset, extent.end_offset, extent.file)
        finally:
            self._indexed_blocks += len(index.headers)
        while self._indexed_blocks > _KEPT_BLOCKS and len(self._indexes) > 1:
            self._indexed_blocks -= len(self._indexes.popitem(last=False)[1].headers)
        return index

    def where(self, block: Block) -> str:
        """For people."""
        return self._where(block.segment, block.position)

    def _where(self, segment: str, position: int) -> str:
        return f"{self.location}/{segment} at byte {position}"

    def directory(self, block: Block) -> Directory:
        """What is in a block, without its rows."""
        try:
            return self._directory(block)
        except FileNotFoundError:
            header = block.header
            # The blocks of a large transaction do not know its offsets, the name of its file does.
            base = first_offset_of(block.segment) if block.segment.startswith(LARGE) else 0
            return self.directory(self._moved(block.segment, base + header.first_offset, base + header.end_offset))

    def _directory(self, block: Block) -> Directory:
        key = (block.segment, block.position)
        directory = self._directories.get(key)
        if directory is None:
            directory = read_directory(self.storage, block.segment, block.position, block.header)
            self._directories[key] = directory
            if len(self._directories) > _KEPT_DIRECTORIES:
                self._directories.popitem(last=False)
        return directory


_NUMERIC_TIME = pa.schema(
    [pa.field(f.name, pa.int64() if f.type == TIMESTAMP else f.type, f.nullable) for f in TRANSACTIONS]
)


def _blocks_within(index: BlockIndex, start: int, end: int) -> Iterator[Block]:
    for number in range(index.from_offset(start), len(index.headers)):
        header = index.headers[number]
        if header.first_offset >= end:
            return
        yield Block(index.name, index.positions[number], header)


def _without_gone(rows: pa.RecordBatch, gone: tuple[tuple[int, int], ...]) -> pa.RecordBatch:
    return rows.filter(pa.array(outside(rows["_place"].to_numpy(), gone))) if gone else rows


def _one_transaction(part: LargePart) -> pa.RecordBatch:
    columns = {
        "first_offset": pa.array([part.first_offset], pa.int64()),
        "commit_lsn": pa.array([part.commit_lsn], pa.uint64()),
        "commit_timestamp": pa.array([part.commit_timestamp_us], pa.int64()).cast(TIMESTAMP),
        "xid": pa.array([part.xid], pa.uint32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def _is_own(name: str) -> bool:
    """Whether a column says something about the change, not about the row."""
    return name.startswith("_") and "." not in name


def _resolve(rows: pa.RecordBatch, transactions: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    """Adds the offset, puts commit LSN, commit time and xid in place of `_txn`; clips to [start, end)."""
    txn = rows["_txn"].to_numpy()
    offsets = transactions["first_offset"].to_numpy()[txn] + rows["_place"].to_numpy()
    low, high = np.searchsorted(offsets, [start, end])
    if (low, high) != (0, len(offsets)):
        rows, txn, offsets = rows.slice(low, high - low), txn[low:high], offsets[low:high]
    taken = transactions.take(pa.array(txn))
    columns = {
        "_offset": pa.array(offsets),
        "_op": rows["_op"],
        "_place": rows["_place"],
        "_commit_lsn": taken["commit_lsn"],
        "_commit_timestamp": taken["commit_timestamp"].cast(TIMESTAMP),
        "_xid": taken["xid"],
    }
    columns |= {name: rows[name] for name in rows.schema.names if name not in ("_op", "_place", "_txn")}
    return pa.RecordBatch.from_pydict(columns)

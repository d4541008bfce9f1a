"""The writer: appends committed transactions, makes them durable, then lets readers see them.

The order never changes: shapes durable, block written, block fsynced, not fenced, marker moved.  Only then may the
caller acknowledge `durable_lsn`.  A writer starts by taking an epoch and copying what its predecessor had written
whole but not marked (see `recovery`); it never touches an older segment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pgtide.change import Committed, LargeTransaction
from pgtide.errors import LogError
from pgtide.failpoints import declare, reach
from pgtide.log.block import BlockHeader, OpenTransaction, encode_block, encode_large_block, split_unfinished
from pgtide.log.files import FILE_MODE, fsync_path, make_directory, remove_leftovers, write_all
from pgtide.log.identity import LogIdentity, read_identity
from pgtide.log.large import adopt, remove_orphans
from pgtide.log.marker import Marker, MarkerFile
from pgtide.log.recovery import check_end_is_there, recover_tail
from pgtide.log.segment import SegmentHeader, SegmentName
from pgtide.log.shapes import ShapeStore
from pgtide.schema import TableShape

SEGMENT_BYTES = 128 << 20
SEGMENT_AGE_S = 3600.0  # what is older can go by retention only when its segment is closed

_SEGMENT_CREATED = declare("log.segment.created", "a new segment has its header, before its first block")
_BLOCK_WRITTEN = declare("log.block.written", "a block is written, not yet fsynced")
_BLOCK_FSYNCED = declare("log.block.fsynced", "a block is fsynced, the marker not yet moved")
_MARKED = declare("log.marker.moved", "the marker is moved, nothing acknowledged yet")
_IDLE_MARKED = declare("log.marker.idle", "an idle position is recorded, not yet acknowledged")
_LARGE_ADOPTED = declare("log.large.adopted", "the files of a large transaction are the log's, no block refers to them")
_LARGE_WRITTEN = declare("log.large.written", "the block of a large transaction is fsynced, the marker not yet moved")
_EPOCH_TAKEN = declare("log.epoch.taken", "a writer has taken its epoch, nothing recovered yet")
_RECOVERED = declare("log.recovered", "recovery has copied the tail and moved the marker")


class LogWriter:
    """One per log.  Not thread-safe: one thread writes."""

    def __init__(
        self,
        path: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        segment_age_s: float = SEGMENT_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.identity: LogIdentity = read_identity(path)
        self._segment_bytes = segment_bytes
        self._segment_age_s = segment_age_s
        self._clock = clock
        self._begun_s = 0.0  # when the segment was begun
        self._segments = path / "segments"
        self._shapes = ShapeStore(path)
        self._descriptor = -1
        self._segment = SegmentName(0, 0)
        self._length_bytes = 0
        self._next_offset = 0
        self._open: OpenTransaction | None = None
        self._previous = ""
        make_directory(self._segments)
        self._begin_epoch()

    @property
    def location(self) -> str:
        return str(self.path)

    @property
    def durable_lsn(self) -> int:
        """Every transaction with end LSN up to here is in the log, durably."""
        return max(self._marker.marker.durable_lsn, self.identity.start_lsn)

    @property
    def end_offset(self) -> int:
        return self._marker.marker.end_offset

    @property
    def last_commit_lsn(self) -> int:
        return self._marker.marker.last_commit_lsn

    def write(self, pieces: Sequence[Committed]) -> None:
        """Appends one block and makes it durable; readers see the transactions that end in it when this returns."""
        if self._is_due():
            self._roll()
        whole, unfinished = split_unfinished(pieces)
        marker = self._marker.marker
        for part in filter(None, (whole, unfinished)):
            block = encode_block(part, self._next_offset, self._open)
            assert block.header.end_offset > block.header.first_offset, "no range of offsets would contain this block"
            for shape in block.shapes:
                self._shapes.save(shape, self._next_offset)
            write_all(self._descriptor, block.data)
            self._length_bytes += len(block.data)
            self._next_offset, self._open = block.header.end_offset, block.open_transaction
            if self._open is None:
                marker = self._marker_after(block.header)
        reach(_BLOCK_WRITTEN)
        os.fdatasync(self._descriptor)
        reach(_BLOCK_FSYNCED)
        if whole:
            self._marker.record(marker, durably=False)
            reach(_MARKED)

    def write_large(self, large: LargeTransaction) -> None:
        """Appends a transaction whose rows are in files: these become the log's, by name, and no row is copied."""
        if self._is_due():
            self._roll()
        for shape in large.shapes:
            self._shapes.save(shape, self._next_offset)
        names = adopt(large, self.path, self._next_offset, self._marker.epoch)
        reach(_LARGE_ADOPTED)
        block = encode_large_block(large, names, self._next_offset)
        write_all(self._descriptor, block.data)
        self._length_bytes += len(block.data)
        self._next_offset, self._open = block.header.end_offset, None
        os.fdatasync(self._descriptor)
        reach(_LARGE_WRITTEN)
        self._marker.record(self._marker_after(block.header), durably=False)

    def recorded_shapes(self) -> list[TableShape]:
        """Every shape that the log has, oldest first."""
        return self._shapes.seen()

    def record_shape(self, shape: TableShape) -> None:
        """Makes a table's shape known to readers before it has any change."""
        self._shapes.save(shape, self.end_offset)

    def advance(self, durable_lsn: int) -> None:
        """Records that nothing up to `durable_lsn` is missing, although no transaction ends there."""
        assert self._open is None, "an idle position inside a transaction"
        if durable_lsn > self.durable_lsn:
            self._marker.record(replace(self._marker.marker, durable_lsn=durable_lsn), durably=True)
            reach(_IDLE_MARKED)

    def check_not_fenced(self) -> None:
        """Raises when another writer has taken over."""
        self._marker.check_not_fenced()

    @property
    def unfinished(self) -> bool:
        """Whether the beginning of a transaction is written whose end has not come yet."""
        return self._open is not None

    def forget_unfinished(self) -> None:
        """The transaction whose beginning is written comes again from its start: what is there of it is void."""
        if self._open is not None:
            self.restart()

    def restart(self) -> None:
        """After a failed write: a new epoch and a new segment; what is not marked is to be written again."""
        self._marker.check_not_fenced()
        self._take_back_unmarked()
        self._close_segment()
        self._marker.close()
        self._begin_epoch(after=self._marker.epoch)

    def close(self) -> None:
        """Makes the marker durable too; a writer that is killed instead loses nothing but a little time."""
        with contextlib.suppress(OSError, LogError):
            self._marker.record(self._marker.marker, durably=True)
        self._close_segment()
        self._marker.close()

    def _begin_epoch(self, *, after: int | None = None) -> None:
        """Takes an epoch: that which follows `after`, this writer's own, or as the successor of another writer."""
        copy_tail = after is None
        if copy_tail:
            check_end_is_there(self.path)
        self._marker = MarkerFile.take(self.path / "control", after=after)
        try:
            reach(_EPOCH_TAKEN)
            self._open = None
            self._next_offset = self._marker.marker.end_offset
            self._marker.record(self._recovered() if copy_tail else self._marker.marker, durably=True)
            if copy_tail:
                remove_orphans(self.path, self._next_offset)
                remove_leftovers(self.path / "control")
            self._marker.remove_older()
            reach(_RECOVERED)
        except BaseException:
            self._close_segment()
            self._marker.close()
            raise

    def _recovered(self) -> Marker:
        """Copies what the predecessor wrote whole and did not mark; the marker behind that."""
        marker = self._marker.marker
        tail = recover_tail(self.path, marker, self._marker.epoch, self.identity.timeline)
        if tail is None:
            return marker
        self._segment, self._length_bytes, self._next_offset = tail.segment, tail.length_bytes, tail.end_offset
        self._descriptor = os.open(self._segments / str(tail.segment), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._begun_s = self._clock()
        return replace(
            marker,
            segment_first_offset=tail.segment.first_offset,
            segment_epoch=tail.segment.epoch,
            length_bytes=tail.length_bytes,
            end_offset=tail.end_offset,
            durable_lsn=max(marker.durable_lsn, tail.last_end_lsn),
            last_commit_lsn=tail.last_commit_lsn,
        )

    def _take_back_unmarked(self) -> None:
        """Gives the space back of what was written last and never marked: a full disk may need just that to go on.

        No reader has seen it, and nobody was told that it is durable.
        """
        marker = self._marker.marker
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                return
            if (marker.segment_first_offset, marker.segment_epoch) == (self._segment.first_offset, self._segment.epoch):
                os.ftruncate(self._descriptor, marker.length_bytes)
            else:
                (self._segments / str(self._segment)).unlink()

    def _marker_after(self, header: BlockHeader) -> Marker:
        """The marker for a block that ends its last transaction and is the last thing written so far."""
        return Marker(
            segment_first_offset=self._segment.first_offset,
            segment_epoch=self._segment.epoch,
            length_bytes=self._length_bytes,
            end_offset=header.end_offset,
            durable_lsn=max(self._marker.marker.durable_lsn, header.last_end_lsn),
            last_commit_lsn=header.last_commit_lsn,
        )

    def _is_due(self) -> bool:
        """Whether the next block begins a segment; asked only when there is one, so none is without rows."""
        old = self._clock() - self._begun_s >= self._segment_age_s
        return self._descriptor < 0 or self._length_bytes >= self._segment_bytes or old

    def _roll(self) -> None:
        """Begins a segment.  The marker is fsynced first: recovery then never looks further back than one segment."""
        if self._descriptor >= 0:
            self._marker.record(self._marker.marker, durably=True)
        self._close_segment()
        self._segment = SegmentName(self._next_offset, self._marker.epoch)
        path = self._segments / str(self._segment)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        header = SegmentHeader(
            first_offset=self._segment.first_offset,
            epoch=self._segment.epoch,
            timeline=self.identity.timeline,
            previous=self._previous,
        ).encode()
        write_all(self._descriptor, header)
        os.fsync(self._descriptor)
        fsync_path(self._segments)
        self._length_bytes = len(header)
        self._begun_s = self._clock()
        self._previous = str(self._segment)
        reach(_SEGMENT_CREATED)

    def _close_segment(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

"""A full check of a log: every checksum, the order of offsets and of commits, and that every file is there.

A problem says where it is, which offsets cannot be read because of it, who still needs them, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgtide.errors import LogCorruptError, LogRangeError
from pgtide.log.block import holds_reads
from pgtide.log.control import removed
from pgtide.log.folder import Folder
from pgtide.log.marker import damaged_slots, read_marker
from pgtide.log.reader import Block, LogReader
from pgtide.log.recovery import check_end_is_there
from pgtide.log.retention import Reader, readers
from pgtide.log.segment import FOLDER, Extent, View, list_segments, valid_extents
from pgtide.log.storage import Location

_RESTORE = "restore the file from a copy of the log"
_NEW_LOG = "without one, begin a new log (other log.path and source.slot) and load the tables again"


@dataclass(frozen=True, slots=True)
class Problem:
    what: str  # file, byte, what is wrong there
    remedy: str
    first_offset: int | None = None  # of what cannot be read because of it
    end_offset: int | None = None


@dataclass
class CheckResult:
    changes: int = 0
    transactions: int = 0
    blocks: int = 0
    problems: list[Problem] = field(default_factory=list)


def check_log(location: Location) -> CheckResult:
    """Reads everything that readers can see.  A problem does not stop the check of what lies after it, if possible."""
    return _Check(location).run()


class _Check:
    def __init__(self, location: Location) -> None:
        self._log = LogReader(location)
        self._storage = self._log.storage
        self._readers = readers(self._storage)
        self._result = CheckResult()
        self._last_end_lsn = 0

    def run(self) -> CheckResult:
        try:
            view = self._folder(self._storage.path) if isinstance(self._storage, Folder) else self._log.look()
        except LogCorruptError as error:  # how far the log goes is not known: there is nothing more to check
            self._add(error.what, f"{_RESTORE}; {_NEW_LOG}")
            return self._result
        self._check_beginning(view.first_offset)
        for extent in view.extents:
            self._check_segment(extent)
        return self._result

    def _folder(self, path: Path) -> View:
        """What the marker says that there is, also where a segment is missing.  On an object store the marker is one
        object, whole or not to be read at all."""
        epoch, marker = read_marker(path / "control")
        if epoch:
            self._check_slots(path / "control", epoch)
        try:
            check_end_is_there(path)
        except LogCorruptError as error:
            self._add(error.what, f"{_RESTORE}; {_NEW_LOG}")
        return View(marker.end_offset, valid_extents(list_segments(path / FOLDER), marker.end_offset))

    def _check_slots(self, control: Path, epoch: int) -> None:
        # Twice: a slot that the capture is writing at this moment may look damaged, but not the next time.
        for where in sorted({*damaged_slots(control, epoch)} & {*damaged_slots(control, epoch)}):
            self._add(
                f"{where}: this slot of the durable marker is damaged, the other one counts",
                "start the capture (again): it finds its place from the blocks and writes a new marker",
            )

    def _check_beginning(self, first: int) -> None:
        gone = removed(self._storage).end_offset
        if gone < first:
            where = f"{self._storage.location}/{FOLDER}"
            what = f"{where}: offsets {gone} to {first} are missing, and retention did not remove them"
            self._add(what, _RESTORE, gone, first)

    def _check_segment(self, extent: Extent) -> None:
        reached = extent.first_offset
        try:
            for block in self._log.blocks_of(extent):
                reached = block.header.end_offset
                self._check_block(block)
        except LogCorruptError as error:
            self._add(error.what, _RESTORE, reached, extent.end_offset)
        except LogRangeError:
            return  # retention was faster

    def _check_block(self, block: Block) -> None:
        where, header, result = self._log.where(block), block.header, self._result
        result.blocks += 1
        try:
            transactions = self._log.directory(block).transactions
            pieces = list(self._log.slices(block))
        except LogCorruptError as error:
            self._add(error.what, _RESTORE, header.first_offset, header.end_offset)
            return
        offsets: list[int] = []
        damaged = False
        for piece in pieces:
            try:
                offsets += self._log.read(piece).rows["_offset"].to_pylist()
            except LogCorruptError as error:
                damaged = True
                self._add(error.what, _RESTORE, piece.entry.first_offset, piece.entry.last_offset + 1)
        result.changes += len(offsets)
        expected = sum(transactions["changes"].to_pylist())
        if len(set(offsets)) != len(offsets):
            self._wrong(block, f"{where}: an offset occurs twice")
        if expected != len(offsets) and not damaged:
            self._wrong(block, f"{where}: {len(offsets)} changes, expected {expected}")
        end_lsns = [entry["end_lsn"] for entry in transactions.to_pylist() if entry["ends"]]
        result.transactions += len(end_lsns)
        # Rows that were read all have the LSN of their snapshot, at which a commit may have ended.
        alike = holds_reads(transactions)
        pairs = zip([self._last_end_lsn, *end_lsns], end_lsns, strict=False)
        if any(later < lsn or (later == lsn and not alike) for lsn, later in pairs):
            self._wrong(block, f"{where}: commits are not in the order of their LSNs")
        self._last_end_lsn = max([self._last_end_lsn, *end_lsns])

    def _wrong(self, block: Block, what: str) -> None:
        self._add(
            what, f"{_RESTORE}; if that is the same, report it", block.header.first_offset, block.header.end_offset
        )

    def _add(self, what: str, remedy: str, first_offset: int | None = None, end_offset: int | None = None) -> None:
        if first_offset is not None and end_offset is not None:
            remedy = _who_needs(self._readers, first_offset, end_offset, remedy)
        self._result.problems.append(Problem(what, remedy, first_offset, end_offset))


def _who_needs(known: Sequence[Reader], first_offset: int, end_offset: int, remedy: str) -> str:
    """The remedy for offsets that cannot be read: it depends on who has not read them yet."""
    range_of_offsets = f"offsets {first_offset} to {end_offset}"
    needing = [f"{reader.name} (at {reader.offset})" for reader in known if reader.offset < end_offset]
    if needing:
        return f"{', '.join(needing)} still needs {range_of_offsets}: {remedy}; {_NEW_LOG}"
    if known:
        return (
            f"every registered reader has passed {range_of_offsets}; for others, {remedy}, or let it go: "
            "`pgtide log prune --hours 0`"
        )
    return f"{range_of_offsets} cannot be read: {remedy}, or read from {end_offset} on (startingOffsets)"

"""The spool: files of transactions that are too large for memory, in the row format of the log.

A file is a run of blocks without a segment's header; a row's `_place` is its place in the transaction.  Nothing is
fsynced here by itself: until the commit the source can send everything again.  What it cannot send again is made
durable by whoever knows that (`prepared`, `persistent`).  At the commit the log takes the files as they are, without
copying a row.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pgtide.change import Committed, TableRows
from pgtide.errors import ConfigurationError, PgtideError, TransientError
from pgtide.log.block import (
    HEADER_BYTES,
    OpenTransaction,
    decode_rows,
    encode_block,
    parse_directory,
    parse_header,
)
from pgtide.log.files import FILE_MODE, fsync_path, make_directory, replace_durably, write_all
from pgtide.schema import TableShape
from pgtide.transactions.pieces import Piece, row_bytes

FILE_BYTES = 128 << 20
ROWS_SUFFIX = ".spool"
NOTE_SUFFIX = ".prepared"
_OWNER = "owner"
IDS_SUFFIX = ".ids"
# All begin with the number of their transaction; and what was being written aside when the process died.
_NAME = re.compile(r"(\d{10})(-\d{4}\.spool|\.prepared|\.ids)|\.(\d{10}\.prepared|position\.json)\.[0-9a-f]+\.tmp")


class Spool:
    """The folder of all open transactions' files, with a limit over all of them (0: none).

    When a file cannot be written (disk full, folder read-only), `wait` is called: it raises, or returns when it is
    time to try again.

    `owner`: whose it is, where that is not plain from its place.  A start empties the folder, and of another's prepared
    transactions there is no second copy.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int = 0,
        file_bytes: int = FILE_BYTES,
        wait: Callable[[OSError], None] | None = None,
        owner: str = "",
    ) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
        self._wait = wait
        self.used_bytes = 0
        self.named: frozenset[Path] = frozenset()  # must stay, whatever becomes of their transactions
        self._max_bytes = max_bytes
        make_directory(folder)
        if owner:
            _take_possession(folder / _OWNER, owner)
        numbers = [match[1] for path in self.files() if (match := _NAME.fullmatch(path.name))]
        self._number = max((int(number) for number in numbers if number), default=0)

    def files(self) -> list[Path]:
        """Everything that a spool has left here; other files of the folder are somebody else's."""
        return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def new_files(self, transaction: str) -> SpooledFiles:
        self._number += 1
        return SpooledFiles(self, f"{self._number:010d}", transaction)

    def remove_all_but(self, kept: Collection[Path]) -> None:
        """Empties the spool: the source sends again what is not kept."""
        for path in set(self.files()).difference(kept):
            path.unlink(missing_ok=True)

    def discard(self, paths: Collection[Path]) -> None:
        """Removes files that nobody needs; those that are named go later, when they are not named any more."""
        for path in paths:
            if path not in self.named:
                path.unlink(missing_ok=True)

    def claim(self, count: int, transaction: str) -> None:
        """Counts bytes that are about to be written; more than the limit is an error."""
        if self._max_bytes and self.used_bytes + count > self._max_bytes:
            raise PgtideError(
                f"open transactions need more than capture.spool_max_bytes = {self._max_bytes} in {self.folder}; "
                f"the last to ask was transaction {transaction}",
                remedy="raise capture.spool_max_bytes, or end that transaction in the source, then start again",
            )
        self.used_bytes += count

    def wait_after(self, error: OSError) -> None:
        if self._wait is None:
            raise TransientError(f"the spool in {self.folder} cannot be written: {error.strerror or error}") from error
        self._wait(error)


class SpooledFiles:
    """The files of one transaction, in order."""

    def __init__(self, spool: Spool, stem: str, transaction: str) -> None:
        self.stem = stem
        self.paths: list[Path] = []
        self.lengths: list[int] = []  # how many bytes of each file count
        self.shapes: dict[str, TableShape] = {}
        self.row_bytes = 0  # what the rows take in memory
        self.dirty: set[Path] = set()  # written, and perhaps not durable
        self._spool = spool
        self._transaction = transaction
        self._sealed = False  # behind what counts in the last file there may be something else

    @property
    def ids(self) -> Path:
        """Where the ids of the rows are, if the source has any."""
        return self.folder / (self.stem + IDS_SUFFIX)

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)

    @property
    def folder(self) -> Path:
        return self._spool.folder

    def append(self, pieces: Sequence[Committed], first_place: int) -> None:
        """Writes rows behind those that are there; their places begin at `first_place` or later."""
        block = encode_block(pieces, first_place, OpenTransaction(0))
        self._spool.claim(len(block.data), self._transaction)
        if not self.paths or self._sealed or self.lengths[-1] >= self._spool.file_bytes:
            self.paths.append(self.folder / f"{self.stem}-{len(self.paths):04d}{ROWS_SUFFIX}")
            self.lengths.append(0)
            self._sealed = False
        self.dirty.add(self.paths[-1])
        while True:
            try:
                self._write(self.paths[-1], self.lengths[-1], block.data)
                break
            except OSError as error:
                self._spool.wait_after(error)
        self.lengths[-1] += len(block.data)
        self.row_bytes += sum(row_bytes(piece.tables) for piece in pieces)
        self.shapes |= {shape.fingerprint: shape for shape in block.shapes}

    def _write(self, path: Path, position: int, data: bytes) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC) as descriptor:
            os.lseek(descriptor, position, os.SEEK_SET)  # not at the end: an attempt that failed may have left a part
            write_all(descriptor, data)

    def pieces(self) -> Iterator[Piece]:
        """The rows again, a block at a time."""
        for path, length in zip(self.paths, self.lengths, strict=True):
            data, position = path.read_bytes()[:length], 0
            while position < length:
                where = f"{path} at byte {position}"
                header = parse_header(data[position : position + HEADER_BYTES], where)
                block = data[position : position + header.total_bytes]
                directory = parse_directory(block[HEADER_BYTES : HEADER_BYTES + header.directory_bytes], header, where)
                yield tuple(
                    TableRows(
                        self.shapes[table.fingerprint],
                        decode_rows(block[table.position : table.position + table.length_bytes], table, where),
                    )
                    for table in directory.tables
                )
                position += header.total_bytes

    def are_there(self) -> bool:
        """Whether every file has the bytes that count."""
        try:
            return all(path.stat().st_size >= length for path, length in zip(self.paths, self.lengths, strict=True))
        except FileNotFoundError:
            return False

    def to_json(self) -> dict[str, Any]:
        return {
            "stem": self.stem,
            "files": [[path.name, length] for path, length in zip(self.paths, self.lengths, strict=True)],
            "row_bytes": self.row_bytes,
            "shapes": {fingerprint: shape.to_json() for fingerprint, shape in self.shapes.items()},
        }

    @staticmethod
    def from_json(data: dict[str, Any], spool: Spool, transaction: str) -> SpooledFiles:
        """Files that were left by an earlier process; they count against the limit again."""
        files = SpooledFiles(spool, data["stem"], transaction)
        files.paths = [spool.folder / name for name, _ in data["files"]]
        files.lengths = [length for _, length in data["files"]]
        files.row_bytes = data["row_bytes"]
        files.shapes = {fingerprint: TableShape.from_json(shape) for fingerprint, shape in data["shapes"].items()}
        files._sealed = True
        spool.used_bytes += files.nbytes
        spool._number = max(spool._number, int(files.stem))  # it may have no file yet
        return files

    def release(self) -> None:
        """The files belong to somebody else now."""
        self._spool.used_bytes -= self.nbytes
        self.paths, self.lengths, self.dirty = [], [], set()

    def remove(self) -> None:
        self._spool.discard([*self.paths, self.ids])
        self.release()


def fsync_files(paths: Sequence[Path], folder: Path) -> None:
    """Makes the files durable, contents and names."""
    for path in paths:
        with _opened(path, os.O_RDONLY | os.O_CLOEXEC) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                # A second fsync would "succeed" on pages that never reached the disk, and the rows are nowhere else.
                raise TransientError(f"{path} cannot be made durable: {error}; its rows are read again") from error
    fsync_path(folder)


def _take_possession(mark: Path, owner: str) -> None:
    if not mark.exists():
        replace_durably(mark, owner.encode())
    if mark.read_text() != owner:
        raise ConfigurationError(
            f"capture.spool_path: {mark.parent} is the spool of another log",
            remedy=f"choose another capture.spool_path; or, if nothing captures with that log any more, remove {mark}",
        )


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    # Opened for each append: ten thousand open transactions must not mean ten thousand open files.
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

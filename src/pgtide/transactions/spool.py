"""The spool: files of transactions that are too large for memory, in the row format of the log.

A file is a run of blocks without a segment's header; a row's `_place` is its place in the transaction.  Nothing is
fsynced here: until the commit the source can send everything again.  At the commit the log takes the files as they
are, by name, without copying a row.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from pgtide.change import Committed
from pgtide.errors import PgtideError
from pgtide.log.block import OpenTransaction, encode_block
from pgtide.log.files import FILE_MODE, make_directory, write_all
from pgtide.schema import TableShape

FILE_BYTES = 128 << 20


class Spool:
    """The folder of all open transactions' files, with a limit over all of them (0: none)."""

    def __init__(self, folder: Path, max_bytes: int = 0, file_bytes: int = FILE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._number = 0
        self.used_bytes = 0
        shutil.rmtree(folder, ignore_errors=True)  # the source sends again what was not committed
        make_directory(folder)

    def new_files(self, transaction: str) -> SpooledFiles:
        self._number += 1
        return SpooledFiles(self, self._folder, f"{self._number:010d}", transaction)

    def claim(self, count: int, transaction: str) -> None:
        """Counts bytes that are about to be written; more than the limit is an error."""
        if self._max_bytes and self.used_bytes + count > self._max_bytes:
            raise PgtideError(
                f"open transactions need more than capture.spool_max_bytes = {self._max_bytes} in {self._folder}; "
                f"the largest is transaction {transaction}",
                remedy="raise capture.spool_max_bytes, or end that transaction in the source, then start again",
            )
        self.used_bytes += count

    @property
    def file_bytes(self) -> int:
        return self._file_bytes


class SpooledFiles:
    """The files of one transaction, in order."""

    def __init__(self, spool: Spool, folder: Path, stem: str, transaction: str) -> None:
        self._spool = spool
        self._folder = folder
        self._stem = stem
        self._transaction = transaction
        self.paths: list[Path] = []
        self.shapes: dict[str, TableShape] = {}
        self.nbytes = 0
        self._last_bytes = 0

    def append(self, pieces: Sequence[Committed], first_place: int) -> None:
        """Writes rows behind those that are there; their places begin at `first_place` or later."""
        block = encode_block(pieces, first_place, OpenTransaction(0))
        self._spool.claim(len(block.data), self._transaction)
        self.nbytes += len(block.data)
        if not self.paths or self._last_bytes >= self._spool.file_bytes:
            self.paths.append(self._folder / f"{self._stem}-{len(self.paths):04d}.spool")
            self._last_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with _opened(self.paths[-1], flags) as descriptor:
            write_all(descriptor, block.data)
        self._last_bytes += len(block.data)
        self.shapes |= {shape.fingerprint: shape for shape in block.shapes}

    def release(self) -> None:
        """The files belong to somebody else now."""
        self._spool.used_bytes -= self.nbytes
        self.nbytes = 0

    def remove(self) -> None:
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self.paths = []
        self.release()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    # Opened for each append: ten thousand open transactions must not mean ten thousand open files.
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

"""Files of transactions that were too large for memory: `large/<first offset>-<epoch>-<n>.seg`.

They are runs of blocks, written before their transaction committed, so the rows in them have places, not offsets.
The block of the commit names them; they go when the segment with that block goes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pgtide.change import LargeTransaction
from pgtide.errors import LogCorruptError, TransientError
from pgtide.log.block import HEADER_BYTES, BlockHeader, parse_header
from pgtide.log.files import fsync_path, make_directory
from pgtide.log.storage import Storage

FOLDER = "large"
_NAME = re.compile(r"(\d{20})-(\d{10})-(\d{4})\.seg")


def folder_of(log_path: Path) -> Path:
    return log_path / FOLDER


def first_offset_of(name: str) -> int:
    """Of the transaction whose rows the file holds."""
    return int(name.rpartition("/")[2][:20])


def adopt(large: LargeTransaction, log_path: Path, first_offset: int, epoch: int) -> list[tuple[str, int]]:
    """Makes the transaction's files durable under their names in the log; returns names and lengths.

    Files that must also stay where they are get a second name.  Files on another file system are copied.  Called again
    after a failure, it goes on with what is not moved yet.
    """
    folder = folder_of(log_path)
    make_directory(folder)
    names = []
    for number, (path, length_bytes) in enumerate(zip(large.files, large.lengths_bytes, strict=True)):
        target = folder / f"{first_offset:020d}-{epoch:010d}-{number:04d}.seg"
        if not path.exists():  # an earlier attempt, of an earlier epoch, has moved it
            path = max(folder.glob(f"{first_offset:020d}-*-{number:04d}.seg"))
        try:
            fsync_path(path)
        except OSError as error:
            # A second fsync would "succeed" on pages that never reached the disk, and the rows are nowhere else.
            raise TransientError(f"{path} cannot be made durable: {error}; its transaction is read again") from error
        if large.kept:
            for earlier in folder.glob(f"{first_offset:020d}-*-{number:04d}.seg"):
                earlier.unlink()  # of an attempt that failed
            _link(path, target)
        else:
            _move(path, target)
        names.append((target.name, length_bytes))
    fsync_path(folder)
    return names


def remove_orphans(log_path: Path, end_offset: int) -> None:
    """Removes files that no block can refer to: their transaction would begin at or after the log's end."""
    folder = folder_of(log_path)
    for name in os.listdir(folder) if folder.exists() else ():
        match = _NAME.fullmatch(name)
        if match and int(match[1]) >= end_offset:
            (folder / name).unlink()


def blocks_of(storage: Storage, name: str, length_bytes: int) -> Iterator[tuple[int, BlockHeader]]:
    """Position and header of every block in a file."""
    where = f"{storage.location}/{name}"
    position = 0
    with storage.open(name) as file:
        size = file.seek(0, os.SEEK_END)
        if size < length_bytes:
            raise LogCorruptError(
                f"{where} at byte {size}: the file ends here, the log refers to {length_bytes} bytes of it"
            )
        while position < length_bytes:
            file.seek(position)
            header = parse_header(file.read(HEADER_BYTES), f"{where} at byte {position}")
            yield position, header
            position += header.total_bytes


def _move(path: Path, target: Path) -> None:
    try:
        os.replace(path, target)
    except OSError:
        _copy(path, target)
        path.unlink()


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another file system, or one without links
        _copy(path, target)


def _copy(path: Path, target: Path) -> None:
    shutil.copyfile(path, target)
    fsync_path(target)

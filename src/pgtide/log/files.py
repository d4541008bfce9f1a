"""Writing files so that they are there after a power loss: data, then name, then the folder that holds the name."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_LEFTOVER_S = 3600.0  # a file that is still aside after so long was left behind by a process that died


def make_directory(path: Path) -> None:
    """Makes the folder and its parents, each one durable in its parent."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=DIRECTORY_MODE)
        fsync_path(folder.parent)


def fsync_path(path: Path) -> None:
    """Makes a file's contents durable, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Writes everything; a short write that makes no progress surfaces as the next call's error (disk full)."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_durably(path: Path, data: bytes) -> None:
    """Puts `data` at `path`: afterwards either the old or the new content is there, whatever happens."""
    aside = _write_aside(path, data)
    try:
        os.replace(aside, path)
    except BaseException:
        _remove(aside)
        raise
    fsync_path(path.parent)


def create_durably(path: Path, data: bytes) -> bool:
    """Creates `path` with `data` in one step; False if it is there already."""
    aside = _write_aside(path, data)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        _remove(aside)
    try:
        fsync_path(path.parent)
    except BaseException:
        _remove(path)  # not created, as far as anybody is told: it must not be found there by the next attempt
        raise
    return True


def remove_leftovers(folder: Path) -> None:
    """Removes what processes that died have left aside; a file that somebody writes just now is too young to go."""
    for aside in folder.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - aside.stat().st_mtime > _LEFTOVER_S:
                aside.unlink()


def _write_aside(path: Path, data: bytes) -> Path:
    """A file beside `path` with this content, durable; a disk that is full is left as it was."""
    # Threads of one process, and processes of several machines, may write the same file at once.
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        _remove(aside)
        raise
    return aside


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()

"""Writing files so that they are there after a power loss: data, then name, then the folder that holds the name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def make_directory(path: Path) -> None:
    """Makes the folder and its parents, each one durable in its parent."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=DIRECTORY_MODE)
        fsync_directory(folder.parent)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
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
    os.replace(aside, path)
    fsync_directory(path.parent)


def create_durably(path: Path, data: bytes) -> bool:
    """Creates `path` with `data` in one step; False if it is there already."""
    aside = _write_aside(path, data)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(aside)
    fsync_directory(path.parent)
    return True


def _write_aside(path: Path, data: bytes) -> Path:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return aside

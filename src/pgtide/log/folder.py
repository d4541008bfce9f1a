"""A folder as the storage of a log."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from pgtide.log.files import FILE_MODE, create_durably, fsync_path, make_directory, replace_durably
from pgtide.log.storage import OpenedFile, Stored

_LOCK = ".lock"


class Folder:
    """See `storage.Storage`.  Names that begin with a dot are files in the making."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def location(self) -> str:
        return str(self.path)

    def entries(self, folder: str, after: str = "") -> list[Stored]:
        return sorted(self._below(folder, after), key=lambda entry: entry.name)

    def _below(self, folder: str, after: str) -> Iterator[Stored]:
        try:
            with os.scandir(self.path / folder) as found:
                listed = list(found)
        except FileNotFoundError:
            return
        for entry in listed:
            name = f"{folder}/{entry.name}"
            if entry.is_dir():
                yield from self._below(name, after)
            elif name > after and not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # retention was faster
                    status = entry.stat()
                    yield Stored(name, status.st_size, status.st_mtime)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_range(self, name: str, position: int, length: int) -> bytes:
        descriptor = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, length, position)
        finally:
            os.close(descriptor)

    def open(self, name: str) -> OpenedFile:
        return open(self.path / name, "rb", buffering=0)

    def versioned(self, name: str) -> tuple[bytes, str] | None:
        try:
            data = self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data, xxhash.xxh3_64_hexdigest(data)

    def create(self, name: str, data: bytes) -> str | None:
        path = self.path / name
        make_directory(path.parent)
        return xxhash.xxh3_64_hexdigest(data) if create_durably(path, data) else None

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        with self._one_at_a_time((self.path / name).parent):
            found = self.versioned(name)
            if found is None or found[1] != version:
                return None
            self.write(name, data)
        return xxhash.xxh3_64_hexdigest(data)

    def write(self, name: str, data: bytes) -> None:
        path = self.path / name
        make_directory(path.parent)
        replace_durably(path, data)

    def copy_in(self, name: str, file: Path) -> int:
        data = file.read_bytes()
        self.create(name, data)
        return len(data)

    def delete(self, name: str) -> None:
        path = self.path / name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            fsync_path(path.parent)

    @staticmethod
    @contextlib.contextmanager
    def _one_at_a_time(folder: Path) -> Iterator[None]:
        """Between processes of one machine; they hold it for the time of an fsync."""
        # A file, opened for writing: on a network folder nothing else can be locked.
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

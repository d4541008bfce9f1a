"""One process mirrors a log: the second one is told so, and stops before it touches anything.

Two drivers in one JVM come out right, because Iceberg's catalog of files locks a table's commits within the JVM and
every write is a compare-and-swap.  Between JVMs that catalog has no lock, and two processes could replace each
other's commits.  So the process that mirrors holds a lock on a file beside the log; the system lets go of it when the
process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pgtide.errors import AlreadyRunningError
from pgtide.log.files import FILE_MODE, make_directory

_registry = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}  # per file: its descriptor, and how many of this process rely on it


@contextmanager
def only_mirror(folder: Path) -> Iterator[None]:
    """Raises AlreadyRunningError when another process mirrors this log; may be nested."""
    file = (folder / "control" / "mirror.lock").resolve()
    with _registry:
        descriptor, users = _held.get(file) or (_lock(file, folder), 0)
        _held[file] = descriptor, users + 1
    try:
        yield
    finally:
        with _registry:
            descriptor, users = _held.pop(file)
            if users > 1:
                _held[file] = descriptor, users - 1
            else:
                os.close(descriptor)


def _lock(file: Path, folder: Path) -> int:
    make_directory(file.parent)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat("T", "seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    except BlockingIOError:
        holder_told = _told(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        raise AlreadyRunningError(
            f"another process mirrors the log in {folder}: {holder_told}",
            remedy="A log has one mirror. Let that one go on, or end it (kill PID) before you start this one.",
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _told(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"pid {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "it has not yet said which"  # it took the lock this very moment

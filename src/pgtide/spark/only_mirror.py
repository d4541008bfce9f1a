"""One process mirrors a log: the second one is told so, and stops before it touches anything.

Two drivers in one JVM come out right, because Iceberg's catalog of files locks a table's commits within the JVM and
every write is a compare-and-swap.  Between JVMs that catalog has no lock, and two processes could replace each
other's commits.  So the process that mirrors holds a lock on a file; the system lets go of it when the process ends,
however it ends.  The file is beside the log; for one in an object store it is in this machine's folder for temporary
files, and other machines are kept away by a lease in the store (`mirror_lease`).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from pgtide.config import is_url
from pgtide.errors import AlreadyRunningError
from pgtide.log.files import FILE_MODE, make_directory
from pgtide.log.identity import read_identity
from pgtide.log.storage import storage_at
from pgtide.spark.mirror_lease import REMEDY, Holder, MirrorLease

_BEAT_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Hold:
    """What a process has that mirrors."""

    descriptor: int
    lease: MirrorLease | None

    def check(self) -> None:
        """Raises once a mirror on another machine has taken the log."""
        if self.lease is not None:
            self.lease.check()

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()
        os.close(self.descriptor)


_registry = threading.Lock()
_held: dict[Path, tuple[Hold, int]] = {}  # per file: and how many of this process rely on it


@contextmanager
def only_mirror(location: str) -> Iterator[Hold]:
    """Raises AlreadyRunningError when another process mirrors the log in this folder or store; may be nested."""
    file = _lock_file(location).resolve()
    with _registry:
        hold, users = _held.get(file) or (_take(file, location), 0)
        _held[file] = hold, users + 1
    try:
        yield hold
    finally:
        with _registry:
            hold, users = _held.pop(file)
            if users > 1:
                _held[file] = hold, users - 1
            else:
                hold.release()


def _lock_file(location: str) -> Path:
    if not is_url(location):
        return Path(location) / "control" / "mirror.lock"
    # By the log's id: configurations in different folders may have the same log, and stores buckets of the same name.
    log_id = read_identity(storage_at(location)).log_id
    return Path(tempfile.gettempdir()) / f"pgtide-{os.getuid()}" / "mirrors" / f"{log_id}.lock"


def _take(file: Path, location: str) -> Hold:
    descriptor, holder = _lock(file, location)
    try:
        lease = MirrorLease(storage_at(location, _BEAT_PATIENCE_S), holder) if is_url(location) else None
    except BaseException:
        os.close(descriptor)
        raise
    return Hold(descriptor, lease)


def _lock(file: Path, location: str) -> tuple[int, Holder]:
    make_directory(file.parent)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file keeps its name for as long as it is there: names of machines may be the same.
        before = Holder.read(os.pread(descriptor, 4096, 0))
        lock = before.lock if before else uuid.uuid4().hex
        holder = Holder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat("T", "seconds"), lock)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
    except BlockingIOError:
        said = Holder.read(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        raise AlreadyRunningError(
            f"another process mirrors the log in {location}: {said or 'it has not yet said which'}", remedy=REMEDY
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, holder

"""What the capture says of itself, for `pgtide status`: `control/capture.json`.

The file has its full size from the beginning and is overwritten in place, so that it can also be said that the disk is
full.  A lock on it, which the kernel lets go when the process ends, tells whether the capture is there at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pgtide.log.files import FILE_MODE

_FILE = "capture.json"
_BYTES = 4096
_READS = 5  # a reader may meet the file half written


@dataclass(frozen=True, slots=True)
class CapturePresence:
    running: bool
    phase: str  # starting, streaming, reading, waiting, stopped
    detail: str
    since: str  # when it said so


class Presence:
    """The capture's side.  That something cannot be said is never a reason to stop.

    Only one process says something: a second capture that was started by mistake leaves the word to the first.
    """

    def __init__(self, log_path: Path) -> None:
        self._path = log_path / "control" / _FILE
        self._descriptor = -1
        self._wanted: tuple[str, str] | None = None
        self._said: tuple[str, str] | None = None
        self._lock = threading.Lock()

    def say(self, phase: str, detail: str = "") -> None:
        with self._lock:
            self._wanted = (phase, detail)
            self._try()

    def keep_saying(self) -> None:
        """Says what could not be said before: the folder was not there yet, or a predecessor had not ended."""
        with self._lock:
            self._try()

    def _try(self) -> None:
        if self._wanted is None or self._said == self._wanted:
            return
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            phase, detail = self._wanted
            said = {"phase": phase, "detail": detail[: _BYTES // 8], "since": datetime.now(UTC).isoformat()}
            os.pwrite(self._descriptor, json.dumps(said).encode().ljust(_BYTES), 0)
            self._said = self._wanted

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            self._wanted = self._said = None
            if descriptor >= 0:
                os.close(descriptor)


def capture_presence(log_path: Path) -> CapturePresence | None:
    """What the capture of this log says of itself, or said last; None if it never did."""
    try:
        descriptor = os.open(log_path / "control" / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        for _ in range(_READS):
            with contextlib.suppress(ValueError, KeyError):
                said = json.loads(os.pread(descriptor, _BYTES, 0))
                return CapturePresence(_is_locked(descriptor), said["phase"], said["detail"], said["since"])
    finally:
        os.close(descriptor)
    return None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False

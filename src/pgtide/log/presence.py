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
_BYTES = 8192
_TEXT_MAX = _BYTES // 16  # two texts, of which a character may take six bytes
_READS = 5  # a reader may meet the file half written


@dataclass(frozen=True, slots=True)
class CapturePresence:
    running: bool
    phase: str  # starting, streaming, reading, waiting, stopped
    detail: str
    since: str  # when it said so
    snapshot_trouble: str  # why a load that has asked for one has none yet, or may lose it


class Presence:
    """The capture's side.  That something cannot be said is never a reason to stop.

    Only one process says something: a second capture that was started by mistake leaves the word to the first.
    """

    def __init__(self, log_path: Path) -> None:
        self._path = log_path / "control" / _FILE
        self._descriptor = -1
        self._wanted: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._snapshot_trouble = ""
        self._lock = threading.Lock()

    def say(self, phase: str, detail: str = "") -> None:
        with self._lock:
            since = datetime.now(UTC).isoformat()
            self._wanted = {"phase": phase, "detail": detail[:_TEXT_MAX], "since": since}
            self._try()

    def keep_saying(self, snapshot_trouble: str = "") -> None:
        """Says what could not be said before: the folder was not there yet, or a predecessor had not ended."""
        with self._lock:
            self._snapshot_trouble = snapshot_trouble[:_TEXT_MAX]
            self._try()

    def _try(self) -> None:
        wanted = self._wanted and self._wanted | {"snapshot_trouble": self._snapshot_trouble}
        if self._said == wanted:
            return
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._descriptor, json.dumps(wanted).encode().ljust(_BYTES), 0)
            self._said = wanted

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            self._wanted, self._said = {}, {}
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
                phase, detail, since = said["phase"], said["detail"], said["since"]
                return CapturePresence(_is_locked(descriptor), phase, detail, since, said.get("snapshot_trouble", ""))
    finally:
        os.close(descriptor)
    return None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False

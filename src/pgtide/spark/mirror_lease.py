"""Who mirrors a log in an object store, across machines: `control/mirror`, which the mirror keeps replacing.

Each version is replaced only by whoever has seen it, and no clocks are compared: a mirror that sees the object change
is told that there is another, and one that does not see it change for long takes it.  A mirror that was cut off for so
long, and has been replaced, finds that out at its next beat and stops.  Between the two both may write to the lake, as
each other's conflicts: a lease is no fence.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields

from pgtide.errors import AlreadyRunningError
from pgtide.log.storage import Storage

_NAME = "control/mirror"
_BEAT_S = 10.0
_EXPIRES_S = 60.0  # beats that a living mirror misses for as long: none of them reached the store
_LOOK_S = 0.5
_END_LIMIT_S = 10.0

_log = logging.getLogger("pgtide")

REMEDY = "A log has one mirror. Let that one go on, or end it (kill PID) before you start this one."


@dataclass(frozen=True, slots=True)
class Holder:
    """`lock` names the file that the process has locked: whoever has that lock now knows that the process has ended."""

    pid: int
    host: str
    since: str
    lock: str
    lease: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, since {self.since}"

    @staticmethod
    def read(content: bytes) -> Holder | None:
        """None: nobody, or it was taken this very moment and does not say by whom."""
        try:
            said = json.loads(content)
            return Holder(**{one.name: said[one.name] for one in fields(Holder)})
        except (ValueError, KeyError, TypeError):
            return None


class MirrorLease:
    """Taken when it is made, kept by a thread until `release`."""

    def __init__(self, storage: Storage, holder: Holder) -> None:
        self._storage = storage
        self._holder = holder
        self._beats = 0
        self._lost: AlreadyRunningError | None = None
        self._over = threading.Event()
        self._version = self._take()
        self._thread = threading.Thread(target=self._keep, name="pgtide-mirror-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises once another mirror has taken the log."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """A mirror that starts next need not wait."""
        self._over.set()
        self._thread.join(_END_LIMIT_S)  # a store that does not answer is not waited for
        if self._lost is None and not self._thread.is_alive():
            with suppress(OSError):  # then it expires
                self._storage.replace(_NAME, b"{}", self._version)

    def _take(self) -> str:
        seen, seen_s = "", 0.0
        while True:
            found = self._storage.versioned(_NAME)
            holder = Holder.read(found[0]) if found else None
            if found and holder is not None and not self._has_ended(holder):
                if not seen:
                    seen, seen_s = found[1], time.monotonic()
                    _log.info("the log was mirrored by %s; is it still?", holder)
                elif found[1] != seen:
                    raise self._told(holder)
                if time.monotonic() - seen_s < _EXPIRES_S:
                    time.sleep(_LOOK_S)
                    continue
            version = self._put(found[1] if found else None)
            if version is not None:
                return version

    def _has_ended(self, holder: Holder) -> bool:
        return (holder.host, holder.lock) == (self._holder.host, self._holder.lock)

    def _keep(self) -> None:
        while not self._over.wait(_BEAT_S):
            try:
                version = self._put(self._version)
                if version is None:
                    found = self._storage.versioned(_NAME)
                    self._lost = self._told(Holder.read(found[0]) if found else None)
                    return
                self._version = version
            except OSError:
                continue  # a store that does not answer answers no other mirror either, or it is found out later

    def _put(self, version: str | None) -> str | None:
        """The new version; None if somebody else was faster.  An attempt whose answer was lost is found again."""
        self._beats += 1
        data = json.dumps(asdict(self._holder) | {"beats": self._beats}).encode()
        made = self._storage.create(_NAME, data) if version is None else self._storage.replace(_NAME, data, version)
        if made is not None:
            return made
        found = self._storage.versioned(_NAME)
        return found[1] if found is not None and Holder.read(found[0]) == self._holder else None

    def _told(self, holder: Holder | None) -> AlreadyRunningError:
        return AlreadyRunningError(
            f"another process mirrors the log in {self._storage.location}: {holder or 'it has not said which'}",
            remedy=REMEDY,
        )

"""An object store in memory, with everything that can go wrong between a client and a real one.

A client's requests go through a `Connection`, which stops before and after each of them and asks what shall happen: a
request may fail, succeed without its answer arriving, be repeated by the network, or arrive only later, when its
sender has given up long ago.  So any interleaving of clients can be played, one request at a time, and a client can be
killed or forgotten at any of them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TypeVar

from pgtide.errors import LogUnreachableError
from pgtide.log.ranges import Part, RangedFile, Ranges
from pgtide.log.storage import OpenedFile, Stored

T = TypeVar("T")
_STEP_LIMIT_S = 60.0


class Fate(Enum):
    """What becomes of a request."""

    FINE = auto()
    FAILS = auto()
    ANSWER_LOST = auto()
    REPEATED = auto()
    LATE = auto()


@dataclass
class MemoryStore:
    """See `storage.Storage`.  Versions are hashes of the content, as S3's are."""

    location: str = "memory://log"
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    clock_s: float = 1_000_000.0
    requests: int = 0

    def entries(self, folder: str, after: str = "") -> list[Stored]:
        self.requests += 1
        names = sorted(name for name in self.objects if name.startswith(f"{folder}/") and name > after)
        return [Stored(name, len(self.objects[name][0]), self.objects[name][1]) for name in names]

    def read(self, name: str) -> bytes:
        self.requests += 1
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][0]

    def read_range(self, name: str, position: int, length: int) -> bytes:
        return self.read(name)[position : position + length]

    def open(self, name: str) -> OpenedFile:
        def fetch(name: str, position: int, length: int) -> Part:
            data = self.read(name)
            return Part(position, data[position : position + length], len(data))

        return RangedFile(Ranges(fetch), name)

    def versioned(self, name: str) -> tuple[bytes, str] | None:
        self.requests += 1
        found = self.objects.get(name)
        return None if found is None else (found[0], _version(found[0]))

    def create(self, name: str, data: bytes) -> str | None:
        return None if name in self.objects else self._put(name, data)

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        found = self.objects.get(name)
        return self._put(name, data) if found is not None and _version(found[0]) == version else None

    def write(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def copy_in(self, name: str, file: Path) -> int:
        data = file.read_bytes()
        self.create(name, data)
        return len(data)

    def delete(self, name: str) -> None:
        self.requests += 1
        self.objects.pop(name, None)

    def _put(self, name: str, data: bytes) -> str:
        self.requests += 1
        self.objects[name] = (data, self.clock_s)
        return _version(data)


def _version(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Killed(BaseException):
    """The client's process is gone."""


class Client:
    """A client in a thread of its own, of which one request at a time is let through."""

    def __init__(
        self, store: MemoryStore, late: list[Callable[[], object]], work: Callable[[Connection], object]
    ) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._fate = Fate.FINE
        self._killed = False
        self.over = False
        self.failure: BaseException | None = None
        connection = Connection(store, late, self._pause)

        def run() -> None:
            try:
                self._pause()
                work(connection)
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self.failure = error
            self.over = True
            self._stopped.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._wait()

    def step(self, fate: Fate = Fate.FINE) -> None:
        """Lets it go on to its next request, or to the answer of the one at hand."""
        if not self.over:
            self._fate = fate
            self._go.release()
            self._wait()

    def kill(self) -> None:
        if not self.over:
            self._killed = True
            self.step()
            self._thread.join()

    def _wait(self) -> None:
        assert self._stopped.acquire(timeout=_STEP_LIMIT_S), "a client does not come to its next request"

    def _pause(self) -> Fate:
        self._stopped.release()
        self._go.acquire()
        if self._killed:
            raise Killed
        return self._fate


class Connection:
    """What one client sees of the store."""

    def __init__(self, store: MemoryStore, late: list[Callable[[], object]], pause: Callable[[], Fate]) -> None:
        self._store = store
        self._late = late
        self._pause = pause

    @property
    def location(self) -> str:
        return self._store.location

    def entries(self, folder: str, after: str = "") -> list[Stored]:
        return self._ask(lambda: self._store.entries(folder, after))

    def read(self, name: str) -> bytes:
        return self._ask(lambda: self._store.read(name))

    def read_range(self, name: str, position: int, length: int) -> bytes:
        return self._ask(lambda: self._store.read_range(name, position, length))

    def open(self, name: str) -> OpenedFile:
        return self._ask(lambda: self._store.open(name))

    def versioned(self, name: str) -> tuple[bytes, str] | None:
        return self._ask(lambda: self._store.versioned(name))

    def create(self, name: str, data: bytes) -> str | None:
        return self._change(lambda: self._store.create(name, data))

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        return self._change(lambda: self._store.replace(name, data, version))

    def write(self, name: str, data: bytes) -> None:
        self._change(lambda: self._store.write(name, data))

    def copy_in(self, name: str, file: Path) -> int:
        data = file.read_bytes()
        self._change(lambda: self._store.create(name, data))
        return len(data)

    def delete(self, name: str) -> None:
        self._change(lambda: self._store.delete(name))

    def _ask(self, request: Callable[[], T]) -> T:
        if self._pause() is Fate.FAILS:
            raise LogUnreachableError("the store does not answer")
        return request()

    def _change(self, request: Callable[[], T]) -> T:
        fate = self._pause()
        if fate is Fate.LATE:
            self._late.append(request)
        if fate in (Fate.FAILS, Fate.LATE):
            raise LogUnreachableError("the store does not answer")
        answer = request()
        if fate is Fate.REPEATED:
            answer = request()
        self._pause()
        if fate is Fate.ANSWER_LOST:
            raise LogUnreachableError("the answer was lost")
        return answer

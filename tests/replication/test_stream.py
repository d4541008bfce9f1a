"""When what has arrived is handed on: at once, unless so much comes that it is better gathered first."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from pgtide.replication import stream as stream_module
from pgtide.replication.channels import Received
from pgtide.replication.stream import ReplicationStream

SLOW, FAST = 1_000, 500_000


class ScriptedChannel:
    """Turns that bring so many bytes each; a message holds all that came since the last one."""

    def __init__(self, turns: Sequence[int], descriptor: int) -> None:
        self._turns = iter(turns)
        self._descriptor = descriptor
        self._held_bytes = 0

    def start(self, command: bytes, stop: threading.Event) -> None: ...

    def fileno(self) -> int:
        return self._descriptor

    def receive(self) -> int:
        arrived_bytes = next(self._turns, 0)
        self._held_bytes += arrived_bytes
        return arrived_bytes

    def messages(self) -> Received | None:
        length, self._held_bytes = self._held_bytes, 0
        return Received(bytearray(), np.array([0]), np.array([length])) if length else None

    def send(self, payload: bytes) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def streaming(turns: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicationStream]:
    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")  # there is always something to read
        monkeypatch.setattr(stream_module, "open_channel", lambda *_: ScriptedChannel(turns, here.fileno()))
        stream = ReplicationStream(cast("Any", None), "slot", 0, {}, batch_wait_ms=1)
        with contextlib.closing(stream):
            yield stream


def handed_on(turns: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each turn brings to the reader, in bytes."""
    with streaming(turns, monkeypatch) as stream:
        reads = [stream.read(wait_ms=100) for _ in turns]
    return [received.nbytes if received else 0 for received in reads]


def test_what_comes_slowly_is_handed_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handed_on([SLOW, SLOW, SLOW], monkeypatch) == [SLOW, SLOW, SLOW]


def test_what_comes_fast_is_gathered_until_less_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_GATHERED_S", 3600.0)
    assert handed_on([FAST, FAST, SLOW, SLOW], monkeypatch) == [0, 0, 2 * FAST + SLOW, SLOW]


def test_what_comes_fast_is_gathered_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_GATHERED_S", 3600.0)
    assert handed_on([FAST] * 10, monkeypatch) == [0, 0, 0, 0, 5 * FAST] * 2


def test_what_comes_fast_is_gathered_only_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_GATHERED_S", 0.0)
    assert handed_on([FAST] * 3, monkeypatch) == [FAST] * 3

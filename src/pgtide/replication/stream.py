"""The replication stream: raw CopyData payloads in, "durable up to here" out.

Reading is lazy.  The walsender flushes after every change, so an eager reader is woken once per change and both sides
pay for it.  Under load the socket wakes us only for `SO_RCVLOWAT` bytes or after a few milliseconds, whichever comes
first; when the stream has gone quiet the threshold falls to one byte, so that a lone transaction is seen at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgtide.lsn import format_lsn
from pgtide.replication.channels import Received, open_channel

_HEAVY_BYTES = 64 << 10  # what one read brings when the server sends as fast as it can
_POSTGRES_EPOCH_US = 946_684_800_000_000
_STATUS = struct.Struct(">cQQQqB")


@dataclass(frozen=True, slots=True)
class _Load:
    """How lazily to read: wake up for so many bytes, or after `patience` times the batch wait (0: at once)."""

    low_water_bytes: int
    patience: int


_QUIET = _Load(1, 0)
_BUSY = _Load(128 << 10, 1)
# Every read costs about 2 ms of CPU however much it brings, so under full load it pays to let more arrive; at 1 MiB the
# server waits for us.
_HEAVY = _Load(512 << 10, 3)


class ReplicationStream:
    """One START_REPLICATION on a connection of its own, from `start_lsn` on.  Used by one thread, but for `wake`."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        slot: str,
        start_lsn: int,
        options: Mapping[str, str],
        batch_wait_ms: int = 10,
    ) -> None:
        self._channel = open_channel(connection, slot)
        self._channel.start(
            sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})")
            .format(
                sql.Identifier(slot),
                sql.SQL(format_lsn(start_lsn)),
                sql.SQL(", ").join(
                    sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in options.items()
                ),
            )
            .as_bytes(connection)
        )
        self._waking = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._batch_wait_ms = batch_wait_ms
        self._load = _QUIET

    def read(self, wait_ms: int) -> Received | None:
        """Messages that have arrived; waits for some at most `wait_ms`.  Each payload begins with 'w' or 'k'."""
        started = time.monotonic()
        patience_ms = self._load.patience * self._batch_wait_ms
        ready = [descriptor for descriptor, _ in self._poll.poll(min(wait_ms, patience_ms) if patience_ms else wait_ms)]
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            if ready == [self._wake_read] and self._load is not _QUIET:
                return None  # woken to answer the server; what is arriving may go on arriving
        received = self._channel.receive()
        waited_ms = (time.monotonic() - started) * 1000
        if received is None or (self._load is _QUIET and waited_ms >= self._batch_wait_ms):
            self._set_load(_QUIET)
        else:
            self._set_load(_HEAVY if received.ends[-1] - received.starts[0] >= _HEAVY_BYTES else _BUSY)
        return received

    def wake(self) -> None:
        """Ends a read() that waits, from another thread."""
        with self._waking, contextlib.suppress(OSError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def send_status(self, durable_lsn: int) -> None:
        """Acknowledges: the server may forget everything up to `durable_lsn`."""
        now_us = time.time_ns() // 1000 - _POSTGRES_EPOCH_US
        self._channel.send(_STATUS.pack(b"r", durable_lsn, durable_lsn, durable_lsn, now_us, 0))

    def close(self) -> None:
        with contextlib.suppress(OSError, psycopg.Error):
            self._channel.close()
        with self._waking:  # once closed, the number may be another file's: nobody may write to it any more
            descriptors, self._wake_read, self._wake_write = (self._wake_read, self._wake_write), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _set_load(self, load: _Load) -> None:
        if load is not self._load:
            self._load = load
            duplicate = socket.socket(fileno=os.dup(self._channel.fileno()))
            with contextlib.closing(duplicate), contextlib.suppress(OSError):  # unix sockets have no such threshold
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, load.low_water_bytes)

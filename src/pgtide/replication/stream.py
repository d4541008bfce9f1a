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
from typing import Any

import psycopg
from psycopg import sql

from pgtide.lsn import format_lsn
from pgtide.replication.channels import Received, open_channel

_LOW_WATER_BYTES = 128 << 10  # 1 MiB and more was slower: the server waits for us
_POSTGRES_EPOCH_US = 946_684_800_000_000
_STATUS = struct.Struct(">cQQQqB")


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
        self._busy = False

    def read(self, wait_ms: int) -> Received | None:
        """Messages that have arrived; waits for some at most `wait_ms`.  Each payload begins with 'w' or 'k'."""
        started = time.monotonic()
        ready = self._poll.poll(min(wait_ms, self._batch_wait_ms) if self._busy else wait_ms)
        if any(descriptor == self._wake_read for descriptor, _ in ready):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        received = self._channel.receive()
        waited_ms = (time.monotonic() - started) * 1000
        self._set_busy(received is not None and (self._busy or waited_ms < self._batch_wait_ms))
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

    def _set_busy(self, busy: bool) -> None:
        if busy != self._busy:
            self._busy = busy
            low_water = _LOW_WATER_BYTES if busy else 1
            duplicate = socket.socket(fileno=os.dup(self._channel.fileno()))
            with contextlib.closing(duplicate), contextlib.suppress(OSError):  # unix sockets have no such threshold
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

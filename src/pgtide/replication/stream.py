"""The replication stream: raw CopyData payloads in, "durable up to here" out.

Reading is lazy.  The walsender flushes after every change, so an eager reader is woken once per change and both sides
pay for it.  While messages come, the socket is left alone for some milliseconds and then emptied; when nothing has come
for that long, the next message is waited for, so that a lone transaction is seen at once.
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

# On one machine a small window makes the server's sends cheap: they only fill its own buffer, and the kernel moves that
# over in large pieces when we read.  With the window that the kernel would choose, each change is a packet of its own,
# and 60 % of a walsender's time goes there: a million rows took it 5.5 s of CPU, and 2.8 s with this.  32 KiB and less
# stall it; between machines a small window costs a round trip each time it fills.
_WINDOW_BYTES = 128 << 10
# A feed costs 1 to 2 ms before its first row.  Where a turn brings this much, more than 10 MB come in a second: then
# feeds wait for one another, up to these limits.  The socket is emptied all the same, so that the server goes on.
_FAST_TURN_BYTES = 128 << 10
_GATHERED_BYTES = 2 << 20
_GATHERED_S = 0.025
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
        stop: threading.Event | None = None,
    ) -> None:
        self._channel = open_channel(connection, slot)
        _limit_window(self._channel.fileno())
        self._channel.start(
            sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})")
            .format(
                sql.Identifier(slot),
                sql.SQL(format_lsn(start_lsn)),
                sql.SQL(", ").join(
                    sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in options.items()
                ),
            )
            .as_bytes(connection),
            stop or threading.Event(),
        )
        self._waking = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._woken = select.poll()
        self._woken.register(self._wake_read, select.POLLIN)
        self._arrived = select.poll()
        self._arrived.register(self._channel.fileno(), select.POLLIN)
        self._arrived.register(self._wake_read, select.POLLIN)
        self._batch_wait_s = batch_wait_ms / 1000
        self._emptied_at: float | None = None  # when messages were taken last; None once it has gone quiet
        self._gathered_from: float | None = None  # since when messages are gathered that are not handed on yet
        self._gathered_bytes = 0

    def read(self, wait_ms: int) -> Received | None:
        """Messages that have arrived; waits for some at most `wait_ms`.  Each payload begins with 'w' or 'k'.

        None if there is nothing, or nothing yet: while much comes it is gathered for some turns.
        """
        something = False
        if self._emptied_at is None:
            something = bool(self._arrived.poll(wait_ms))
        else:
            rest_ms = (self._emptied_at + self._batch_wait_s - time.monotonic()) * 1000
            if rest_ms > 0 and self._woken.poll(min(wait_ms, rest_ms)):
                self._take_wakes()
                return None  # woken to answer the server; what is arriving may go on arriving
        self._take_wakes()
        arrived_bytes, now = self._channel.receive(), time.monotonic()
        if self._gathers(arrived_bytes, now):
            self._emptied_at = now
            return None
        received = self._channel.messages()
        # After the first bytes in a while it is looked once more, even if they were no whole message: under TLS the
        # rest may have been decrypted and wait inside OpenSSL, where poll() does not see it.
        self._emptied_at = now if something or received is not None else None
        return received

    def _gathers(self, arrived_bytes: int, now: float) -> bool:
        """Whether what has arrived waits for more."""
        if self._gathered_from is None:
            self._gathered_from, self._gathered_bytes = now, 0
        self._gathered_bytes += arrived_bytes
        fast = arrived_bytes >= _FAST_TURN_BYTES
        if fast and self._gathered_bytes < _GATHERED_BYTES and now < self._gathered_from + _GATHERED_S:
            return True
        self._gathered_from = None
        return False

    def _take_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

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


def _limit_window(descriptor: int) -> None:
    """Where the server is on this machine; unix sockets have no window."""
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if internet and duplicate.getpeername()[0] == duplicate.getsockname()[0]:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)

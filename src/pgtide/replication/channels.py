"""Two ways to the bytes of a replication stream, behind one interface.

Through libpq: any connection, TLS included; one Python call per message.  From the socket itself, where nothing is
encrypted: libpq does the handshake, then whole buffers are received, and `frame_walk` finds the frames in them.
START_REPLICATION then goes out on the socket too, because through libpq a part of the first message may stay in its
buffer.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq

from pgtide.errors import DecodeError, NoBinaryFormError, PgtideError, SlotError, TransientError
from pgtide.replication.frame_walk import frame_bounds
from pgtide.replication.slot import START_OVER

PADDING_BYTES = 64  # decoders may look that far beyond the last message
_RECEIVE_BYTES = 4 << 20
_MESSAGE_MAX_BYTES = (1 << 30) + (1 << 16)  # Postgres allocates no more than 1 GiB at once
_FRAME = struct.Struct(">cI")
_length_at = struct.Struct(">xI").unpack_from
_COPY_DATA, _ERROR, _COPY_DONE = ord("d"), ord("E"), ord("c")
_SKIPPED = frozenset(b"NSA")  # notice, parameter status, notification
_ANSWER_LIMIT_S = 10.0
_STOP_POLL_S = 0.1
_UNDEFINED_FUNCTION = "42883"
_UNDEFINED_OBJECT = "42704"
_SLOT_STATES = {
    _UNDEFINED_OBJECT: START_OVER,
    "55000": START_OVER,  # lost, or not logical
    "55006": "stop the other client, or choose another source.slot",  # active elsewhere
}


@dataclass(frozen=True, slots=True)
class Received:
    """CopyData payloads `buffer[starts[i]:ends[i]]`; the buffer is used again by the next `receive`."""

    buffer: bytearray
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return int((self.ends - self.starts).sum())


class Channel(Protocol):
    def start(self, command: bytes, stop: threading.Event) -> None:
        """Sends START_REPLICATION and waits until the server has agreed to stream, or `stop` is set."""

    def fileno(self) -> int: ...

    def receive(self) -> int:
        """Takes in what has arrived, without waiting; how many bytes that were.

        The end of the stream is told only when everything before it was handed on.
        """

    def messages(self) -> Received | None:
        """The whole messages of all that was received since the last call; None if there is none yet."""

    def send(self, payload: bytes) -> None:
        """Sends one CopyData message."""

    def close(self) -> None: ...


def open_channel(connection: psycopg.Connection[Any], slot: str) -> Channel:
    """The faster way where it can be used."""
    return LibpqChannel(connection, slot) if is_encrypted(connection) else SocketChannel(connection, slot)


def is_encrypted(connection: psycopg.Connection[Any]) -> bool:
    """Whether only libpq can read what comes."""
    return connection.pgconn.ssl_in_use or _gss_encrypted(connection)


def _gss_encrypted(connection: psycopg.Connection[Any]) -> bool:
    try:
        row = connection.execute(
            "SELECT coalesce((SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()), false)"
        ).fetchone()
    except psycopg.OperationalError as error:
        raise TransientError(f"the connection to Postgres was lost: {error}") from error
    return bool(row and row[0])


def wait_for_answer(descriptor: int, deadline: float, stop: threading.Event) -> None:
    """Waits until there is something to read."""
    while not select.select([descriptor], [], [], _STOP_POLL_S)[0]:
        if stop.is_set():
            raise TransientError("stopped while the server prepares to stream")
        if time.monotonic() > deadline:
            raise TransientError(f"the server has not begun to stream within {_ANSWER_LIMIT_S:.0f} s")


class LibpqChannel:
    def __init__(self, connection: psycopg.Connection[Any], slot: str) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._slot = slot
        self._available = array.array("i", [0])
        self._received: list[bytes | memoryview] = []  # and not yet handed on
        self._over = False

    def start(self, command: bytes, stop: threading.Event) -> None:
        try:
            self._pgconn.send_query(command)
            deadline = time.monotonic() + _ANSWER_LIMIT_S
            while self._pgconn.is_busy():
                wait_for_answer(self.fileno(), deadline, stop)
                self._pgconn.consume_input()
        except psycopg.OperationalError as error:
            raise TransientError(f"the connection to Postgres was lost: {error}") from error
        result = self._pgconn.get_result()
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            raise self._error(result)

    def fileno(self) -> int:
        return self._pgconn.socket

    def receive(self) -> int:
        if self._over:
            return 0
        add, get = self._received.append, self._pgconn.get_copy_data
        taken, arrived, emptied = 0, self._arrived_bytes(), False
        while taken < _RECEIVE_BYTES:
            try:
                length, data = get(1)
            except psycopg.OperationalError as error:
                raise TransientError(f"the connection to Postgres was lost: {error}") from error
            if length > 0:
                add(data)
                taken += length
            elif length < 0:
                self._over = True  # libpq has left COPY mode: only the result is left
                break
            elif emptied or (taken and taken >= arrived):
                break  # what trickles in meanwhile can wait for the next call
            else:
                # Under TLS this reads one record, and the server sends each message as one.  The end of a long record
                # may stay inside OpenSSL, where poll() does not see it: so once more after the socket is empty.
                emptied = not self._arrived_bytes()
                self._consume()
        return taken

    def messages(self) -> Received | None:
        messages, self._received = self._received, []
        if not messages:
            if self._over:
                raise self._error(self._pgconn.get_result())
            return None
        lengths = np.fromiter(map(len, messages), np.int64, len(messages))
        ends = np.cumsum(lengths)
        return Received(bytearray().join([*messages, bytes(PADDING_BYTES)]), ends - lengths, ends)

    def send(self, payload: bytes) -> None:
        try:
            self._pgconn.put_copy_data(payload)
            self._pgconn.flush()
        except psycopg.OperationalError as error:
            raise TransientError(f"the connection to Postgres was lost: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def _consume(self) -> None:
        try:
            self._pgconn.consume_input()
        except psycopg.OperationalError as error:
            raise TransientError(f"the connection to Postgres was lost: {error}") from error

    def _arrived_bytes(self) -> int:
        fcntl.ioctl(self._pgconn.socket, termios.FIONREAD, self._available)
        return self._available[0]

    def _error(self, result: pq.abc.PGresult | None) -> PgtideError:
        if result is None or result.status == pq.ExecStatus.COMMAND_OK:
            return TransientError("the server ended the replication stream")
        sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        return _stream_error(result.error_message.decode(errors="replace").strip(), sqlstate, self._slot)


class SocketChannel:
    def __init__(self, connection: psycopg.Connection[Any], slot: str) -> None:
        self._connection = connection
        self._slot = slot
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._buffer = bytearray(_RECEIVE_BYTES + PADDING_BYTES)
        self._begin = self._end = 0  # received and not yet handed on
        self._walked = 0  # up to here it was looked for whole messages
        self._over = False

    def start(self, command: bytes, stop: threading.Event) -> None:
        query = command + b"\0"
        self._socket.settimeout(_ANSWER_LIMIT_S)
        self._send_all(_FRAME.pack(b"Q", len(query) + 4) + query)
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while True:
            wait_for_answer(self.fileno(), deadline, stop)
            kind, payload = self._take_frame()
            if kind == b"W":  # CopyBothResponse
                self._socket.setblocking(False)
                return
            if kind == b"E":
                raise self._error(payload)

    def _send_all(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise TransientError(f"the connection to Postgres was lost: {error}") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> int:
        if self._over:  # the end of the stream is in the buffer already: nothing more will come
            return 0
        self._make_room()
        room = memoryview(self._buffer)[:-PADDING_BYTES]
        before = self._end
        try:
            # Each turn opens the window for what waits on the server's side.
            while self._end < len(room):
                received = self._socket.recv_into(room[self._end :])
                if not received:
                    raise ConnectionResetError("the server closed it")
                self._end += received
        except BlockingIOError:
            pass
        except OSError as error:
            if self._end == self._walked:  # else said by a later call: what came before may tell the reason
                raise TransientError(f"the connection to Postgres was lost: {error}") from error
        return self._end - before

    def send(self, payload: bytes) -> None:
        # A status message is small, and the server reads them: a full send buffer means that the connection is dead.
        data = memoryview(_FRAME.pack(b"d", len(payload) + 4) + payload)
        try:
            self._socket.settimeout(30)
            self._socket.sendall(data)
        except OSError as error:
            raise TransientError(f"the connection to Postgres was lost: {error}") from error
        finally:
            self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()
        self._connection.close()

    def _make_room(self) -> None:
        """Moves an incomplete message to the front, and grows the buffer for one that is larger than it."""
        left = self._end - self._begin
        if self._begin:
            self._buffer[:left] = self._buffer[self._begin : self._end]
            self._begin, self._end, self._walked = 0, left, self._walked - self._begin
        if left >= 5:
            length = 1 + _length_at(self._buffer, 0)[0]
            if length > _MESSAGE_MAX_BYTES:
                raise DecodeError(f"the server announces a message of {length} bytes: the stream is out of step")
            if length > len(self._buffer) - PADDING_BYTES:
                grown = bytearray(length + PADDING_BYTES)
                grown[:left] = self._buffer[:left]
                self._buffer = grown
        if left == 0 and len(self._buffer) > 4 * _RECEIVE_BYTES:
            self._buffer = bytearray(_RECEIVE_BYTES + PADDING_BYTES)

    def messages(self) -> Received | None:
        if self._end == self._walked and not self._over:
            return None
        buffer, bounds = self._buffer, frame_bounds(self._buffer, self._begin, self._end)
        self._walked = self._end
        if len(bounds) == 1:
            return None
        kinds = np.frombuffer(buffer, np.uint8)[bounds[:-1]]
        self._begin = int(bounds[-1])
        strange = np.flatnonzero(kinds != _COPY_DATA)
        if not len(strange):
            return Received(buffer, bounds[:-1] + 5, bounds[1:])
        return self._until_end(buffer, bounds, kinds, strange)

    def _until_end(
        self,
        buffer: bytearray,
        bounds: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.uint8],
        strange: npt.NDArray[np.int64],
    ) -> Received | None:
        """What lies before the end of the stream; the end itself is met again by the next call."""
        for index in strange.tolist():
            if kinds[index] in _SKIPPED:
                continue
            if index:
                self._begin, self._over = int(bounds[index]), True
                bounds, kinds = bounds[: index + 1], kinds[:index]
                break
            if kinds[index] == _ERROR:
                raise self._error(bytes(buffer[bounds[0] + 5 : bounds[1]]))
            raise TransientError("the server ended the replication stream")
        data = kinds == _COPY_DATA
        return Received(buffer, bounds[:-1][data] + 5, bounds[1:][data]) if data.any() else None

    def _take_frame(self) -> tuple[bytes, bytes]:
        kind, length = _FRAME.unpack(self._receive_exactly(_FRAME.size))
        return kind, self._receive_exactly(length - 4)

    def _receive_exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                part = self._socket.recv(length - len(data))
            except OSError as error:
                raise TransientError(f"the connection to Postgres was lost: {error}") from error
            if not part:
                raise TransientError("the server closed the connection")
            data += part
        return data

    def _error(self, payload: bytes) -> PgtideError:
        fields = {part[:1]: part[1:].decode(errors="replace") for part in payload.split(b"\0") if part}
        return _stream_error(fields.get(b"M", "no reason given"), fields.get(b"C", ""), self._slot)


def _stream_error(message: str, sqlstate: str, slot: str) -> PgtideError:
    if sqlstate == _UNDEFINED_FUNCTION and "binary output" in message:
        return NoBinaryFormError(f"the server has no binary form for a value: {message}")
    if sqlstate == _UNDEFINED_OBJECT and "publication" in message:
        return SlotError(
            f'replication slot "{slot}" has changes from a time without publication, and cannot pass them: {message}',
            remedy="begin a new log (log.path) with a new slot and a new mirror",
        )
    if sqlstate in _SLOT_STATES:
        return SlotError(f'replication slot "{slot}" cannot be used: {message}', remedy=_SLOT_STATES[sqlstate])
    return TransientError(f"the replication stream ended: {message or 'the connection was lost'}")

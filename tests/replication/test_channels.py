"""What comes on a replication connection is handed on whole and in order; its end last.  The server is a socket."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtide.errors import SlotError, TransientError
from pgtide.replication.channels import Received, SocketChannel


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, SocketChannel]]:
    server, client = socket.socketpair()
    with server, client:
        connection: Any = SimpleNamespace(pgconn=SimpleNamespace(socket=client.fileno()), close=lambda: None)
        channel = SocketChannel(cast("Any", connection), "slot")
        client.setblocking(False)
        with contextlib.closing(channel):
            yield server, channel


def frame(kind: bytes, payload: bytes) -> bytes:
    return kind + struct.pack(">I", 4 + len(payload)) + payload


def payloads(received: Received | None) -> list[bytes]:
    if received is None:
        return []
    bounds = zip(received.starts.tolist(), received.ends.tolist(), strict=True)
    return [bytes(received.buffer[start:end]) for start, end in bounds]


@given(st.lists(st.binary(max_size=300), max_size=30), st.data())
@settings(deadline=None)
def test_messages_are_whole_and_in_order_however_they_arrive(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(b"d", payload) for payload in sent)
    seen: list[bytes] = []
    with connected() as (server, channel):
        while stream:
            cut = data.draw(st.integers(1, len(stream)))
            server.sendall(stream[:cut])
            assert channel.receive() == cut
            stream = stream[cut:]
            if data.draw(st.booleans()):
                seen += payloads(channel.messages())
        seen += payloads(channel.messages())
        assert channel.receive() == 0
        assert channel.messages() is None
    assert seen == sent


def test_a_message_larger_than_the_buffer_is_handed_on_whole() -> None:
    large = bytes(range(256)) * (20 << 12)
    stream = memoryview(frame(b"d", b"before") + frame(b"d", large) + frame(b"d", b"after"))
    seen: list[bytes] = []
    with connected() as (server, channel):
        server.setblocking(False)
        while len(seen) < 3:
            with contextlib.suppress(BlockingIOError):
                stream = stream[server.send(stream[: 1 << 16]) :] if stream else stream
            channel.receive()
            seen += payloads(channel.messages())
    assert seen == [b"before", large, b"after"]


@pytest.mark.parametrize("received_before_the_end", [False, True])
def test_an_error_that_ends_the_stream_is_told_after_what_came_before_it(received_before_the_end: bool) -> None:
    with connected() as (server, channel):
        server.sendall(frame(b"d", b"change") + frame(b"E", b"SERROR\0C55000\0Mcan no longer get changes\0\0"))
        if received_before_the_end:
            channel.receive()
        server.close()
        channel.receive()
        channel.receive()  # what is not handed on yet is not given up for a connection that is gone
        assert payloads(channel.messages()) == [b"change"]
        channel.receive()
        with pytest.raises(SlotError, match="can no longer get changes"):
            channel.messages()


def test_a_connection_that_is_closed_without_a_word_is_told_after_what_came() -> None:
    with connected() as (server, channel):
        server.sendall(frame(b"d", b"change") + b"d\0\0")
        server.close()
        channel.receive()
        assert payloads(channel.messages()) == [b"change"]
        with pytest.raises(TransientError, match="closed"):
            channel.receive()

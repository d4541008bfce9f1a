"""A TCP forwarder in front of a server that falls silent: at a word that the client says, or from now on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Forwarder:
    """Passes bytes both ways until it is silent; then it still takes connections, and answers nothing."""

    def __init__(self, port: int, silent_at: bytes) -> None:
        self._target = ("127.0.0.1", port)
        self._silent_at = silent_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.silent = threading.Event()
        self.accepted_in_silence = 0
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close_connections(self) -> None:
        while self._connections:
            _end(self._connections.pop())

    def close(self) -> None:
        _end(self._listener)
        self.close_connections()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._connections += [client, server]
                self.accepted_in_silence += self.silent.is_set()
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=[source, target], daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._silent_at and self._silent_at in data:
                    self.silent.set()
                if not self.silent.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def forwarding(port: int, silent_at: bytes = b"") -> Iterator[Forwarder]:
    forwarder = Forwarder(port, silent_at)
    try:
        yield forwarder
    finally:
        forwarder.close()

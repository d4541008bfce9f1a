"""A process's HTTP port: numbers for Prometheus, and of a capture two answers for whoever starts and stops processes.

`pgtide mirror` has one of its own, because the numbers of loads are in its process; with `pgtide run` all are in one.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST

from pgtide.config import Config
from pgtide.errors import ConfigurationError
from pgtide.metrics import exposition

_POLL_S = 0.1  # how long its end may take


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


def verdict(name: str, objection: str | None) -> Answer:
    """200 without an objection, 503 with it."""
    content: dict[str, object] = {name: objection is None}
    if objection is not None:
        content["reason"] = objection
    return Answer(200 if objection is None else 503, "application/json", json.dumps(content).encode() + b"\n")


@contextmanager
def serving(
    config: Config, section: Literal["capture", "mirror"], further: Mapping[str, Callable[[], Answer]]
) -> Iterator[None]:
    """Answers /metrics and further paths until the end of the block, in threads of its own, where that section of the
    configuration says; does nothing if it has no port."""
    where = config.capture if section == "capture" else config.mirror
    address, port = where.metrics_address, where.metrics_port
    if not port:
        yield
        return
    answers = {"/metrics": lambda: Answer(200, CONTENT_TYPE_LATEST, exposition()), **further}
    try:
        server = _Server(address, port, answers)
    except OSError as error:
        raise ConfigurationError(
            f"{config.file}: {section}.metrics_port: cannot listen on {address}:{port}: {error.strerror or error}",
            remedy=f"Choose another {section}.metrics_port or {section}.metrics_address, or end who uses it.",
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=[_POLL_S], name="pgtide-endpoint", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: str, port: int, answers: Mapping[str, Callable[[], Answer]]) -> None:
        self.answers = answers
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0  # for a client that connects and says nothing

    def do_GET(self) -> None:
        answer = self.server.answers.get(urlsplit(self.path).path)
        if answer is None:
            self._send(Answer(404, "text/plain", f"There is: {', '.join(self.server.answers)}\n".encode()))
        else:
            self._send(answer())

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: probes come every few seconds."""

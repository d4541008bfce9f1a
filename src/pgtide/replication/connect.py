"""The one place that opens connections to Postgres, and that turns libpq's words into errors with a remedy.

Every connection speaks UTF-8 and writes values as text in one way, whatever server, database and role have as
defaults: what reaches the log does not depend on who connects.  The empty search_path is what Postgres's own
subscriber uses: no function or operator of a user's schema can take the place of a built-in one.

No message ever holds a password.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgtide.errors import PgtideError, SourceNotReadyError, TransientError

Connection = psycopg.Connection[tuple[Any, ...]]

OLDEST_VERSION = 140000

# Used where the connection string does not say otherwise.  Without them a peer that vanished is noticed after hours
# (nothing in flight) or a quarter of an hour (something in flight).
_DEFAULTS = {
    "fallback_application_name": "pgtide",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

# Time-outs are off because the role's may be made for web requests; row_security makes a hidden row an error.
_SESSION = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "search_path": "",
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}

_RETRY_PAUSE_S = 0.1
_RETRY_PAUSE_MAX_S = 1.0


def connect(dsn: str, *, replication: bool = False, timeout_s: float) -> Connection:
    """An open connection in autocommit mode; with `replication`, one that also takes replication commands.

    Raises TransientError for what may pass (nobody listens, starting up, too many connections) and
    SourceNotReadyError for what somebody has to change.
    """
    fixed = {"client_encoding": "UTF8", "connect_timeout": str(max(1, math.ceil(timeout_s)))}
    if replication:
        fixed["replication"] = "database"
    given = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    try:
        connection = psycopg.connect(make_conninfo(**_DEFAULTS | given | fixed), autocommit=True)
        if replication:
            connection.prepare_threshold = None  # it takes only simple queries, however often
    except psycopg.OperationalError as error:
        raise _refused(dsn, str(error)) from None
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_when_ready(dsn: str, *, timeout_s: float, stop: threading.Event | None = None) -> Connection:
    """As `connect`, but waits up to `timeout_s` for a server that is not there yet.  `stop` ends it at once."""
    deadline = time.monotonic() + timeout_s
    pause_s = _RETRY_PAUSE_S
    stop = stop or threading.Event()
    while True:
        try:
            return unless_stopped(stop, lambda: connect(dsn, timeout_s=max(1.0, deadline - time.monotonic())))
        except TransientError as error:
            if time.monotonic() + pause_s >= deadline:
                raise SourceNotReadyError(f"{error.what} (tried for {timeout_s:g} s)", remedy=error.remedy) from None
        if stop.wait(pause_s):
            raise KeyboardInterrupt
        pause_s = min(2 * pause_s, _RETRY_PAUSE_MAX_S)


def unless_stopped(stop: threading.Event, open_connection: Callable[[], Connection]) -> Connection:
    """Opens a connection in a thread, because a host that swallows packets would hold us until the time-out.

    When `stop` is set: KeyboardInterrupt, as if the wait had been interrupted in the main thread.
    """
    opened: list[Connection] = []
    failed: list[Exception] = []
    over = threading.Event()

    def attempt() -> None:
        try:
            opened.append(open_connection())
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            failed.append(error)
        over.set()
        if stop.is_set() and opened:
            opened[0].close()

    threading.Thread(target=attempt, name="pgtide-connect", daemon=True).start()
    while not over.wait(0.05):
        if stop.is_set():
            raise KeyboardInterrupt
    if failed:
        raise failed[0]
    return opened[0]


def _prepare(connection: Connection) -> None:
    version = connection.info.server_version
    if version < OLDEST_VERSION:
        raise SourceNotReadyError(
            f"the server is Postgres {version // 10000}; pgtide needs {OLDEST_VERSION // 10000} or newer",
            remedy="Upgrade the server.",
        )
    settings = _SESSION | ({"transaction_timeout": "0"} if version >= 170000 else {})
    # By statement, not by libpq's `options`, which would replace those of PGOPTIONS and of a service.
    # Literals, not parameters: a replication connection takes only simple queries.
    calls = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in settings.items())
    with postgres_errors("setting up the connection"):
        connection.execute(f"SELECT {calls}".encode())


RECOVERY_CONFLICT = "On the standby: set hot_standby_feedback = on, or raise max_standby_streaming_delay."


@contextmanager
def postgres_errors(doing: str) -> Iterator[None]:
    """Turns psycopg's errors of the statements inside into ours: lost connections are transient, the rest is not."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise SourceNotReadyError(f"{doing}: {_first_line(error)}", remedy="Grant what is missing.") from error
    except psycopg.errors.LockNotAvailable as error:
        raise TransientError(f"{doing}: {_first_line(error)}", remedy="Another session holds a lock.") from error
    except psycopg.errors.SerializationFailure as error:
        # We change nothing that others change: it is a standby that has to replay what a reader is in the way of.
        detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
        raise TransientError(f"{doing}: {_first_line(error)}{detail}", remedy=RECOVERY_CONFLICT) from error
    except psycopg.errors.ConfigurationLimitExceeded as error:
        remedy = error.diag.message_hint or "Raise that limit of the server."
        raise TransientError(f"{doing}: {_first_line(error)}", remedy=remedy) from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise TransientError(f"{doing}: {_first_line(error)}", remedy="Check that the server is up.") from error
    except psycopg.Error as error:
        raise PgtideError(f"{doing}: {_first_line(error)}") from error


def _first_line(error: psycopg.Error) -> str:
    return redact(str(error).strip().partition("\n")[0])


_PASSWORD = re.compile(r"""\b((?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&'"]+)""", re.IGNORECASE)
_USERINFO = re.compile(r"(://[^:/@\s]*):[^\s/?]*@")


def redact(text: str, dsn: str = "") -> str:
    """The text without passwords: those that look like one, and literally the one of `dsn`."""
    if dsn:
        for key in ("password", "sslpassword"):
            secret = conninfo_to_dict(dsn).get(key)
            if secret:
                text = text.replace(str(secret), "***")
    return _USERINFO.sub(r"\1:***@", _PASSWORD.sub(r"\1***", text))


def place(dsn: str) -> str:
    """`user@host:port/database` as libpq resolves it from the string and PG* variables, for messages."""
    defaults = {option.keyword.decode(): (option.val or b"").decode() for option in pq.Conninfo.get_defaults()}
    known = {**defaults, **{key: str(value) for key, value in conninfo_to_dict(dsn).items()}}
    if known.get("service") and "host" not in conninfo_to_dict(dsn):
        return f"service {known['service']}"
    hosts = (known.get("host") or known.get("hostaddr") or "local socket").split(",")
    ports = known["port"].split(",")
    where = ",".join(f"{host}:{port}" for host, port in zip(hosts, cycle(ports), strict=False))
    return f"{known['user']}@{where}/{known['dbname'] or known['user']}"


_UNREACHABLE = "Check that the server is running and that host and port in source.dsn are right."

# What libpq and the server say, in the C locale; anything else is passed on as it is, and not retried.
_TRANSIENT = (
    (r"starting up|shutting down|in recovery mode|not yet accepting|crash of another server process",
     "Wait until the server is up."),
    (r"too many clients|remaining connection slots|too many connections|exceeds \"?max_wal_senders",
     "Close connections, or raise max_connections (max_wal_senders for replication) and restart the server."),
    (r"session is (not )?read-only|server is (not )?in hot standby mode",
     "Wait until one of the hosts is what target_session_attrs in source.dsn asks for."),
    (r"refused|timeout|timed out|not known|unreachable|no such file|no route|closed the connection|closed unexpectedly",
     _UNREACHABLE),
    (r"reset by peer|could not translate|name resolution|no address associated|could not (receive|send) data",
     _UNREACHABLE),
)  # fmt: skip
_HBA_LINE = (
    "Add a line to the server's pg_hba.conf (`host {database} {user} <our address>/32 scram-sha-256`) and reload it."
)
_NOT_READY = (
    (r"certificate authentication failed|valid client certificate|alert unknown ca|alert .*certificate",
     "Name a client certificate for {user} in source.dsn (sslcert, sslkey), signed by an authority of the server's."),
    (r"private key file",
     "sslkey in source.dsn must be the key that belongs to sslcert, and nobody else's to read: chmod 600."),
    (r"certificate verify failed|root certificate file",
     "Name the file with the certificate of the authority that signed the server's: sslrootcert in source.dsn."),
    (r"does not match host name",
     "Use the name that is in the certificate as host in source.dsn; hostaddr may hold the address to connect to."),
    (r"no pg_hba\.conf entry.*no encryption",
     f"If the server takes only encrypted ones: sslmode=verify-full and sslrootcert in source.dsn. Else: {_HBA_LINE}"),
    (r"no password supplied",
     "Give the password in a passfile (~/.pgpass), in PGPASSWORD or in source.dsn."),
    (r"password authentication failed|authentication failed",
     "Check user and password in source.dsn, PGPASSWORD or the passfile (~/.pgpass)."),
    (r"no pg_hba\.conf entry|pg_hba\.conf rejects",
     _HBA_LINE),
    (r"database \".*\" does not exist", "Correct dbname in source.dsn, or create the database."),
    (r"role \".*\" does not exist",
     "Correct user in source.dsn, or: CREATE ROLE {user} LOGIN REPLICATION PASSWORD '…';"),
    (r"not permitted to log in", "ALTER ROLE {user} LOGIN;"),
    (r"permission denied for database", "GRANT CONNECT ON DATABASE {database} TO {user};"),
    (r"start walsender|start wal sender", "ALTER ROLE {user} REPLICATION;"),
    (r"definition of service", "Define the service in ~/.pg_service.conf, or correct source.dsn."),
    (r"certificate|does not support SSL|SSL error|sslmode",
     "Check sslmode, sslrootcert, sslcert and sslkey in source.dsn."),
)  # fmt: skip


def _refused(dsn: str, text: str) -> PgtideError:
    """The error for a connection that did not come about.  Of several hosts, one that says no counts most."""
    where = place(dsn)
    user, _, rest = where.partition("@")
    names = {"user": user if rest else "<user>", "database": rest.rpartition("/")[2] or "<database>"}
    what = f"cannot connect to Postgres at {where}: {_reason(redact(text, dsn))}"
    for pattern, remedy in _NOT_READY:
        if re.search(pattern, text, re.IGNORECASE):
            return SourceNotReadyError(what, remedy=remedy.format(**names))
    for pattern, remedy in _TRANSIENT:
        if re.search(pattern, text, re.IGNORECASE):
            return TransientError(what, remedy=remedy)
    return SourceNotReadyError(what, remedy="Check source.dsn.")


def _reason(text: str) -> str:
    """The server's sentence without libpq's and psycopg's introductions; of several hosts, each one's."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hosts = list(filter(None, map(_OF_ONE_HOST.match, lines)))
    if hosts:
        return "; ".join(f"{match['host']}:{match['port']}: {_sentence(match['reason'])}" for match in hosts)
    fatal = [line for line in lines if "FATAL:" in line]
    return _sentence((fatal or lines or ["no reason given"])[0])


# How psycopg lists the hosts when all have failed.
_OF_ONE_HOST = re.compile(r"- host: '?(?P<host>[^',]*)'?, port: '?(?P<port>[^',]*)'?, hostaddr: [^:]*?: (?P<reason>.*)")


def _sentence(line: str) -> str:
    if "FATAL:" in line:
        return line.partition("FATAL:")[2].strip()
    return re.sub(r"^.*?connection to server .*? failed: ", "", line)

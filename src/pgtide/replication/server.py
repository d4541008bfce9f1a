"""One server for all connections of a capture, however many hosts the connection string names.

The replication connection decides: the others go to the address that it has reached.  Behind one address there may
still be several servers (a load balancer, a promotion in this moment), and standbys have the system identifier of their
primary; but no two servers were started in the same microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psycopg.conninfo import make_conninfo

from pgtide.errors import TransientError
from pgtide.replication.connect import Connection, connect, place, postgres_errors


class OtherServerError(TransientError):
    """A connection has ended at another server than the first one, or that one was started again since."""


@dataclass(frozen=True, slots=True)
class Server:
    dsn: str = field(repr=False)  # it may hold a password
    started: str

    def connect(self, *, replication: bool = False, timeout_s: float) -> Connection:
        """Another connection to this server; TransientError if it ends elsewhere."""
        connection = connect(self.dsn, replication=replication, timeout_s=timeout_s)
        try:
            if server_started(connection) != self.started:
                raise OtherServerError(
                    f"two connections to {place(self.dsn)} have ended at different servers",
                    remedy="Name the servers themselves as hosts in source.dsn, with target_session_attrs=read-write.",
                )
        except BaseException:
            connection.close()
            raise
        return connection


def reached(dsn: str, connection: Connection) -> Server:
    """The server that this connection has reached, of all those that `dsn` may lead to."""
    info = connection.info
    return Server(
        make_conninfo(dsn, host=info.host, hostaddr=info.hostaddr, port=info.port), server_started(connection)
    )


def server_started(connection: Connection) -> str:
    """When the server was started, to the microsecond: tells it from every other."""
    with postgres_errors("identifying the server"):
        row = connection.execute("SELECT extract(epoch FROM pg_postmaster_start_time())::text").fetchone()
    assert row is not None
    return str(row[0])

"""A connection string with several hosts: all connections end at one server, and never at one of another system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from pgtide import local
from pgtide.errors import LogError, SourceNotReadyError, TransientError
from pgtide.log.control import offered_snapshot
from pgtide.replication.connect import connect, place
from pgtide.replication.preflight import check_source
from pgtide.replication.server import Server, reached
from tests.capture.running import capturing, changes, configuration, wait_until_captured
from tests.database import Database, create_database, drop_database
from tests.standby import standby_of
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
NOBODY = 1  # a port on which nobody listens


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[local.LocalPostgres, local.LocalPostgres]]:
    """A primary and its standby."""
    with local.postgres() as primary, standby_of(primary) as standby:
        yield primary, standby


def several(database: Database, *ports: int, **options: str) -> str:
    hosts = ",".join(["127.0.0.1"] * len(ports))
    return make_conninfo(database.dsn, host=hosts, port=",".join(map(str, ports)), **options)


def test_a_host_that_is_down_is_passed_over(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE, "INSERT INTO t VALUES (1)")
    config = configuration(database, tmp_path, initial="bulk", dsn=several(database, NOBODY, database.server.port))
    with capturing(config):
        database.execute("INSERT INTO t VALUES (2)")
        reader = wait_until_captured(database, config)
        assert offered_snapshot(config.log_path) is not None
    assert [row["id"] for row in changes(reader, "public.t")] == [2]


def test_a_standby_is_passed_over_when_read_write_is_asked_for(
    pair: tuple[local.LocalPostgres, local.LocalPostgres], tmp_path: Path
) -> None:
    primary, standby = pair
    database = create_database(primary)
    database.execute(TABLE)
    dsn = several(database, standby.port, primary.port, target_session_attrs="read-write")
    config = configuration(database, tmp_path, dsn=dsn)
    with standby.connect() as connection:

        def followed() -> bool:
            query = "SELECT 1 FROM pg_database WHERE datname = %s"
            return connection.execute(query, [database.name]).fetchone() is not None

        wait_for(followed, what="the standby to follow")  # else it would be passed over for another reason
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1)")
        reader = wait_until_captured(database, config)
        at_the_standby = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgtide'"
        with standby.connect() as connection:
            assert connection.execute(at_the_standby).fetchone() == (0,)
    assert [row["id"] for row in changes(reader, "public.t")] == [1]
    drop_database(database)


def test_where_no_host_is_the_primary_each_ones_answer_is_told(
    pair: tuple[local.LocalPostgres, local.LocalPostgres], tmp_path: Path
) -> None:
    _, standby = pair
    database = Database(standby, "postgres")
    dsn = several(database, NOBODY, standby.port, target_session_attrs="read-write")
    with pytest.raises(SourceNotReadyError) as caught:
        check_source(configuration(database, tmp_path, dsn=dsn, connect_timeout_seconds=0.5))
    assert caught.value.exit_code == 2
    where = f"postgres@127.0.0.1:{NOBODY},127.0.0.1:{standby.port}/postgres"
    reasons = f"127.0.0.1:{NOBODY}: Connection refused; 127.0.0.1:{standby.port}: session is read-only"
    assert f"cannot connect to Postgres at {where}: {reasons}" in caught.value.what
    assert "target_session_attrs" in caught.value.remedy


def test_the_replication_connection_decides_which_server_is_asked(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    with local.postgres(own_identity=True, max_wal_senders=0) as other:  # takes ordinary connections only
        with other.connect() as connection:
            connection.execute(f"CREATE DATABASE {database.name}".encode())
        Database(other, database.name).execute(TABLE, "CREATE TABLE not_this_one (id int PRIMARY KEY)")
        config = configuration(database, tmp_path, dsn=several(database, other.port, database.server.port))
        facts = check_source(config)
        assert [table.name for table in facts.tables] == ["t"]
        with capturing(config):
            database.execute("INSERT INTO t VALUES (1)")
            reader = wait_until_captured(database, config)
        assert Database(other, database.name).rows("SELECT FROM pg_publication") == []
    assert reader.identity.system_identifier == facts.system_identifier
    assert [row["id"] for row in changes(reader, "public.t")] == [1]


def test_a_server_of_another_system_does_not_take_over(tmp_path: Path) -> None:
    with local.postgres() as first, local.postgres(own_identity=True) as second:
        database = create_database(first)
        database.execute(TABLE)
        with second.connect() as connection:
            connection.execute(f"CREATE DATABASE {database.name}".encode())
        Database(second, database.name).execute(TABLE)
        config = configuration(database, tmp_path, dsn=several(database, first.port, second.port))

        def capture_until_stopped() -> None:
            with capturing(config) as states:
                first.stop("immediate")
                wait_for(lambda: states[-1].phase == "stopped", what="the capture to stop")

        with pytest.raises(LogError, match="the server is now system"):
            capture_until_stopped()
        for catalog in ("pg_replication_slots", "pg_publication"):
            assert Database(second, database.name).rows(f"SELECT FROM {catalog}") == []


def test_a_connection_that_ends_at_another_server_is_not_used(
    pair: tuple[local.LocalPostgres, local.LocalPostgres],
) -> None:
    primary, standby = pair
    with connect(primary.dsn, replication=True, timeout_s=5) as connection:
        server = reached(primary.dsn, connection)
    server.connect(timeout_s=5).close()
    with pytest.raises(TransientError, match="ended at different servers"):
        Server(standby.dsn, server.started).connect(timeout_s=5)


def test_each_host_is_told_with_its_port() -> None:
    assert place("host=a,b port=1,2 user=u dbname=d") == "u@a:1,b:2/d"
    assert place("host=a,b port=7 user=u dbname=d") == "u@a:7,b:7/d"

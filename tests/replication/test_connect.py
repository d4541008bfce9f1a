"""Connections: the same session whoever connects, and a remedy for each way in which one can be refused."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgtide import local
from pgtide.errors import PgtideError, SourceNotReadyError, TransientError
from pgtide.replication.connect import connect, connect_when_ready, place, postgres_errors, redact
from tests.database import Database
from tests.replication.roles import role

SECRET = "hunter2"


@pytest.fixture(scope="module")
def guarded() -> Iterator[local.LocalPostgres]:
    """A server that asks for passwords."""
    with local.postgres(auth="scram", password=SECRET) as running:
        yield running


def refusal(dsn: str, *, replication: bool = False) -> PgtideError:
    with pytest.raises((SourceNotReadyError, TransientError)) as caught:
        connect(dsn, replication=replication, timeout_s=5).close()
    return caught.value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("replication", [False, True])
def test_values_look_the_same_whatever_role_and_database_prefer(database: Database, replication: bool) -> None:
    database.execute(
        f"ALTER DATABASE {database.name} SET DateStyle = 'German'",
        f"ALTER DATABASE {database.name} SET IntervalStyle = 'iso_8601'",
        f"ALTER DATABASE {database.name} SET TimeZone = 'Asia/Tokyo'",
        f"ALTER DATABASE {database.name} SET bytea_output = 'escape'",
        f"ALTER DATABASE {database.name} SET extra_float_digits = 0",
        f"ALTER DATABASE {database.name} SET statement_timeout = '3s'",
        f"ALTER DATABASE {database.name} SET client_encoding = 'LATIN1'",
    )
    with connect(database.dsn, replication=replication, timeout_s=5) as connection:
        shown = {
            name: connection.execute(f"SHOW {name}".encode()).fetchone()
            for name in ("DateStyle", "IntervalStyle", "TimeZone", "bytea_output", "statement_timeout", "search_path")
        }
        assert connection.info.encoding == "utf-8"
        assert connection.execute("SELECT (0.1::float8 + 0.2::float8)::text").fetchone() == ("0.30000000000000004",)
    assert shown == {
        "DateStyle": ("ISO, DMY",),
        "IntervalStyle": ("postgres",),
        "TimeZone": ("UTC",),
        "bytea_output": ("hex",),
        "statement_timeout": ("0",),
        "search_path": ("",),
    }


def test_the_connection_is_named_and_the_users_own_options_stay(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=7MB")
    with connect(database.dsn, timeout_s=5) as connection:
        assert connection.execute("SHOW application_name").fetchone() == ("pgtide",)
        assert connection.execute("SHOW work_mem").fetchone() == ("7MB",)
    with connect(make_conninfo(database.dsn, application_name="shop"), timeout_s=5) as connection:
        assert connection.execute("SHOW application_name").fetchone() == ("shop",)


def test_a_server_that_is_not_there_is_transient(database: Database) -> None:
    error = refusal(make_conninfo(database.dsn, port=free_port()))
    assert isinstance(error, TransientError)
    assert "refused" in error.what
    assert "host and port" in error.remedy


def test_an_unknown_host_names_the_host(database: Database) -> None:
    assert "nowhere.invalid" in refusal(make_conninfo(database.dsn, host="nowhere.invalid")).what


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        ({"password": "wrong-" + SECRET}, "password authentication failed", "passfile"),
        ({"password": ""}, "no password supplied", "PGPASSWORD"),
        ({"dbname": "nope"}, 'database "nope" does not exist', "dbname"),
        ({"sslmode": "require"}, "SSL", "sslmode"),
        ({"service": "nope"}, "service", "pg_service.conf"),
    ],
)
def test_each_refusal_has_its_remedy_and_no_password(
    guarded: local.LocalPostgres, change: dict[str, str], what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", "/nonexistent")
    error = refusal(make_conninfo(guarded.dsn, **change))
    assert isinstance(error, SourceNotReadyError)
    assert what in error.what
    assert remedy in error.remedy
    assert SECRET not in str(error)


def test_an_unknown_role_is_named(database: Database) -> None:
    error = refusal(make_conninfo(database.dsn, user="nobody_here"))
    assert 'role "nobody_here" does not exist' in error.what
    assert "CREATE ROLE nobody_here" in error.remedy


def test_a_host_without_entry_in_pg_hba_gets_the_line_to_add(database: Database) -> None:
    with local.postgres() as server:
        (server.data / "pg_hba.conf").write_text("host all postgres 127.0.0.1/32 trust\n")
        with server.connect() as connection:
            connection.execute("CREATE ROLE shop LOGIN")
            connection.execute("SELECT pg_reload_conf()")
        error = refusal(server.dsn_of("postgres", user="shop"))
    assert isinstance(error, SourceNotReadyError)
    assert "pg_hba.conf" in error.what
    assert "host postgres shop" in error.remedy


def test_replication_without_the_privilege_says_what_to_alter(database: Database) -> None:
    with role(database) as name:
        error = refusal(make_conninfo(database.dsn, user=name), replication=True)
    assert isinstance(error, SourceNotReadyError)
    assert error.remedy == f"ALTER ROLE {name} REPLICATION;"


def test_a_server_that_comes_up_late_is_waited_for() -> None:
    with local.postgres() as server:
        server.stop()
        starter = threading.Thread(target=server.start)
        starter.start()
        with connect_when_ready(server.dsn, timeout_s=30) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        starter.join()


def test_a_server_that_stays_away_is_given_up_after_the_limit(database: Database) -> None:
    with pytest.raises(SourceNotReadyError, match=r"tried for 0\.3 s"):
        connect_when_ready(make_conninfo(database.dsn, port=free_port()), timeout_s=0.3)


def test_a_wrong_password_is_not_waited_for(guarded: local.LocalPostgres) -> None:
    began = time.monotonic()
    with pytest.raises(SourceNotReadyError, match="password authentication failed"):
        connect_when_ready(make_conninfo(guarded.dsn, password="wrong"), timeout_s=600)
    assert time.monotonic() - began < 300


def test_stop_ends_the_wait_for_a_host_that_answers_nothing() -> None:
    stop = threading.Event()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel takes the connection, nobody ever speaks
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(KeyboardInterrupt):
            connect_when_ready(f"host=127.0.0.1 port={silent.getsockname()[1]} user=x", timeout_s=600, stop=stop)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("host=h password=hunter2 user=u", "host=h password=*** user=u"),
        (r"password = 'hunter2 \' x' user=u", "password = *** user=u"),
        ("postgresql://u:hunter2@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:hun@ter2@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d?sslpassword=hunter2&sslmode=require", "postgresql://h/d?sslpassword=***&sslmode=require"),
        ("password authentication failed", "password authentication failed"),
    ],
)
def test_redacted_text_has_no_password(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_the_password_of_the_connection_string_goes_wherever_it_stands() -> None:
    assert redact("oddly hunter2 here", "host=h password=hunter2") == "oddly *** here"


def test_the_place_of_a_connection_is_told_with_what_the_environment_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "7777")
    assert place("host=db user=u dbname=shop password=x") == "u@db:7777/shop"


def test_a_limit_of_the_server_that_is_reached_is_told_as_one(database: Database) -> None:
    with connect(database.dsn, timeout_s=5) as connection:
        connection.execute("SET temp_file_limit = 0")
        connection.execute("SET work_mem = '64kB'")
        with pytest.raises(TransientError, match="temp_file_limit") as caught, postgres_errors("sorting"):
            connection.execute("SELECT n FROM generate_series(1, 100000) n ORDER BY md5(n::text)")
    assert "limit" in caught.value.remedy
    assert "server is up" not in caught.value.remedy


def test_a_lost_connection_is_transient_and_a_wrong_statement_is_not(database: Database) -> None:
    with connect(database.dsn, timeout_s=5) as connection:
        with pytest.raises(PgtideError) as wrong, postgres_errors("trying"):
            connection.execute("SELECT nothing_like_this")
        assert not isinstance(wrong.value, TransientError)
        assert isinstance(wrong.value.__cause__, psycopg.errors.UndefinedColumn)
        database.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        with pytest.raises(TransientError, match=r"^trying: "), postgres_errors("trying"):
            connection.execute("SELECT 1")

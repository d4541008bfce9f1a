"""Encrypted connections and every way to log in over them, on a server that offers TLS; and each way to be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from pgtide import local
from pgtide.config import Config, Log, Snapshot, Source
from tests.authority import Authority
from tests.capture.running import capturing, changes, replayed, source_rows, wait_until_captured
from tests.cli.program import run, start
from tests.database import Database, create_database, drop_database
from tests.waiting import wait_for

VERSION = 15  # one that was built with TLS
HOST = "db.example"
SECRET = "hunter2"

# The superuser's lines are for the tests themselves.
HBA = """
hostssl all certified  127.0.0.1/32 cert
hostssl all passworded 127.0.0.1/32 scram-sha-256
hostssl all encrypted  127.0.0.1/32 trust
host    all postgres   127.0.0.1/32 trust
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("trusted") / "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that neither side trusts."""
    return Authority(tmp_path_factory.mktemp("stranger") / "authority")


@pytest.fixture(scope="module")
def tls_server(authority: Authority) -> Iterator[local.LocalPostgres]:
    with local.postgres(VERSION, ssl=authority.for_server(HOST)) as server:
        with server.connect() as connection:
            for name in ("certified", "encrypted"):
                connection.execute(f"CREATE ROLE {name} SUPERUSER LOGIN".encode())
            connection.execute(f"CREATE ROLE passworded SUPERUSER LOGIN PASSWORD '{SECRET}'".encode())
            (server.data / "pg_hba.conf").write_text(HBA)
            connection.execute("SELECT pg_reload_conf()")
        yield server


@pytest.fixture
def secured(tls_server: local.LocalPostgres) -> Iterator[Database]:
    database = create_database(tls_server)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    yield database
    drop_database(database)


def dsn(database: Database, authority: Authority, user: str = "encrypted", **options: str) -> str:
    verified = {"host": HOST, "sslmode": "verify-full", "sslrootcert": str(authority.certificate), **options}
    port = database.server.port
    return make_conninfo(hostaddr="127.0.0.1", port=port, dbname=database.name, user=user, **verified)


def config(database: Database, folder: Path, connection_string: str) -> Config:
    return Config(
        source=Source(dsn=connection_string, slot=database.name),
        log=Log(path="log"),
        snapshot=Snapshot(initial="none"),
    ).at(folder / "pgtide.toml")


def walsender_encryption(database: Database) -> list[tuple[Any, ...]]:
    return database.rows(
        "SELECT usename::text, ssl FROM pg_stat_replication JOIN pg_stat_ssl USING (pid)"
        f" JOIN pg_replication_slots ON active_pid = pid WHERE slot_name = '{database.name}'"
    )


def test_changes_are_captured_over_tls_and_never_from_the_bare_socket(
    secured: Database, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bare(*_: object) -> None:
        raise AssertionError("the socket of an encrypted connection was read directly")

    monkeypatch.setattr("pgtide.replication.channels.SocketChannel", bare)
    found = config(secured, tmp_path, dsn(secured, authority))
    for start_number in range(2):
        with capturing(found):
            assert walsender_encryption(secured) == [("encrypted", True)]
            first = start_number * 40_000
            secured.execute(
                f"INSERT INTO t SELECT i, repeat('é', i % 100) FROM generate_series({first}, {first + 39_999}) i",
                f"UPDATE t SET note = 'changed' WHERE id = {first}",
                f"INSERT INTO t VALUES ({first - 1_000_000}, repeat('long', 1000000))",
            )
            reader = wait_until_captured(secured, found)
    assert replayed(reader, "public.t") == source_rows(secured, "t")


def test_a_client_certificate_is_enough_to_log_in(secured: Database, authority: Authority, tmp_path: Path) -> None:
    found = config(secured, tmp_path, dsn(secured, authority, "certified", **authority.for_client("certified").options))
    with capturing(found):
        assert walsender_encryption(secured) == [("certified", True)]
        secured.execute("INSERT INTO t VALUES (1)")
        assert len(changes(wait_until_captured(secured, found), "public.t")) == 1


def write(folder: Path, connection_string: str, slot: str) -> None:
    (folder / "pgtide.toml").write_text(
        f'[source]\ndsn = {json.dumps(connection_string)}\nslot = "{slot}"\n[log]\npath = "log"\n'
    )


def captures_as_a_process(folder: Path, database: Database, **variables: str) -> str:
    """What `pgtide capture` says until it streams and has been ended."""
    program = start("capture", folder=folder, **variables)
    try:
        wait_for(
            lambda: program.poll() is not None or walsender_encryption(database) == [("passworded", True)],
            what="the capture to stream",
        )
        program.terminate()
        _, said = program.communicate(timeout=30)
    finally:
        program.kill()
    assert program.returncode == 0, said
    return str(said)


def passfile(folder: Path, password: str = SECRET) -> Path:
    file = folder / "passfile"
    file.touch(mode=0o600)
    file.write_text(f"*:*:*:passworded:{password}\n")
    return file


def test_the_password_may_come_from_a_passfile(secured: Database, authority: Authority, tmp_path: Path) -> None:
    write(tmp_path, dsn(secured, authority, "passworded"), secured.name)
    said = captures_as_a_process(tmp_path, secured, PGPASSFILE=str(passfile(tmp_path)))
    assert SECRET not in said


def test_everything_may_come_from_a_service_file(secured: Database, authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "services").write_text(
        f"[shop]\nhost={HOST}\nhostaddr=127.0.0.1\nport={secured.server.port}\ndbname={secured.name}\nuser=passworded\n"
        f"sslmode=verify-full\nsslrootcert={authority.certificate}\npassfile={passfile(tmp_path)}\n"
    )
    write(tmp_path, "service=shop", secured.name)
    said = captures_as_a_process(tmp_path, secured, PGSERVICEFILE=str(tmp_path / "services"))
    assert SECRET not in said


def refused(folder: Path, database: Database, connection_string: str, **variables: str) -> str:
    """What `pgtide capture` says when it ends with 2 and has touched nothing."""
    write(folder, connection_string, database.name)
    done = run("capture", folder=folder, **variables)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: cannot connect to Postgres at ")
    assert len(done.stderr.splitlines()) == 2, "what happened, and what to do"
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr
    assert database.rows("SELECT FROM pg_publication") == []
    assert database.rows("SELECT FROM pg_replication_slots WHERE database = current_database()") == []
    assert not (folder / "log").exists()
    return done.stderr


def test_a_server_whose_authority_is_not_known_is_refused(
    secured: Database, stranger: Authority, tmp_path: Path
) -> None:
    said = refused(tmp_path, secured, dsn(secured, stranger))
    assert "certificate verify failed" in said
    assert "sslrootcert" in said


def test_a_file_of_authorities_that_is_not_there_is_named(
    secured: Database, authority: Authority, tmp_path: Path
) -> None:
    said = refused(tmp_path, secured, dsn(secured, authority, sslrootcert=str(tmp_path / "nowhere.pem")))
    assert f'root certificate file "{tmp_path}/nowhere.pem" does not exist' in said
    assert "sslrootcert" in said


def test_a_server_of_another_name_is_refused(secured: Database, authority: Authority, tmp_path: Path) -> None:
    said = refused(tmp_path, secured, dsn(secured, authority, host="other.example"))
    assert f'"{HOST}" does not match host name "other.example"' in said
    assert "hostaddr" in said


@pytest.mark.parametrize("certificate", ["none", "expired", "of another authority", "of somebody else"])
def test_a_client_certificate_that_does_not_do_is_refused(
    secured: Database, authority: Authority, stranger: Authority, tmp_path: Path, certificate: str
) -> None:
    options, reason = {
        "none": ({}, "requires a valid client certificate"),
        "expired": (authority.for_client("certified", expired=True).options, "certificate expired"),
        "of another authority": (stranger.for_client("certified").options, "unknown ca"),
        "of somebody else": (authority.for_client("nobody").options, "certificate authentication failed"),
    }[certificate]
    said = refused(tmp_path, secured, dsn(secured, authority, "certified", **options))
    assert reason in said
    assert "Name a client certificate for certified" in said


def test_a_key_that_others_can_read_is_refused(secured: Database, authority: Authority, tmp_path: Path) -> None:
    signed = authority.for_client("certified")
    signed.key.chmod(0o644)
    said = refused(tmp_path, secured, dsn(secured, authority, "certified", **signed.options))
    assert "group or world access" in said
    assert "chmod 600" in said


def test_a_server_that_wants_encryption_says_so_to_a_client_without(
    secured: Database, authority: Authority, tmp_path: Path
) -> None:
    said = refused(tmp_path, secured, dsn(secured, authority, sslmode="disable"))
    assert "no encryption" in said
    assert "sslmode=verify-full" in said


def test_a_wrong_password_in_the_passfile_is_refused(secured: Database, authority: Authority, tmp_path: Path) -> None:
    file = passfile(tmp_path, "wrong-" + SECRET)
    said = refused(tmp_path, secured, dsn(secured, authority, "passworded"), PGPASSFILE=str(file))
    assert "password authentication failed" in said
    assert "passfile" in said

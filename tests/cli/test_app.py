"""The command line: help at once, one clear message for each mistake, and exit codes that scripts can trust."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from pgtide import __version__, local
from pgtide.config import load_config
from tests.cli.program import environment, run, start
from tests.database import Database, create_database
from tests.replication.roles import role
from tests.waiting import wait_for

COMMANDS = ["init", "run", "capture", "mirror", "status", "verify", "demo"]


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE notes (x text)")
    return database


def configure(folder: Path, dsn: str, more: str = "") -> None:
    (folder / "pgtide.toml").write_text(f"[source]\ndsn = {json.dumps(dsn)}\nconnect_timeout_seconds = 1\n{more}")


def created(database: Database) -> list[tuple[Any, ...]]:
    return database.rows(
        "SELECT pubname::text FROM pg_publication UNION ALL"
        " SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()"
    )


def test_help_lists_the_commands_and_their_exit_codes(tmp_path: Path) -> None:
    done = run("--help", folder=tmp_path)
    assert done.returncode == 0
    for word in (*COMMANDS, "Exit codes"):
        assert word in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_commands_help_has_an_example(tmp_path: Path, command: str) -> None:
    done = run(command, "--help", folder=tmp_path)
    assert done.returncode == 0
    assert f"Example: pgtide {command}" in done.stdout
    assert "Exit codes" in done.stdout


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['pgtide', '--help']\n"
        "from pgtide.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded', sorted({'pyspark', 'pyarrow', 'numpy', 'psycopg', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_version(tmp_path: Path) -> None:
    assert run("--version", folder=tmp_path).stdout == f"pgtide {__version__}\n"


def test_init_writes_a_file_that_loads_and_overwrites_none(tmp_path: Path) -> None:
    assert run("init", folder=tmp_path).returncode == 0
    file = tmp_path / "pgtide.toml"
    assert load_config(file).source.tables == ("public.*",)
    file.write_text("mine")
    again = run("init", folder=tmp_path)
    assert (again.returncode, file.read_text()) == (2, "mine")
    assert "--force" in again.stderr
    assert run("init", "--force", folder=tmp_path).returncode == 0
    assert "mine" not in file.read_text()


@pytest.mark.parametrize(
    ("more", "arguments", "told"),
    [
        ('slto = "x"', (), ["pgtide.toml: source.slto: unknown key", "did you mean 'slot'?"]),
        ("tables = 5", (), ["pgtide.toml: source.tables: found 5, expected a list of strings"]),
        ("", ("--set", "source.slot=A-B"), ['source.slot: found "A-B"', "lower-case"]),
        ("", ("--set", "slot"), ["--set slot: not of the form section.key=value"]),
        ("", ("--config", "other.toml"), ["other.toml", "no such file", "pgtide init"]),
        ('tables = ["public.oders"]', (), ["'public.oders' matches no table", "Did you mean public.orders?"]),
    ],
)
@pytest.mark.parametrize("command", ["run", "capture"])
def test_a_wrong_configuration_is_one_message_exit_code_2_and_nothing_created(
    tmp_path: Path, shop: Database, command: str, more: str, arguments: tuple[str, ...], told: list[str]
) -> None:
    configure(tmp_path, shop.dsn, more)
    message = refusal(tmp_path, shop, command, *arguments)
    for part in told:
        assert part in message


def refusal(folder: Path, database: Database, *arguments: str) -> str:
    """The one message with which the command ends, having created nothing."""
    done = run(*arguments, folder=folder)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert created(database) == []
    assert not (folder / "pgtide-data").exists()
    return done.stderr


def test_a_missing_connection_string_is_refused(tmp_path: Path, shop: Database) -> None:
    message = refusal(tmp_path, shop, "run")
    assert "source.dsn: missing" in message
    assert "pgtide init" in message


def test_an_unreachable_server_is_refused_after_the_limit(tmp_path: Path, shop: Database) -> None:
    configure(tmp_path, make_conninfo(shop.dsn, port=1))
    message = refusal(tmp_path, shop, "run")
    assert "refused (tried for 1 s)" in message
    assert "host and port" in message


def test_a_role_without_replication_is_refused(tmp_path: Path, shop: Database) -> None:
    with role(shop) as name:
        configure(tmp_path, make_conninfo(shop.dsn, user=name))
        message = refusal(tmp_path, shop, "run")
    assert f"role {name} may not replicate" in message
    assert f'ALTER ROLE "{name}" REPLICATION;' in message


@pytest.fixture(scope="module")
def unsuitable() -> Iterator[Database]:
    """A database on a server that asks for passwords and whose wal_level is not logical."""
    with local.postgres(auth="scram", password="right-hunter2", wal_level="replica") as server:
        database = create_database(server)
        database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        yield database


def test_a_wrong_password_is_refused_and_not_shown(tmp_path: Path, unsuitable: Database) -> None:
    configure(tmp_path, make_conninfo(unsuitable.dsn, password="wrong-hunter2"))
    message = refusal(tmp_path, unsuitable, "run")
    assert "password authentication failed" in message
    assert "passfile" in message
    shown = run("run", folder=tmp_path, PGTIDE_DEBUG="1").stderr
    assert "Traceback" in shown
    assert "hunter2" not in shown


def test_a_wal_level_that_is_not_logical_is_refused(tmp_path: Path, unsuitable: Database) -> None:
    configure(tmp_path, unsuitable.dsn)
    message = refusal(tmp_path, unsuitable, "run")
    assert "wal_level is replica" in message
    assert "ALTER SYSTEM SET wal_level = logical" in message


def test_an_unexpected_error_is_one_line_unless_debugging(tmp_path: Path) -> None:
    program = (
        "import sys, pgtide.config\n"
        "def broken(*_): raise RuntimeError('it broke with password=hunter2')\n"
        "pgtide.config.load_config = broken\n"
        "sys.argv = ['pgtide', 'status']\n"
        "from pgtide.cli import main; main()"
    )
    for debug, lines in (("0", 2), ("1", 5)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, cwd=tmp_path, env=environment(PGTIDE_DEBUG=debug),
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.startswith("error: unexpected RuntimeError: it broke with password=***")
        assert (len(done.stderr.splitlines()) > 2) is (lines > 2)
        assert ("Traceback" in done.stderr) is (debug == "1")
        assert "hunter2" not in done.stderr


def catches(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def test_an_interrupt_while_waiting_for_the_server_is_exit_code_130(tmp_path: Path, shop: Database) -> None:
    configure(tmp_path, make_conninfo(shop.dsn, port=1))
    program = start("run", "--set", "source.connect_timeout_seconds=600", folder=tmp_path)
    try:
        # Before that SIGINT has Python's own meaning, and may be lost in the middle of an import.
        wait_for(lambda: catches(program.pid, signal.SIGTERM), what="the handler of signals")
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_capture_cleanly_and_frees_the_slot(
    tmp_path: Path, shop: Database, number: signal.Signals
) -> None:
    slot = f"slot_{shop.name}"
    configure(tmp_path, shop.dsn, f'slot = "{slot}"')
    program = start("capture", folder=tmp_path)
    active = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
    try:
        wait_for(lambda: shop.rows(active) == [(True,)], what="the capture to stream")
        program.send_signal(number)
        assert program.wait(30) == 0
        assert program.stderr is not None
        said = program.stderr.read()
        assert "public.notes: only inserts and truncates" in said
        assert "Traceback" not in said
        wait_for(lambda: shop.rows(active) == [(False,)], what="the slot to be free")
    finally:
        program.kill()
        program.communicate()

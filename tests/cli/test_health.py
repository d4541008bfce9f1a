"""`/health` and `/ready` of the daemon, asked over HTTP while it runs as a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pgtide import local
from tests.cli.program import run, start
from tests.database import Database, create_database
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    def __init__(
        self, database: Database, folder: Path, command: str = "capture", failpoints: str = "", initial: str = "none"
    ) -> None:
        self.port = free_port()
        (folder / "pgtide.toml").write_text(
            f'[source]\ndsn = {json.dumps(database.dsn)}\nslot = "{database.name}"\n[log]\npath = "log"\n'
            f"[capture]\nmetrics_port = {self.port}\nunhealthy_after_seconds = 0.5\n"
            f'[snapshot]\ninitial = "{initial}"\n[mirror]\nwarehouse = "lake"\n'
        )
        self.process = start(command, folder=folder, PGTIDE_FAILPOINTS=failpoints)

    def ask(self, path: str) -> tuple[int, Any]:
        """Status and content; (0, "") while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, ""

    def wait_for(self, path: str, status: int, reason: str = "") -> None:
        def answered() -> bool:
            assert self.process.poll() is None, self.process.communicate()[1]
            found, content = self.ask(path)
            return found == status and reason in str(content)

        wait_for(answered, what=f"/{path} to answer {status} {reason!r}")


@contextmanager
def running(
    database: Database, folder: Path, command: str = "capture", failpoints: str = "", initial: str = "none"
) -> Iterator[Daemon]:
    daemon = Daemon(database, folder, command, failpoints, initial)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.communicate()


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(TABLE)
    return database


@pytest.mark.parametrize("command", ["capture", "run"])
def test_a_daemon_that_streams_is_healthy_and_ready_and_ends_with_sigterm(
    shop: Database, tmp_path: Path, command: str
) -> None:
    with running(shop, tmp_path, command) as daemon:
        daemon.wait_for("ready", 200)
        assert daemon.ask("ready") == (200, {"ready": True})
        assert daemon.ask("health") == (200, {"healthy": True})
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics") as answer:
            assert b"pgtide_capture_streaming 1.0" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        assert daemon.ask("health") == (0, "")


def test_without_a_server_it_is_healthy_but_not_ready(tmp_path: Path) -> None:
    with local.postgres() as server:
        database = create_database(server)
        database.execute(TABLE)
        with running(database, tmp_path) as daemon:
            daemon.wait_for("ready", 200)
            server.stop()
            daemon.wait_for("ready", 503, "refused")
            assert daemon.ask("health") == (200, {"healthy": True})
            server.start()
            daemon.wait_for("ready", 200)


def test_it_is_not_ready_before_it_has_caught_up(shop: Database, tmp_path: Path) -> None:
    with running(shop, tmp_path) as daemon:
        daemon.wait_for("ready", 200)
    shop.execute("INSERT INTO t SELECT generate_series(1, 1000)")
    gate = tmp_path / "gate"
    with running(shop, tmp_path, failpoints=f"log.block.written=hold:{gate}") as daemon:
        daemon.wait_for("ready", 503, "catching up")
        gate.touch()
        daemon.wait_for("ready", 200)


def test_a_log_that_cannot_be_written_makes_it_unhealthy_after_a_while(shop: Database, tmp_path: Path) -> None:
    with running(shop, tmp_path, failpoints="log.block.written=fail:ENOSPC") as daemon:
        daemon.wait_for("ready", 200)
        assert daemon.ask("health") == (200, {"healthy": True})
        shop.execute("INSERT INTO t VALUES (1)")
        daemon.wait_for("health", 503, "cannot be written: No space left on device")


def test_a_log_that_cannot_be_opened_makes_it_unhealthy_after_a_while(shop: Database, tmp_path: Path) -> None:
    with running(shop, tmp_path, failpoints="log.epoch.taken=fail:EROFS") as daemon:
        daemon.wait_for("health", 503, "cannot be written: Read-only file system")
        assert daemon.ask("ready")[0] == 503


@pytest.mark.parametrize(
    ("point", "reason"),
    [("log.block.written", "has not come back"), ("capture.decoded", "the thread that reads changes has not gone on")],
)
def test_a_thread_that_hangs_makes_it_unhealthy_until_it_goes_on(
    shop: Database, tmp_path: Path, point: str, reason: str
) -> None:
    gate = tmp_path / "gate"
    with running(shop, tmp_path, failpoints=f"{point}=hold:{gate}") as daemon:
        made = "confirmed_flush_lsn > '0/0'"  # while the slot is in the making it is active, too
        active = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{shop.name}' AND active AND {made}"
        wait_for(lambda: shop.rows(active), what="the capture to stream")
        shop.execute("INSERT INTO t VALUES (1)")
        daemon.wait_for("health", 503, reason)
        gate.touch()
        daemon.wait_for("health", 200)
        daemon.wait_for("ready", 200)


def test_a_mirror_by_itself_shows_how_far_its_loads_are_at_a_port_of_its_own(shop: Database, tmp_path: Path) -> None:
    shop.execute("INSERT INTO t SELECT generate_series(1, 2000)")
    gate = tmp_path / "gate"
    with running(shop, tmp_path, initial="bulk") as capture:
        capture.wait_for("ready", 200)
        port = free_port()
        settings = ("snapshot.range_bytes=8192", f"mirror.metrics_port={port}")
        mirror = start(
            "mirror", *(part for setting in settings for part in ("--set", setting)),
            folder=tmp_path, PGTIDE_FAILPOINTS=f"load.range.appended=hold:{gate}",
        )  # fmt: skip
        try:

            def numbers() -> str:
                assert mirror.poll() is None, mirror.communicate()[1]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                        return str(answer.read().decode())
                except OSError:
                    return ""

            in_the_middle = 'pgtide_snapshot_ranges_expected{table="public.t"}'
            wait_for(lambda: in_the_middle in numbers(), what="the numbers of the load", limit_s=120)
            assert "pgtide_capture_" not in numbers()  # zeros of a capture that is elsewhere would be false alarms
            assert "pgtide_snapshot" not in metrics_of(capture)
            mirror.send_signal(signal.SIGTERM)
            gate.touch()
            mirror.wait(60)
        finally:
            mirror.kill()
            mirror.communicate()


def metrics_of(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_port_that_is_taken_is_refused_before_anything_is_touched(shop: Database, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "pgtide.toml").write_text(
            f"[source]\ndsn = {json.dumps(shop.dsn)}\n[capture]\nmetrics_port = {port}\n"
        )
        done: subprocess.CompletedProcess[str] = run("capture", folder=tmp_path)
    assert done.returncode == 2
    assert f"capture.metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert shop.rows("SELECT FROM pg_publication") == []
    assert [path.name for path in tmp_path.iterdir()] == ["pgtide.toml"]

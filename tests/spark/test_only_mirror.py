"""One process mirrors a log; the second stops before it touches anything, and a killed one is not in the way."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pgtide.errors import AlreadyRunningError
from pgtide.spark.only_mirror import only_mirror
from tests.cli.program import run
from tests.spark.logs import WrittenLog, insert, table_shape

HOLDER = """
import sys
from pgtide.spark.only_mirror import only_mirror
with only_mirror(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(log_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock as a mirror does."""
    command = [sys.executable, "-c", HOLDER, str(log_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_second_process_is_told_who_the_first_is_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(AlreadyRunningError) as refused, only_mirror(str(tmp_path)):
            pass
        assert f"pid {first.pid} on {socket.gethostname()}" in refused.value.what
        first.kill()
        first.wait()
        with only_mirror(str(tmp_path)):
            pass


def test_one_process_may_nest_it_and_holds_it_until_the_last_has_ended(tmp_path: Path) -> None:
    with only_mirror(str(tmp_path)):
        with only_mirror(str(tmp_path)):
            pass
        refused = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert "AlreadyRunningError" in refused.stderr
    with holder(tmp_path):
        pass


def test_second_mirror_stops_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(table_shape(), id=1))
    log.writer.close()
    (tmp_path / "pgtide.toml").write_text(
        '[source]\ndsn = "dbname=nowhere"\n[log]\npath = "log"\n[mirror]\nwarehouse = "lake"\n'
    )
    with holder(tmp_path / "log") as first:
        second = run("mirror", folder=tmp_path)
        assert second.returncode == 2, second.stderr
        assert f"pid {first.pid} on " in second.stderr
        assert "A log has one mirror." in second.stderr
        assert not (tmp_path / "lake").exists()
        assert first.poll() is None

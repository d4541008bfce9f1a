"""One process mirrors a log; the second stops before it touches anything, and a killed one is not in the way."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pgtide.errors import AlreadyRunningError
from pgtide.spark.only_mirror import only_mirror
from tests.cli.program import run
from tests.spark.logs import WrittenLog, insert, table_shape
from tests.spark.mirror_process import PROGRAM, mirror_process


def test_second_process_is_told_who_the_first_is_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    with mirror_process(tmp_path) as first:
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
            [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert "AlreadyRunningError" in refused.stderr
    with mirror_process(tmp_path):
        pass


def test_second_mirror_stops_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(table_shape(), id=1))
    log.writer.close()
    (tmp_path / "pgtide.toml").write_text(
        '[source]\ndsn = "dbname=nowhere"\n[log]\npath = "log"\n[mirror]\nwarehouse = "lake"\n'
    )
    with mirror_process(tmp_path / "log") as first:
        second = run("mirror", folder=tmp_path)
        assert second.returncode == 2, second.stderr
        assert f"pid {first.pid} on " in second.stderr
        assert "A log has one mirror." in second.stderr
        assert not (tmp_path / "lake").exists()
        assert first.poll() is None

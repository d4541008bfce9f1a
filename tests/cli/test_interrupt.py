"""Ctrl-C at every stage of `pgtide run`: it ends by itself, leaves no process behind, and lets the slot go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pgtide.cli.parts import stopped_by_signals
from tests.cli.program import PROGRAM, environment
from tests.database import Database
from tests.waiting import wait_for

# The promise is two seconds; a machine that is busy with other things gets more before the test fails.
LIMIT_S = 10.0


def said(output: Path, text: str) -> Callable[[], bool]:
    return lambda: text in output.read_text()


def is_mirroring(folder: Path) -> bool:
    file = folder / "log" / "readers" / "mirror.json"
    return file.exists() and bool(json.loads(file.read_bytes()).get("point"))


def members(session: int) -> list[int]:
    """Living processes of a session: a terminal's Ctrl-C reaches all of them."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize("stage", ["capture  streaming", "mirror   starting Spark", "mirror   running", "mirroring"])
def test_ctrl_c_ends_everything(stage: str, database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 1000)")
    (tmp_path / "pgtide.toml").write_text(
        f'[source]\ndsn = "{database.dsn}"\nslot = "{database.name}"\n[log]\npath = "log"\n'
        '[mirror]\nwarehouse = "lake"\ntrigger_seconds = 0.1\n'
    )
    output = tmp_path / "output"
    with output.open("wb") as out:
        program = subprocess.Popen(
            [*PROGRAM, "run"], cwd=tmp_path, env=environment(), stdout=out, stderr=out, start_new_session=True
        )
    try:
        reached = said(output, stage) if stage != "mirroring" else lambda: is_mirroring(tmp_path)
        wait_for(lambda: reached() or program.poll() is not None, limit_s=120, what=stage)
        assert program.poll() is None, output.read_text()
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(LIMIT_S) == 0, output.read_text()
        wait_for(lambda: not members(program.pid), limit_s=LIMIT_S, what="all processes to end")
    finally:
        for pid in members(program.pid):
            os.kill(pid, signal.SIGKILL)
        program.wait()
    assert "Traceback" not in output.read_text()
    query = "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND active"
    wait_for(lambda: not database.rows(query), what="the slot to be let go")


def test_a_signal_is_passed_on_even_while_the_main_thread_holds_the_events_lock() -> None:
    with stopped_by_signals() as stop:
        with stop._cond:  # type: ignore[attr-defined]  # as inside stop.wait(), where a signal may well arrive
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(LIMIT_S)

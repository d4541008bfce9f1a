"""The demo itself, in a small size: it proves what it says, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pgtide.demo.shop import TABLES
from tests.waiting import wait_for

SMALL = (
    "Settings(customers=100, products=20, orders=200, transactions_per_second=10, "
    "before_kill_s=0, dead_s=0.5, after_kill_s=0, limit_s=150)"
)
PROGRAM = f"import sys; from pgtide.demo import Settings, run; sys.exit(run(as_json=True, settings={SMALL}))"


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def left_behind(folder: Path) -> list[str]:
    """Files in the folder, and processes that know it."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR", "").startswith(str(folder)):
                processes.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return [*(str(path) for path in folder.iterdir()), *processes]


@pytest.mark.timeout(400)
def test_a_small_demo_proves_what_it_promises_and_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = start(tmp_path)
    out, told = demo.communicate(timeout=380)
    assert demo.returncode == 0, told
    result = json.loads(out)
    assert result["tables"].keys() == {table.name for table in TABLES}
    for found in result["tables"].values():
        assert found["mirror_rows"] == found["source_rows"] > 0
        assert found["mismatches"] == 0
    assert (result["mismatches"], result["books_balance"], result["restarts"]) == (0, True, 1)
    assert "/" in result["consistent_lsn"]
    assert "SIGKILL" in told
    wait_for(lambda: not left_behind(tmp_path), what=f"nothing to be left, but there is {left_behind(tmp_path)}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_middle_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    demo = start(tmp_path)
    try:
        # The log is there: Postgres, traffic, capture and, a moment later, Spark run.
        wait_for(lambda: [*tmp_path.glob("pgtide-demo-*/log/log.json")], limit_s=60, what="the change log")
        demo.send_signal(number)
        out, told = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert out == ""
    if number == signal.SIGKILL:
        # Nobody is left to remove the demo's own folder, but processes must not outlive it.
        wait_for(lambda: not [found for found in left_behind(tmp_path) if "process" in found], what="processes to end")
        return
    assert demo.returncode == 130, told
    assert left_behind(tmp_path) == []

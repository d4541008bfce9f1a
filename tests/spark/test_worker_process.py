"""Workers that are ready for more still import what they have not imported yet; those that end say what matters."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def test_modules_in_zip_files_are_found_afterwards(tmp_path: Path) -> None:
    """In a process of its own, which has imported one of two modules of an archive."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("first_zipped.py", "")
        archive.writestr("second_zipped.py", "found = True")
    script = (
        "import gc, importlib, sys, zipimport\n"
        "import first_zipped\n"
        "from pgtide.spark.worker_process import ready_for_more\n"
        "ready_for_more()\n"
        "assert not any(isinstance(one, zipimport.zipimporter) for one in sys.path_importer_cache.values())\n"
        "assert gc.get_freeze_count() > 0\n"
        "importlib.invalidate_caches()\n"
        "import second_zipped\n"
        "assert second_zipped.found\n"
        "ready_for_more()\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'archive.zip')!r})\n{script}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("raised", "told"),
    [("BrokenPipeError()", ""), ("KeyboardInterrupt()", ""), ("ValueError('of ours')", "ValueError: of ours")],
)
def test_source_that_is_stopped_is_silent_about_a_closed_connection_and_nothing_else(raised: str, told: str) -> None:
    script = f"from pgtide.spark.worker_process import end_quietly\nend_quietly()\nraise {raised}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert ended.stderr.strip().rpartition("\n")[2] == told

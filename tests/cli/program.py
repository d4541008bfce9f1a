"""The program as people run it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = [sys.executable, "-m", "pgtide"]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGTIDE_", "PG"))}
    cache = {name: os.environ[name] for name in ("PGTIDE_CACHE",) if name in os.environ}
    return kept | cache | {"COLUMNS": "200", "NO_COLOR": "1"} | variables


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=120
    )


def start(*arguments: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *arguments], cwd=folder, env=environment(**variables), stderr=subprocess.PIPE, text=True
    )

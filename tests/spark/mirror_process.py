"""A process that is the mirror of a log, as far as others can tell, and does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import sys
from pgtide.spark import mirror_lease
from pgtide.spark.only_mirror import only_mirror
mirror_lease._BEAT_S = 0.2
with only_mirror(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def mirror_process(log: str | Path, machine: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """`machine`: its folder for temporary files, of which each machine has one."""
    environment = dict(os.environ)
    if machine is not None:
        machine.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(machine)
    command = [sys.executable, "-c", PROGRAM, str(log)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()

"""The peer that decodes nothing: pg_recvlogical draining a slot to /dev/null."""

from __future__ import annotations

import subprocess
import time

from pgtide.bench.workload import Workload
from pgtide.capture.pipeline import stream_options
from pgtide.lsn import format_lsn


def same_options(work: Workload) -> dict[str, str]:
    """What the capture asks the server for."""
    return stream_options(work.server.version * 10000, ("pgtide",))


def pg_recvlogical_seconds(work: Workload, slot: str, lsn: int, options: dict[str, str]) -> float:
    """Seconds until pg_recvlogical has written everything up to `lsn` to /dev/null."""
    command = [str(work.server.programs / "pg_recvlogical"), "-d", work.server.dsn, "-S", slot, "--start", "--no-loop"]
    command += ["--endpos", format_lsn(lsn), "-f", "/dev/null"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - started

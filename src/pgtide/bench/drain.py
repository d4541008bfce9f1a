"""A capture as a process of its own, for measuring: drains its slot up to an LSN and tells what that took.

`python -m pgtide.bench.drain CONFIG LSN`: says "ready", waits for a line, drains, prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pgtide.capture.pipeline import Capture
from pgtide.config import load_config
from pgtide.lsn import format_lsn, parse_lsn

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Drained:
    began_s: float  # by the machine's monotonic clock
    seconds: float
    cpu_s: float
    peak_rss_mb: float


def begin(config: Path) -> None:
    """Makes slot and log, so that what is written from now on waits in the slot."""
    capture, stop = Capture(load_config(config)), threading.Event()
    thread = threading.Thread(target=capture.run, args=[stop])
    thread.start()
    if not capture.streaming.wait(60):
        raise RuntimeError(f"the capture of {config} did not start")
    stop.set()
    capture.wake()
    thread.join()


def drain(config: Path, lsn: int) -> Drained:
    """Drains in a child process whose start-up is not measured."""
    command = [sys.executable, "-m", "pgtide.bench.drain", str(config), format_lsn(lsn)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the capture of {config} did not start")
        child.stdin.write("go\n")
        child.stdin.flush()
        return Drained(**json.loads(child.stdout.readline()))


@contextmanager
def capturing(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`pgtide capture` beside the block."""
    command = [sys.executable, "-m", "pgtide", "capture", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            child.terminate()


def _child(config: Path, lsn: int) -> None:
    capture, stop = Capture(load_config(config)), threading.Event()
    thread = threading.Thread(target=capture.run, args=[stop])
    print("ready", flush=True)
    sys.stdin.readline()
    started, cpu = time.monotonic(), time.process_time()
    thread.start()
    while capture.durable_lsn < lsn and thread.is_alive():
        time.sleep(_POLL_S)
    seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu
    stop.set()
    capture.wake()
    thread.join()
    peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"began_s": started, "seconds": seconds, "cpu_s": cpu_s, "peak_rss_mb": peak_rss_mb}), flush=True)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), parse_lsn(sys.argv[2]))

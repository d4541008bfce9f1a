"""Peak memory of this process and all that come from it, looked at a few times a second in /proc.

The kernel keeps each process's own peak (VmHWM), so only a process that lives shorter than the pause between two looks
is missed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAUSE_S = 0.25


class PeakMemory:
    """By process id: what it is, and its peak so far in MB."""

    def __init__(self) -> None:
        self.peaks: dict[int, tuple[str, float]] = {}

    def look(self, *roots: int) -> None:
        parents = {
            pid: parent for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (parent := _parent(pid))
        }
        wanted = set(roots)
        while True:
            more = {pid for pid, parent in parents.items() if parent in wanted} - wanted
            if not more:
                break
            wanted |= more
        for pid in wanted:
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended
            found = dict(line.split(":", 1) for line in lines)
            kind = _kind(command)
            # The peak of a server process would count the shared buffers that it has touched.
            field = "RssAnon" if kind == "postgres" else "VmHWM"
            if field in found:
                before = self.peaks.get(pid, (kind, 0.0))[1]
                self.peaks[pid] = (kind, max(before, int(found[field].split()[0]) / 1024))

    def by_kind(self) -> dict[str, float]:
        """The largest process of each kind."""
        greatest: dict[str, float] = {}
        for kind, peak_mb in self.peaks.values():
            greatest[kind] = max(greatest.get(kind, 0.0), peak_mb)
        return greatest


@contextmanager
def watched_memory(*roots: int) -> Iterator[PeakMemory]:
    """Looks at these processes and their children until the end of the block."""
    memory, over = PeakMemory(), threading.Event()

    def look() -> None:
        while not over.wait(_PAUSE_S):
            memory.look(*roots)

    thread = threading.Thread(target=look, name="pgtide-bench-memory", daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()
        memory.look(*roots)


def _parent(pid: int) -> int | None:
    try:
        # The name may hold spaces and brackets: what follows the last bracket is state and parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _kind(command: str) -> str:
    if "pyspark.daemon" in command or "pyspark/daemon" in command:
        return "python_worker"
    if "java" in command.split(" ", 1)[0]:
        return "jvm"
    return "postgres" if "postgres" in command.split(" ", 1)[0] else "driver"

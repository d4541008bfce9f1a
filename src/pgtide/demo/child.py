"""Child processes that never outlive the demo: the product itself, and the proof.

Each has a process group of its own (a Ctrl-C in the terminal is for us alone) which holds its JVM too.  A small shell
waits on a pipe that we hold: when we die by whatever signal, the pipe closes and the shell ends the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pgtide.errors import PgtideError

_WATCH = 'read -r _ || kill -s KILL -- "-$1"'
_GONE_LIMIT_S = 0.3  # a JVM needs 0.1 s; zombies that nobody collects would be waited for in vain
_POLL_S = 0.02
_SHOWN_LINES = 25


class Child:
    """A running command; its output goes to a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self.output = output
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._watch = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "pgtide-demo-watch", str(self.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tell(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; whoever waits for the answer notices
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def terminate(self) -> None:
        """Asks it to end, as a service manager would: SIGTERM to the process, not to its JVM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL for the process and its JVM; returns when they are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        limit = time.monotonic() + _GONE_LIMIT_S
        while time.monotonic() < limit and _group_exists(self.pid):
            time.sleep(_POLL_S)
        self._dismiss_watch()

    def failure(self, what: str) -> PgtideError:
        """An error with the end of its output."""
        lines = self.output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return PgtideError("\n".join([f"{what}. Its last words:", *(f"  {line}" for line in lines)]))

    def _dismiss_watch(self) -> None:
        # Before the number of the group can belong to somebody else.
        if self._watch.poll() is None:
            self._watch.communicate(b"\n")
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group of zombies
        return False
    return True

"""Kill points: named places at which a test can end, stop or delay the process.  Free when off.

Code calls `reach("log.block.fsynced")` on each side of every change of durable state.  The environment
variable `PGTIDE_FAILPOINTS` turns points into actions, for this process and its children:

    log.block.fsynced=kill            die at once, as by `kill -9`
    log.block.fsynced=kill@3          the third time it is reached
    mirror.merged=raise               raise FailpointReached
    log.block.written=fail:ENOSPC     raise that OSError
    log.block.written=delay:250       wait 250 ms
    log.block.written=hold:/path      wait until that file exists; /path.held says that it has come so far

Several are separated by commas.  Every point is declared with `declare`, so that a test can list them all and
fail for one that no crash test visits.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

ENVIRONMENT_VARIABLE = "PGTIDE_FAILPOINTS"
_HOLD_POLL_S = 0.005

_declared: dict[str, str] = {}


class FailpointReached(Exception):
    """Raised by a point whose action is `raise`."""


@dataclass
class _Armed:
    action: str
    argument: str
    at: int  # acts when reached for the at-th time; 0: every time
    reached: int = 0


def _parse(text: str) -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        action, _, count = action.partition("@")
        action, _, argument = action.partition(":")
        if action not in {"kill", "raise", "fail", "delay", "hold"}:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: {item!r}: unknown action {action!r}")
        armed[name] = _Armed(action, argument, int(count) if count else 0)
    return armed


_lock = threading.Lock()
_armed: dict[str, _Armed] = _parse(os.environ.get(ENVIRONMENT_VARIABLE, ""))


def declare(name: str, meaning: str) -> str:
    """Registers a kill point; `meaning` completes the sentence "the process dies when …"."""
    _declared[name] = meaning
    return name


def declared() -> dict[str, str]:
    """All points of the modules imported so far, with their meanings."""
    return dict(_declared)


def arm(text: str) -> None:
    """Replaces what is armed in this process; the empty string switches everything off."""
    global _armed
    _armed = _parse(text)


def reach(name: str) -> None:
    """Does what is armed for this point; nothing, at the cost of one look-up, if nothing is."""
    if _armed and name in _armed:
        _act(name, _armed[name])


def _act(name: str, point: _Armed) -> None:
    with _lock:
        point.reached += 1
        if point.at and point.reached != point.at:
            return
    if point.action == "kill":
        # Told, because others kill too: a test that finds a process killed wants to know where.
        os.write(2, f"{ENVIRONMENT_VARIABLE}: killed at {name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "raise":
        raise FailpointReached(name)
    elif point.action == "fail":
        code = getattr(errno, point.argument)
        raise OSError(code, os.strerror(code))
    elif point.action == "delay":
        time.sleep(float(point.argument) / 1000)
    else:
        os.close(os.open(f"{point.argument}.held", os.O_CREAT | os.O_WRONLY))
        while not os.path.exists(point.argument):
            time.sleep(_HOLD_POLL_S)

"""The one way to wait in a test: for a condition, with a limit, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S, _POLL_MAX_S = 0.02, 0.5
_PATIENCE = 2.0  # limits are such that they hold on a machine with little else to do


def wait_for(condition: Callable[[], T], *, limit_s: float = 60.0, what: str = "the condition") -> T:
    """The first result of `condition` that is true; fails the test when there is none within twice the limit.

    A condition that takes long, because it asks Spark, is asked less often: what it waits for needs the processor, too.
    """
    limit_s *= _PATIENCE
    limit = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        result = condition()
        if result:
            return result
        now_s = time.monotonic()
        if now_s > limit:
            raise AssertionError(f"waited {limit_s:.0f} s for {what}; last result: {result!r}")
        time.sleep(max(_POLL_S, min(_POLL_MAX_S, 2 * (now_s - began_s))))

"""Kill points of this process, armed for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgtide import failpoints


@contextmanager
def armed(points: str) -> Iterator[None]:
    failpoints.arm(points)
    try:
        yield
    finally:
        failpoints.arm("")

"""Kill points of this process, armed for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pgtide import failpoints


@contextmanager
def armed(points: str) -> Iterator[None]:
    failpoints.arm(points)
    try:
        yield
    finally:
        failpoints.arm("")


@contextmanager
def holding(point: str, gate: Path) -> Iterator[Callable[[], None]]:
    """Whoever comes to the kill point waits there until what this gives is called, or the block ends."""

    def let_go() -> None:
        failpoints.arm("")
        gate.touch()

    failpoints.arm(f"{point}=hold:{gate}")
    try:
        yield let_go
    finally:
        let_go()

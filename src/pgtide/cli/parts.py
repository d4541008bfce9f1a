"""Long-running commands: their parts as threads, and a clean end.

The main thread only waits and takes signals: the first one asks the parts to end, the second ends the process at once.
Spark in particular must not start in the main thread, where it would take SIGINT for itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from pgtide.config import Config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_POLL_S = 0.1
_END_LIMIT_S = 1.0  # people are promised two seconds, and Python and the JVM need some of them to go


def run_parts(
    stop: threading.Event, parts: dict[str, Callable[[], None]], wake: Callable[[], None] = lambda: None
) -> None:
    """Runs the parts side by side; the first that ends or fails ends the others.

    A part that does not end in time (Spark in the middle of its start) is left behind: whatever it was doing, ending
    there is the same to it as a crash, and crashes do no harm.
    """
    failures: list[BaseException] = []

    def guarded(part: Callable[[], None]) -> None:
        try:
            part()
        except KeyboardInterrupt:
            pass  # it was waiting for something when `stop` was set
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failures.append(error)
        finally:
            stop.set()

    threads = [threading.Thread(target=guarded, args=[part], name=name, daemon=True) for name, part in parts.items()]
    for thread in threads:
        thread.start()
    while not stop.wait(_POLL_S):
        pass
    wake()
    deadline = time.monotonic() + _END_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; a second signal ends the process at once.

    The handler only writes to a pipe, and a thread sets the event: a handler runs in the main thread, which may at
    this moment be inside `stop.wait()` and hold the lock that `stop.set()` needs.
    """
    stop = threading.Event()
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    signals = 0

    def pass_on() -> None:
        if os.read(read_end, 1) == b"s":
            stop.set()

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(130)
        os.write(write_end, b"s")

    watcher = threading.Thread(target=pass_on, name="pgtide-signals", daemon=True)
    watcher.start()
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(write_end, b"e")
        watcher.join()
        os.close(read_end)
        os.close(write_end)


def say(part: str, what: str, detail: str = "") -> None:
    print(f"{part:8} {what}" + (f": {detail}" if detail else ""), file=sys.stderr, flush=True)


def open_session(config: Config) -> SparkSession:
    from pgtide.local.spark import build_session

    return build_session(
        master=config.spark.master, conf=config.spark.conf, warehouse=config.warehouse, catalog=config.mirror.catalog
    )


def with_spark(config: Config, work: Callable[[SparkSession], T]) -> T:
    """The result of work that needs a session and nothing else; a signal ends it."""
    results: list[T] = []
    with stopped_by_signals() as stop:

        def part() -> None:
            session = open_session(config)
            try:
                results.append(work(session))
            finally:
                session.stop()

        run_parts(stop, {"spark": part})
    if not results:
        raise KeyboardInterrupt
    return results[0]

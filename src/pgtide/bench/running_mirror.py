"""A mirror that runs beside a benchmark, in this process, and what it says of itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pgtide import local
from pgtide.config import Config
from pgtide.log.reader import LogReader
from pgtide.spark.mirror import Mirror

POLL_S = 0.002
_LIMIT_S = 600.0


class RunningMirror:
    def __init__(self, config: Config) -> None:
        self._file = config.log_path / "readers" / "mirror.json"
        self._failure: list[BaseException] = []

    def report(self) -> dict[str, Any]:
        """What it last wrote down; raises what it has failed with."""
        if self._failure:
            raise self._failure[0]
        said: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        parked = {name: table["error"] for name, table in said.get("tables", {}).items() if table["error"]}
        if parked:
            raise RuntimeError(f"tables are parked: {parked}")
        return said

    def published_offset(self) -> int:
        point = self.report().get("point")
        return int(point["offset"]) if point else -1

    def wait_until_published(self, offset: int) -> None:
        limit_s = time.monotonic() + _LIMIT_S
        while self.published_offset() < offset:
            if time.monotonic() > limit_s:
                raise RuntimeError(f"the mirror did not publish {offset} within {_LIMIT_S:.0f} s: {self.report()}")
            time.sleep(POLL_S)

    def timings(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = self.report().get("timings", {})
        return found

    def run(self, mirror: Mirror, stop: threading.Event) -> None:
        try:
            mirror.run(stop)
        except BaseException as error:  # noqa: BLE001 - raised by `report`
            self._failure.append(error)


@contextmanager
def running_mirror(config: Config) -> Iterator[RunningMirror]:
    session = local.build_session(warehouse=config.warehouse, catalog=config.mirror.catalog)
    running, stop = RunningMirror(config), threading.Event()
    thread = threading.Thread(target=running.run, args=[Mirror(session, config), stop])
    thread.start()
    try:
        yield running
    finally:
        stop.set()
        thread.join()
        session.stop()


def spent(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What was added to each step in between."""
    nothing = {"times": 0, "seconds": 0.0}
    return {
        step: {key: value - before.get(step, nothing)[key] for key, value in now.items()} for step, now in after.items()
    }


def end_offset(config: Config, lsn: int) -> int:
    """The end of the log once it holds everything up to `lsn`."""
    reader = LogReader(config.log_path)
    while reader.end().durable_lsn < lsn:
        time.sleep(POLL_S)
    return reader.end().end_offset

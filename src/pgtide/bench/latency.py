"""`pgtide bench latency`: from the commit of a small transaction to its being durable in the log, and to its being
visible in the mirror at a published point; at a steady rate.

The log alone first, then the mirror with a table that already has rows, half of the transactions inserting and half
updating one.  Each path is watched where its readers would look: the log's marker, and the mirror's report.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pgtide.bench.drain import begin, capturing
from pgtide.bench.result import Result, percentile, say
from pgtide.bench.running_mirror import POLL_S, end_offset, running_mirror
from pgtide.bench.workload import Workload, workload
from pgtide.config import load_config
from pgtide.log.marker import read_marker
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn

_RATE_PER_S = 200
_POLL_LOG_S = 0.0005
_LIMIT_S = 120.0


def latency(small: bool) -> Result:
    result = Result("latency")
    with workload(fsync=True) as work:
        work.create_tables("orders")
        _to_log(work, result, 2 if small else 20)
        work.drop_slots()
        _to_mirror(work, result, seconds=3 if small else 60, rows=1_000 if small else 1_000_000)
    return result


def _to_log(work: Workload, result: Result, seconds: float) -> None:
    say("commit → log")
    file = work.configuration("latency")
    begin(file)
    config = load_config(file)
    control = config.log_path / "control"
    with capturing(file), _seen(lambda: read_marker(control)[1].durable_lsn, _POLL_LOG_S) as seen:
        commits = _commits(work, seconds, first=0, insert_only=True)
        _wait_for(seen, commits[-1][0])
    _add(result, "log", _delays_ms(commits, seen))


def _to_mirror(work: Workload, result: Result, seconds: float, rows: int) -> None:
    say(f"commit → mirror, with {rows} rows in the table")
    work.create_tables("orders")
    file = work.configuration("latency_mirror")
    begin(file)
    config = load_config(file)
    with capturing(file), running_mirror(config) as running:
        running.wait_until_published(0)
        work.insert("orders", rows, 1000)
        running.wait_until_published(end_offset(config, work.wal_end_lsn()))
        _commits(work, seconds / 6, first=rows + 1, insert_only=False)  # warms the JVM
        with _seen(running.published_offset, POLL_S) as seen:
            commits = _commits(work, seconds, first=2 * rows, insert_only=False)
            end_offset(config, commits[-1][0])
            log = LogReader(config.log_path)
            placed = [(log.position_after(lsn), committed_s) for lsn, committed_s in commits]
            _wait_for(seen, placed[-1][0])
    _add(result, "mirror", _delays_ms(placed, seen))
    result.figures["mirror_points"] = len([True for when_s, _ in seen if when_s >= commits[0][1]])
    result.figures["mirror_table_rows"] = rows


def _commits(work: Workload, seconds: float, first: int, *, insert_only: bool) -> list[tuple[int, float]]:
    """Transactions at the steady rate: an LSN after each commit, and when it was committed."""
    commits: list[tuple[int, float]] = []
    with work.server.connect() as connection:
        began_s = time.monotonic()
        for number in range(round(_RATE_PER_S * seconds)):
            time.sleep(max(0.0, began_s + number / _RATE_PER_S - time.monotonic()))
            if insert_only or number % 2 == 0:
                connection.execute("INSERT INTO orders (id, status) VALUES (%s, 'new')", [first + number])
            else:
                # Spread over the table as customers are, not beside each other.
                chosen = number * 7919 % first + 1
                connection.execute("UPDATE orders SET status = 'paid', score = score + 1 WHERE id = %s", [chosen])
            committed_s = time.monotonic()
            row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            commits.append((parse_lsn(row[0]), committed_s))
    return commits


@contextmanager
def _seen(position: Callable[[], int], poll_s: float) -> Iterator[list[tuple[float, int]]]:
    """Watches beside the block: when a position was first seen."""
    seen: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(poll_s):
            now = position()
            if not seen or now != seen[-1][1]:
                seen.append((time.monotonic(), now))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def _wait_for(seen: list[tuple[float, int]], position: int) -> None:
    limit_s = time.monotonic() + _LIMIT_S
    while not seen or seen[-1][1] < position:
        if time.monotonic() > limit_s:
            raise RuntimeError(f"{position} was not reached within {_LIMIT_S:.0f} s")
        time.sleep(POLL_S)


def _delays_ms(commits: list[tuple[int, float]], seen: list[tuple[float, int]]) -> list[float]:
    positions = [position for _, position in seen]
    reached = (seen[bisect.bisect_left(positions, position)][0] for position, _ in commits)
    return [max(0.0, when_s - committed_s) * 1000 for when_s, (_, committed_s) in zip(reached, commits, strict=True)]


def _add(result: Result, path: str, delays_ms: list[float]) -> None:
    result.figures[f"{path}_p50_ms"] = round(percentile(delays_ms, 0.5), 2)
    result.figures[f"{path}_p95_ms"] = round(percentile(delays_ms, 0.95), 2)
    result.figures[f"{path}_transactions"] = len(delays_ms)

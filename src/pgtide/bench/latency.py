"""`pgtide bench latency`: from the commit of a small transaction to its being durable in the log, at a steady rate."""

from __future__ import annotations

import threading
import time

from pgtide.bench.result import Result, percentile
from pgtide.bench.workload import workload
from pgtide.capture.pipeline import Capture
from pgtide.config import load_config
from pgtide.log.marker import read_marker
from pgtide.lsn import parse_lsn

_RATE_PER_S = 200
_POLL_S = 0.0005


def latency(small: bool) -> Result:
    result = Result("latency")
    seconds = 2 if small else 20
    with workload(fsync=True) as work:
        work.create_tables("orders")
        file = work.configuration("latency")
        config = load_config(file)
        capture, stop = Capture(config), threading.Event()
        thread = threading.Thread(target=capture.run, args=[stop])
        thread.start()
        capture.streaming.wait(60)
        commits: list[tuple[int, float]] = []  # LSN after the commit, when it was committed
        seen: list[tuple[float, int]] = []  # when, how far the log was durable
        control = config.log_path / "control"

        def watch() -> None:
            last = 0
            while not stop.is_set():
                durable_lsn = read_marker(control)[1].durable_lsn
                if durable_lsn != last:
                    seen.append((time.monotonic(), durable_lsn))
                    last = durable_lsn
                time.sleep(_POLL_S)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with work.server.connect() as connection:
            began = time.monotonic()
            for number in range(_RATE_PER_S * seconds):
                time.sleep(max(0.0, began + number / _RATE_PER_S - time.monotonic()))
                connection.execute("INSERT INTO orders (id, status) VALUES (%s, 'new')", [number])
                committed = time.monotonic()
                row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
                assert row is not None
                commits.append((parse_lsn(row[0]), committed))
            while not seen or seen[-1][1] < commits[-1][0]:
                time.sleep(_POLL_S)
        stop.set()
        capture.wake()
        thread.join()
        watcher.join()
    delays_ms, at = [], 0
    for lsn, committed in commits:
        while seen[at][1] < lsn:
            at += 1
        delays_ms.append(max(0.0, seen[at][0] - committed) * 1000)
    result.figures["log_p50_ms"] = round(percentile(delays_ms, 0.5), 2)
    result.figures["log_p95_ms"] = round(percentile(delays_ms, 0.95), 2)
    result.figures["transactions"] = len(commits)
    result.not_run["mirror"] = "commit → mirror is not part of this benchmark yet"
    return result

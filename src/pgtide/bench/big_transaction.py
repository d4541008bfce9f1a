"""`pgtide bench big-transaction`: one transaction of millions of rows, once plain and once with 30 % rolled back.

What it shows: the memory of the capture stays bounded, no row is lost or too many, and the time from the commit to
"durable" does not grow with the size: the rows were spooled while the transaction ran.
"""

from __future__ import annotations

import time
from pathlib import Path

from pgtide.bench.drain import begin, capturing
from pgtide.bench.result import Result
from pgtide.bench.workload import Workload, workload
from pgtide.config import load_config
from pgtide.log.reader import LogReader

_STEP = 100_000


def big_transaction(small: bool) -> Result:
    result = Result("big-transaction")
    rows = 100_000 if small else 10_000_000
    with workload() as work:
        for suffix, rolled_back in (("", 0.0), ("_savepoints", 0.3)):
            work.create_tables("orders")
            _measure(work, rows, rolled_back, suffix, result)
    return result


def _measure(work: Workload, rows: int, rolled_back: float, suffix: str, result: Result) -> None:
    file = work.configuration(f"big{suffix}")
    begin(file)
    config = load_config(file)
    with capturing(file) as child:
        expected = 0
        with work.server.connect(autocommit=False) as connection:
            for number in range(0, rows, _STEP):
                count = min(_STEP, rows - number)
                gone = int(count * rolled_back)
                connection.execute(_insert(number, count - gone))
                if gone:
                    connection.execute("SAVEPOINT s")
                    connection.execute(_insert(number + count - gone, gone))
                    connection.execute("ROLLBACK TO SAVEPOINT s")
                expected += count - gone
            connection.commit()
            committed = time.monotonic()
        lsn = work.wal_end_lsn()
        reader = LogReader(config.log_path)
        while reader.end().durable_lsn < lsn:
            time.sleep(0.01)
        seconds = time.monotonic() - committed
        peak_rss_mb = _peak_rss_mb(child.pid)
        pieces = reader.plan(reader.first_offset(), reader.end().end_offset)
        found = sum(reader.read(piece).rows.num_rows for piece in pieces)
    result.figures |= {
        f"rows_expected{suffix}": expected,
        f"rows_in_log{suffix}": found,
        f"peak_rss_mb{suffix}": round(peak_rss_mb, 1),
        f"seconds_to_commit_in_log{suffix}": round(seconds, 3),
    }
    work.drop_slots()


def _insert(first: int, count: int) -> bytes:
    return f"""INSERT INTO orders SELECT i, i % 1000, 'status ' || i % 7, (i % 10000) / 100.0, i % 2 = 0, now(),
        'note number ' || i, gen_random_uuid(), i * 1.5, i % 100
        FROM generate_series({first}, {first + count - 1}) i""".encode()


def _peak_rss_mb(pid: int) -> float:
    """The process's high-water mark, as the kernel has counted it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0

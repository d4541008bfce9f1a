"""`pgtide bench mirror`: how fast changes come from Postgres into Iceberg, and what a batch costs when little happens.

Sustained: the WAL is generated while nobody reads it; then pg_recvlogical drains it to /dev/null, and after that a
capture drains it into the log while the mirror, which runs all along, follows.  The clock stops when the point that
holds everything is published.  Spark's start and the tables' first commit are not part of it.  Three kinds of work:
rows that are new, rows of three tables that come, change and go within short transactions, and updates of rows that are
spread over a large table.

Idle: one row is written, the batch that brings it is timed by the mirror itself, and so on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pgtide.bench.drain import begin, capturing, drain
from pgtide.bench.recvlogical import pg_recvlogical_seconds, same_options
from pgtide.bench.result import Result, say
from pgtide.bench.running_mirror import RunningMirror, end_offset, running_mirror, spent
from pgtide.bench.workload import INTERLEAVED, Workload, interleaved, workload
from pgtide.config import Config, load_config
from pgtide.log.reader import LogReader
from pgtide.spark.timings import BATCH

_REPETITIONS = 3
_IDLE_BATCHES = 15
_WARM_UP = 3
_IDLE_TABLES = (1, 20)
_PER_TRANSACTION = 1000


def mirror(small: bool) -> Result:
    result = Result("mirror")
    scale = 100 if small else 1
    with workload() as work:
        result.environment["postgres"] = work.server.version
        _sustained(work, result, scale)
        for tables in _IDLE_TABLES:
            _idle(work, result, tables, 3 if small else _IDLE_BATCHES)
    result.not_run["delta_to_iceberg"] = "there is no Delta sink yet"
    result.not_run["idle_batch_ms_1000_tables"] = "making a thousand tables takes longer than all the rest"
    return result


@dataclass
class _Scenario:
    suffix: str
    changes: int
    generate: Callable[[int], None]  # the number of the repetition
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


def _sustained(work: Workload, result: Result, scale: int) -> None:
    work.create_tables(*INTERLEAVED)
    rows = 1_000_000 // scale
    changes = 600_000 // scale // 60 * 60
    far = 100_000_000  # beyond all rows of the other scenario
    scenarios = [
        _Scenario("", rows, lambda number: work.insert("orders", rows, _PER_TRANSACTION, first=1 + number * rows)),
        _Scenario(
            "_interleaved", changes, lambda number: interleaved(work, changes, first=far + number * changes // 60)
        ),
        _Scenario("_updates", rows // 2, lambda number: _update(work, rows // 2, number)),
    ]
    file = work.configuration("sustained")
    begin(file)
    config = load_config(file)
    with running_mirror(config) as running:
        running.wait_until_published(0)
        for scenario in scenarios:
            for number in range(1 + _REPETITIONS):  # the first warms the JVM, and does not count
                _drain_once(scenario, number, work, config, running)
    for scenario in scenarios:
        rates = [scenario.changes / seconds for seconds in scenario.ours_s]
        theirs = [scenario.changes / seconds for seconds in scenario.theirs_s]
        result.add_ratio(f"pg_recvlogical{scenario.suffix}", rates, theirs)
        result.add_figure(f"rows_per_s{scenario.suffix}", rates)
        for part, seconds_of_part in scenario.parts.items():
            result.add_figure(f"{part}{scenario.suffix}", seconds_of_part)
    work.drop_slots()


def _update(work: Workload, rows: int, number: int) -> None:
    """Rows spread all over `orders`, a thousand to a transaction: none of them is new to the mirror."""
    work.execute(
        f"""
        DO $$ BEGIN
        FOR k IN 0..{rows // _PER_TRANSACTION - 1} LOOP
            UPDATE orders SET status = 'paid {number}', score = score + 1
                WHERE id IN (SELECT 1 + (k::bigint * {_PER_TRANSACTION} + i) * 7919 % {2 * rows}
                             FROM generate_series(0, {_PER_TRANSACTION - 1}) i);
            COMMIT;
        END LOOP; END $$"""
    )


def _drain_once(scenario: _Scenario, number: int, work: Workload, config: Config, running: RunningMirror) -> None:
    say(f"sustained{scenario.suffix}: {'warming up' if number == 0 else f'repetition {number} of {_REPETITIONS}'}")
    slot = f"peer{scenario.suffix}_{number}"
    work.create_slot(slot)
    scenario.generate(number)
    lsn = work.wal_end_lsn()
    theirs_s = pg_recvlogical_seconds(work, slot, lsn, same_options(work))
    before = running.timings()
    drained = drain(config.file, lsn)
    running.wait_until_published(LogReader(config.log_path).end().end_offset)
    ended_s = time.monotonic()
    if number == 0:
        return
    scenario.ours_s.append(ended_s - drained.began_s)
    scenario.theirs_s.append(theirs_s)
    scenario.parts.setdefault("capture_s", []).append(drained.seconds)
    scenario.parts.setdefault("capture_cpu_s", []).append(drained.cpu_s)
    for step, now in spent(before, running.timings()).items():
        scenario.parts.setdefault(f"{step}_s", []).append(now["seconds"])
        if step == BATCH:
            scenario.parts.setdefault("batches", []).append(now["times"])


def _idle(work: Workload, result: Result, tables: int, batches: int) -> None:
    """Batches with one row in one of the tables, and with one row in each of them."""
    say(f"idle: {tables} tables")
    names = [f"idle_{number}" for number in range(tables)]
    work.drop_tables()
    work.create_tables(*names)
    file = work.configuration(f"idle_{tables}")
    begin(file)
    config = load_config(file)
    one: list[float] = []
    every: list[float] = []
    with capturing(file), running_mirror(config) as running:
        running.wait_until_published(0)
        for number in range(_WARM_UP + batches):
            for row, (kept, touched) in enumerate(((one, names[:1]), (every, names)), 2 * number):
                before = running.timings()
                work.insert_together(touched, row)
                running.wait_until_published(end_offset(config, work.wal_end_lsn()))
                batch = spent(before, running.timings())[BATCH]
                if number >= _WARM_UP:
                    kept.append(batch["seconds"] / batch["times"] * 1000)
    result.add_figure(f"idle_batch_ms_{tables}_table{'s' if tables > 1 else ''}", one)
    if tables > 1:
        result.add_figure(f"touched_batch_ms_{tables}_tables", every)
    work.drop_slots()

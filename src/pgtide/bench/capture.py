"""`pgtide bench capture`: how fast a slot is drained into the durable log, beside pg_recvlogical on the same WAL.

All slots are made first, the WAL is generated once, then pgtide and pg_recvlogical drain it in turn.  pg_recvlogical
writes to /dev/null and decodes nothing; pgtide decodes, compresses and fsyncs.  Debezium drains the large transactions
once, at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pgtide.bench.debezium import NotRunError, drain_seconds
from pgtide.bench.drain import Drained, begin, drain
from pgtide.bench.recvlogical import pg_recvlogical_seconds, same_options
from pgtide.bench.result import Result, say
from pgtide.bench.workload import INTERLEAVED, Workload, interleaved, workload

_REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class _Scenario:
    name: str
    changes: int
    generate: Callable[[Workload, int], None]


def capture(small: bool) -> Result:
    result = Result("capture")
    scale = 100 if small else 1
    scenarios = [
        _Scenario("large", 1_000_000 // scale, lambda work, rows: work.insert("orders", rows, 1000)),
        _Scenario("single_row", 200_000 // scale, lambda work, rows: work.insert("orders", rows, 1)),
        _Scenario("interleaved", 600_000 // scale, interleaved),
    ]
    with workload() as work:
        result.environment["postgres"] = work.server.version
        for scenario in scenarios:
            _measure(scenario, work, result)
    return result


def _measure(scenario: _Scenario, work: Workload, result: Result) -> None:
    work.create_tables(*INTERLEAVED)
    ours: list[Drained] = []
    same: list[float] = []
    defaults: list[float] = []
    numbers = range(_REPETITIONS)
    configurations = [work.configuration(f"{scenario.name}_{number}") for number in numbers]
    for number in numbers:
        begin(configurations[number])
        work.create_slot(f"same_{number}")
        if scenario.name == "large":
            work.create_slot(f"defaults_{number}")
    if scenario.name == "large":
        work.create_slot("debezium")
    scenario.generate(work, scenario.changes)
    lsn = work.wal_end_lsn()
    for number in numbers:
        say(f"{scenario.name}: repetition {number + 1} of {_REPETITIONS}")
        same.append(pg_recvlogical_seconds(work, f"same_{number}", lsn, same_options(work)))
        ours.append(drain(configurations[number], lsn))
        if scenario.name == "large":
            plain = {"proto_version": "1", "publication_names": "pgtide"}
            defaults.append(pg_recvlogical_seconds(work, f"defaults_{number}", lsn, plain))
    rates = [scenario.changes / one.seconds for one in ours]
    key = "pg_recvlogical" if scenario.name == "large" else f"pg_recvlogical_{scenario.name}"
    result.add_ratio(key, rates, [scenario.changes / seconds for seconds in same])
    if scenario.name == "large":
        result.add_ratio("pg_recvlogical_defaults", rates, [scenario.changes / seconds for seconds in defaults])
        _beside_debezium(scenario, work, statistics.median(rates), result)
    suffix = "" if scenario.name == "large" else f"_{scenario.name}"
    result.add_figure(f"rows_per_s{suffix}", rates)
    result.add_figure(f"cpu_s_per_million_rows{suffix}", [one.cpu_s / scenario.changes * 1e6 for one in ours])
    result.add_figure(f"peak_rss_mb{suffix}", [one.peak_rss_mb for one in ours])
    work.drop_slots()


def _beside_debezium(scenario: _Scenario, work: Workload, rate: float, result: Result) -> None:
    say("large: Debezium")
    try:
        seconds = drain_seconds(work.server, "debezium", scenario.changes)
    except NotRunError as error:
        result.not_run["debezium"] = error.what
    else:
        result.add_ratio("debezium", [rate], [scenario.changes / seconds])

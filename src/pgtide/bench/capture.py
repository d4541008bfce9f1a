"""`pgtide bench capture`: how fast a slot is drained into the durable log, beside pg_recvlogical on the same WAL.

All slots are made first, the WAL is generated once, then pgtide and pg_recvlogical drain it in turn.  pg_recvlogical
writes to /dev/null and decodes nothing; pgtide decodes, compresses and fsyncs.  Debezium drains the large transactions
once, at the end.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgtide.bench.debezium import NotRunError, drain_seconds
from pgtide.bench.drain import Drained, begin, drain
from pgtide.bench.result import Result
from pgtide.bench.workload import Workload, workload
from pgtide.capture.pipeline import stream_options
from pgtide.lsn import format_lsn

_REPETITIONS = 3
_TABLES = ("orders", "items", "events")


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
        _Scenario("interleaved", 600_000 // scale, _interleaved),
    ]
    with workload() as work:
        result.environment["postgres"] = work.server.version
        for scenario in scenarios:
            _measure(scenario, work, result)
    return result


def _interleaved(work: Workload, changes: int) -> None:
    """Three tables, inserts, updates and deletes, mixed within transactions of 60 changes."""
    work.execute(
        f"""
        DO $$ DECLARE k bigint; BEGIN
        FOR k IN 1..{changes // 60} LOOP
            INSERT INTO orders SELECT i, 1, 'new', i % 100, true, now(), 'a note ' || i, gen_random_uuid(), i, 1
                FROM generate_series(k * 10, k * 10 + 9) i;
            INSERT INTO items SELECT i, 1, 'new', i % 100, true, now(), 'a note ' || i, gen_random_uuid(), i, 1
                FROM generate_series(k * 10, k * 10 + 9) i;
            UPDATE orders SET status = 'paid', amount = amount + 1 WHERE id BETWEEN k * 10 AND k * 10 + 9;
            INSERT INTO events SELECT i, 1, 'new', i % 100, true, now(), 'a note ' || i, gen_random_uuid(), i, 1
                FROM generate_series(k * 10, k * 10 + 9) i;
            UPDATE items SET quantity = quantity + 1 WHERE id BETWEEN k * 10 AND k * 10 + 9;
            DELETE FROM events WHERE id BETWEEN k * 10 AND k * 10 + 9;
            COMMIT;
        END LOOP; END $$"""
    )


def _measure(scenario: _Scenario, work: Workload, result: Result) -> None:
    work.create_tables(*_TABLES)
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
        _say(f"{scenario.name}: repetition {number + 1} of {_REPETITIONS}")
        same.append(_pg_recvlogical(work, f"same_{number}", lsn, _same_options(work)))
        ours.append(drain(configurations[number], lsn))
        if scenario.name == "large":
            plain = {"proto_version": "1", "publication_names": "pgtide"}
            defaults.append(_pg_recvlogical(work, f"defaults_{number}", lsn, plain))
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
    _say("large: Debezium")
    try:
        seconds = drain_seconds(work.server, "debezium", scenario.changes)
    except NotRunError as error:
        result.not_run["debezium"] = error.what
    else:
        result.add_ratio("debezium", [rate], [scenario.changes / seconds])


def _same_options(work: Workload) -> dict[str, str]:
    return stream_options(work.server.version * 10000, ("pgtide",))


def _pg_recvlogical(work: Workload, slot: str, lsn: int, options: dict[str, str]) -> float:
    """Seconds until pg_recvlogical has written everything up to `lsn` to /dev/null."""
    command = [str(work.server.programs / "pg_recvlogical"), "-d", work.server.dsn, "-S", slot, "--start", "--no-loop"]
    command += ["--endpos", format_lsn(lsn), "-f", "/dev/null"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - started


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""`pgtide bench snapshot`: the first load of 5 million rows into Iceberg, beside COPY and Spark's own JDBC source.

COPY (FORMAT binary) by the server itself to /dev/null is what reading alone costs: no client, no network, no decoding.
The JDBC source has its best case, a key of evenly spread numbers to be cut by.  All is read from the server's cache,
which a first COPY has filled.  Once with one table, once with the same rows in four tables at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pgtide.bench.debezium import NotRunError
from pgtide.bench.loading import WARM_UP, Loaded, load, load_with_jdbc, warm_up_of
from pgtide.bench.result import Result
from pgtide.bench.workload import Workload, workload

_ROWS = 5_000_000
_REPETITIONS = 3
_WARM_UP_ROWS = 2_000_000  # several ranges, so that Spark's workers are all there


def snapshot(small: bool) -> Result:
    result = Result("snapshot")
    rows = _ROWS // 100 if small else _ROWS
    with workload(shared_buffers="2GB") as work:
        result.environment |= {"postgres": work.server.version, "rows": rows}
        work.create_tables(WARM_UP)
        work.insert(WARM_UP, _WARM_UP_ROWS, _WARM_UP_ROWS)
        for tables, suffix in ((["orders"], ""), ([f"part{number}" for number in range(4)], "_4_tables")):
            work.create_tables(*tables)
            for name in tables:
                work.insert(name, rows // len(tables), 100_000)
                work.execute(f"VACUUM ANALYZE {name}")
            _measure(work, tables, rows, suffix, 1 if small else _REPETITIONS, result)
            work.execute(f"DROP TABLE {', '.join(tables)}")
    return result


def _measure(work: Workload, tables: Sequence[str], rows: int, suffix: str, repetitions: int, result: Result) -> None:
    ours: list[Loaded] = []
    jdbc: list[Loaded] = []
    copies: list[float] = []
    _copy(work, tables)
    for number in range(repetitions):
        _say(f"{len(tables)} tables: repetition {number + 1} of {repetitions}")
        copies.append(rows / _copy(work, tables))
        ours.append(
            _checked(load(_configuration(work, f"load{suffix}_{number}", tables), tables, _server_pid(work)), rows)
        )
        work.drop_slots()
        try:
            file = _configuration(work, f"jdbc{suffix}_{number}", tables)
            jdbc.append(_checked(load_with_jdbc(file, tables, _server_pid(work)), rows))
        except NotRunError as error:
            result.not_run[f"spark_jdbc{suffix}"] = error.what
    rates = [rows / one.seconds for one in ours]
    result.add_ratio(f"copy_binary{suffix}", rates, copies)
    if jdbc:
        result.add_ratio(f"spark_jdbc{suffix}", rates, [rows / one.seconds for one in jdbc])
        result.add_figure(f"spark_jdbc_rows_per_s{suffix}", [rows / one.seconds for one in jdbc])
    result.add_figure(f"rows_per_s{suffix}", rates)
    result.add_figure(f"copy_binary_rows_per_s{suffix}", copies)
    for who, loads in (("", ours), ("spark_jdbc_", jdbc)):
        for kind in sorted({kind for one in loads for kind in one.peak_mb}):
            result.add_figure(f"{who}peak_rss_mb_{kind}{suffix}", [one.peak_mb.get(kind, 0.0) for one in loads])
    result.add_figure(f"peak_rss_mb{suffix}", [max(one.peak_mb.values()) for one in ours])


def _copy(work: Workload, tables: Sequence[str]) -> float:
    """Seconds for one connection to send all tables to nowhere; the best of three, which is the hardest to match."""
    return min(_copy_once(work, tables) for _ in range(3))


def _copy_once(work: Workload, tables: Sequence[str]) -> float:
    began = time.monotonic()
    for name in tables:
        work.execute(f"COPY {name} TO '/dev/null' (FORMAT binary)")
    return time.monotonic() - began


def _configuration(work: Workload, name: str, tables: Sequence[str]) -> Path:
    file = work.folder / name / "pgtide.toml"
    _write_configuration(work, file, name, tables, namespace="")
    _write_configuration(work, warm_up_of(file), f"{name}_{WARM_UP}", [WARM_UP], namespace=WARM_UP)
    return file


def _write_configuration(work: Workload, file: Path, slot: str, tables: Sequence[str], namespace: str) -> None:
    listed = ", ".join(f'"public.{table}"' for table in tables)
    file.parent.mkdir()
    file.write_text(
        f'[source]\ndsn = "{work.server.dsn}"\nslot = "{slot}"\npublication = "{slot}"\ntables = [{listed}]\n'
        f'[log]\npath = "log"\n[mirror]\nwarehouse = "{work.folder / "lake" / slot}"\nnamespace = "{namespace}"\n'
    )


def _server_pid(work: Workload) -> int:
    return int((work.server.data / "postmaster.pid").read_text().split()[0])


def _checked(loaded: Loaded, rows: int) -> Loaded:
    if loaded.rows != rows:
        raise RuntimeError(f"{loaded.rows} rows were loaded of {rows}")
    return loaded


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

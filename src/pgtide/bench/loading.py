"""Loads into Iceberg as processes of their own, for measuring: pgtide's, and one with Spark's JDBC source.

`python -m pgtide.bench.loading CONFIG load|jdbc TABLE…`: opens a session, says "ready", waits for a line, loads, prints
one JSON object.  Starting Spark is not measured, nor what its first jobs cost: a small table is loaded before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgtide.bench.debezium import NotRunError
from pgtide.bench.memory import watched_memory
from pgtide.capture.pipeline import Capture
from pgtide.config import Config, load_config
from pgtide.errors import PgtideError
from pgtide.local.jars import lakehouse_jars
from pgtide.local.maven import Wanted, jars_in_cache
from pgtide.local.spark import build_session, local_master
from pgtide.sinks.iceberg_table import quoted
from pgtide.spark.targets import target_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM_UP = "warm_up"  # a small table
_POLL_S = 0.02
_JDBC = "org.postgresql:postgresql:42.7.7"
_PARTITIONS_PER_CORE = 2
_FETCH_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Loaded:
    seconds: float
    rows: int  # that the lake has afterwards
    peak_mb: dict[str, float] = field(default_factory=dict)  # by kind of process, the largest


def warm_up_of(file: Path) -> Path:
    """The configuration for the small table, beside the one that is measured."""
    return file.parent / "warm_up" / file.name


def load(config: Path, tables: Sequence[str], server_pid: int) -> Loaded:
    """pgtide's load of the tables, in a child process."""
    return _in_child(config, "load", tables, server_pid)


def load_with_jdbc(config: Path, tables: Sequence[str], server_pid: int) -> Loaded:
    """The same rows by Spark's own source, cut by key; raises NotRunError where its driver cannot be had."""
    try:
        _jdbc_jars()
    except PgtideError as error:
        raise NotRunError(error.what) from error
    return _in_child(config, "jdbc", tables, server_pid)


def _jdbc_jars() -> list[Path]:
    return jars_in_cache("postgres-jdbc", Wanted("The JDBC driver of Postgres", (_JDBC,)))


def _in_child(config: Path, how: str, tables: Sequence[str], server_pid: int) -> Loaded:
    command = [sys.executable, "-m", "pgtide.bench.loading", str(config), how, *tables]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{how}: the child did not start")
        with watched_memory(child.pid, server_pid) as memory:
            child.stdin.write("go\n")
            child.stdin.flush()
            line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"{how}: the child ended with {child.wait()}")
        return Loaded(**json.loads(line), peak_mb=memory.by_kind())


def _child(file: Path, how: str, tables: Sequence[str]) -> None:
    config, before = load_config(file), load_config(warm_up_of(file))
    jars = [*lakehouse_jars(), *(_jdbc_jars() if how == "jdbc" else ())]
    session = build_session(master=local_master(), warehouse=config.warehouse, jars=jars)
    work = _load if how == "load" else _load_with_jdbc
    work(session, before, [WARM_UP], lambda: None)
    seconds = work(session, config, tables, _wait_for_start)
    rows = sum(session.table(target_of(config, f"public.{name}")).count() for name in tables)
    print(json.dumps({"seconds": seconds, "rows": rows}), flush=True)
    session.stop()


def _wait_for_start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def _load(session: SparkSession, config: Config, _: Sequence[str], ready: Callable[[], None]) -> float:
    """From the start of a mirror that has nothing yet to the moment in which all tables say that they are loaded."""
    from pgtide.spark.mirror import Mirror

    capture, stop = Capture(config), threading.Event()
    capturing = threading.Thread(target=capture.run, args=[stop])
    capturing.start()
    if not capture.streaming.wait(60):
        raise RuntimeError("the capture did not start")
    mirroring = threading.Thread(target=Mirror(session, config).run, args=[stop])
    ready()
    began = time.monotonic()
    mirroring.start()
    while not _is_loaded(config) and mirroring.is_alive():
        time.sleep(_POLL_S)
    seconds = time.monotonic() - began
    stop.set()
    capture.wake()
    for thread in (mirroring, capturing):
        thread.join()
    return seconds


def _is_loaded(config: Config) -> bool:
    try:
        found = json.loads((Path(config.log_location) / "readers" / "mirror.json").read_bytes())
    except FileNotFoundError:
        return False
    states = {table["state"] for table in found["tables"].values()}
    if "parked" in states:
        raise RuntimeError(f"a table could not be loaded: {found['tables']}")
    return states == {"streaming"}


def _load_with_jdbc(session: SparkSession, config: Config, tables: Sequence[str], ready: Callable[[], None]) -> float:
    """Each table cut by its key into equal parts, several tables at a time."""
    found = conninfo_to_dict(config.source.dsn)
    address = f"jdbc:postgresql://{found['host']}:{found['port']}/{found['dbname']}"
    options = {"user": str(found["user"]), "password": str(found.get("password") or ""), "fetchsize": str(_FETCH_ROWS)}
    session.sql(f"CREATE NAMESPACE IF NOT EXISTS {quoted(config.mirror.catalog, 'public')}")
    partitions = _PARTITIONS_PER_CORE * (os.cpu_count() or 1)
    with psycopg.connect(config.source.dsn) as connection:
        greatest = {name: connection.execute(f"SELECT max(id) FROM {name}".encode()).fetchone() for name in tables}

    def one(name: str) -> None:
        last = greatest[name]
        assert last is not None
        rows = session.read.jdbc(
            address, name, column="id", lowerBound=1, upperBound=last[0], numPartitions=partitions, properties=options
        )
        rows.writeTo(target_of(config, f"public.{name}")).using("iceberg").tableProperty("format-version", "3").create()

    ready()
    began = time.monotonic()
    with ThreadPoolExecutor(len(tables)) as pool:
        list(pool.map(one, tables))
    return time.monotonic() - began


if __name__ == "__main__":
    _child(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""A small source with a real capture and a real mirror on it."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pgtide.capture.pipeline import Capture
from pgtide.config import Config, load_config
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.iceberg_table import IcebergTable
from pgtide.snapshot.ctid_ranges import CtidRange, parse_range
from pgtide.spark import at
from pgtide.spark.mirror import Mirror
from pgtide.spark.targets import target_of
from tests.arming import holding
from tests.database import Database
from tests.waiting import wait_for


@contextmanager
def beside(
    work: Callable[[threading.Event], None], wake: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], bool]]:
    """Runs the work in a thread until the end of the block, where its error is raised; gives whether there is one."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: bool(failed)
    finally:
        stop.set()
        wake()
        thread.join()
    if failed:
        raise failed[0]


@dataclass
class Shop:
    """A source with tables, and everything to mirror it."""

    database: Database
    spark: SparkSession
    config: Config

    def read_in_ranges_of(self, length_bytes: int) -> None:
        file = self.config.file
        file.write_text(file.read_text().replace("[snapshot]\n", f"[snapshot]\nrange_bytes = {length_bytes}\n"))
        self.config = load_config(file)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        capture = Capture(self.config)
        with beside(capture.run, capture.wake) as failed:
            wait_for(lambda: capture.streaming.is_set() or failed(), what="the capture to stream")
            yield

    @contextmanager
    def mirroring(self, *tables: str, where: str = "true", columns: str = "*") -> Iterator[None]:
        """Runs the mirror; the block begins when these tables are as they are in the source, and covered by a point."""
        with self.mirroring_from_here() as wait_until_equal:
            wait_until_equal(*tables, where=where, columns=columns)
            yield

    @contextmanager
    def mirroring_from_here(self) -> Iterator[Callable[..., None]]:
        """Runs the mirror; the block begins at once, and is given how to wait until tables are equal."""
        with beside(Mirror(self.spark, self.config).run) as failed:

            def wait_until_equal(*tables: str, where: str = "true", columns: str = "*") -> None:
                self.wait_until_equal(*tables, where=where, columns=columns, failed=failed)

            yield wait_until_equal

    @contextmanager
    def mirroring_held(self, table: str, gate: Path) -> Iterator[tuple[Callable[..., None], Callable[[], None]]]:
        """Runs the mirror; the block begins when some of the table is loaded, and the load waits to be let go.

        It is given how to wait until tables are equal, and how to let the load go.
        """
        # Armed before the mirror begins, and let go before it is to end.
        with holding("load.range.appended", gate) as let_go, self.mirroring_from_here() as wait_until_equal:
            try:
                wait_for(lambda: self.has_loaded_some(table), limit_s=120, what=f"some of {table} to be loaded")
                yield wait_until_equal, let_go
            finally:
                let_go()

    def wait_until_equal(
        self, *tables: str, where: str = "true", columns: str = "*", failed: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until these tables are as they are in the source, or the mirror has failed."""
        compared: dict[str, Any] = {"again_s": 0.0}

        def is_equal() -> bool:
            # Comparing takes what the mirror needs, too: once for each time that it has something to tell.
            told = self._told_at()
            if compared.get("told") == told and time.monotonic() < compared["again_s"]:
                return False
            compared.update(told=told, again_s=time.monotonic() + 2.0)
            return self.differences(*tables, where=where, columns=columns) == []

        wait_for(lambda: failed() or is_equal(), limit_s=180, what=f"the mirror to be equal: {tables}")

    def _told_at(self) -> int | None:
        file = Path(self.config.log_location) / "readers" / "mirror.json"
        return file.stat().st_mtime_ns if file.exists() else None

    def with_tables(self, *tables: str) -> Config:
        """The configuration with these in `source.tables`."""
        source = self.config.source.model_copy(update={"tables": list(tables)})
        return self.config.model_copy(update={"source": source}).at(self.config.file)

    def told(self) -> dict[str, dict[str, Any]]:
        """What the mirror says of its tables."""
        file = Path(self.config.log_location) / "readers" / "mirror.json"
        found: dict[str, dict[str, Any]] = json.loads(file.read_bytes())["tables"] if file.exists() else {}
        return found

    def states(self) -> dict[str, str]:
        return {name: table["state"] for name, table in self.told().items()}

    def mirror_until_equal(self, *tables: str, where: str = "true", columns: str = "*") -> None:
        with self.mirroring(*tables, where=where, columns=columns):
            pass

    def wait_until_captured(self) -> None:
        """Waits until the log has all that has happened until now."""
        target = parse_lsn(self.database.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        reader = LogReader(self.config.log_path)
        wait_for(lambda: reader.end().durable_lsn >= target, what="the log to reach the WAL's end")

    def loads(self, table: str) -> dict[str, list[list[CtidRange]]]:
        """By pair of snapshot and LSN, in their order: the ranges that each commit of the mirror table has finished."""
        target = IcebergTable(self.spark, target_of(self.config, table))
        found: dict[str, list[list[CtidRange]]] = {}
        for _, summary in reversed(list(target.summaries(target.head()))):
            if "pgtide.load" in summary:
                names = json.loads(summary.get("pgtide.ranges", "[]"))
                ranges = [part for part in map(parse_range, names) if part is not None]
                found.setdefault(summary["pgtide.load"], []).append(ranges)
        return found

    def has_loaded_some(self, table: str) -> bool:
        recorded = IcebergSink(self.spark).recorded(target_of(self.config, table))
        return recorded is not None and bool(recorded.loaded_ranges)

    def is_covered(self, *tables: str) -> bool:
        """Whether the latest point has these tables."""
        try:
            return set(tables) <= set(at(self.spark, config=self.config).versions)
        except Exception:  # noqa: BLE001 - there may be no point yet, or no table of points
            return False

    def load_error(self, table: str) -> str | None:
        """Why the table could not be loaded anew, as the mirror tells it."""
        return self.told().get(table, {}).get("load_error")

    def mirror_errors(self) -> dict[str, str]:
        """Of tables that are parked, as the mirror reports them."""
        return {name: table["error"] for name, table in self.told().items() if table["error"]}

    def differences(self, *tables: str, where: str = "true", columns: str = "*") -> list[str]:
        """Tables whose rows at the latest point are not those of the source, as far as these are to be mirrored."""
        try:
            point = at(self.spark, config=self.config)
        except Exception as error:  # noqa: BLE001 - there may be no point yet, or no table of points
            return [str(error)]
        different = []
        for table in tables:
            if table not in point.versions:
                different.append(table)
                continue
            mirror = sorted(tuple(row) for row in point.table(table).collect())
            if mirror != sorted(self.database.rows(f"SELECT {columns} FROM {table} WHERE {where}")):
                different.append(table)
        return different


def open_shop(
    database: Database, spark: SparkSession, folder: Path, snapshot: str = "", dsn: str = "", source: str = ""
) -> Shop:
    """Customers, orders and an empty table, mirrored into a namespace of their own in the session's lake.

    `snapshot` and `source` are further lines of the configuration; `dsn` is another way to the same database.
    """
    file = folder / "pgtide.toml"
    warehouse = spark.conf.get("spark.sql.catalog.lake.warehouse")
    file.write_text(
        f'[source]\ndsn = "{dsn or database.dsn}"\nslot = "s_{database.name}"\n{source}\n[snapshot]\n{snapshot}\n'
        f'[mirror]\nwarehouse = "{warehouse}"\nnamespace = "shop_{uuid.uuid4().hex[:12]}"\ntrigger_seconds = 0.1\n'
    )
    database.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer int, note text)",
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 20) n",
        "INSERT INTO orders SELECT n, n % 20 + 1, repeat('x', n % 50) FROM generate_series(1, 3000) n",
    )
    return Shop(database, spark, load_config(file))

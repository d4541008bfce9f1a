"""A small source with a real capture and a real mirror on it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from pgtide.capture.pipeline import Capture
from pgtide.config import Config, load_config
from pgtide.spark import at
from pgtide.spark.mirror import Mirror
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

    @contextmanager
    def capturing(self) -> Iterator[None]:
        capture = Capture(self.config)
        with beside(capture.run, capture.wake) as failed:
            wait_for(lambda: capture.streaming.is_set() or failed(), what="the capture to stream")
            yield

    @contextmanager
    def mirroring(self, *tables: str, where: str = "true", columns: str = "*") -> Iterator[None]:
        """Runs the mirror; the block begins when these tables are as they are in the source, and covered by a point."""
        with beside(Mirror(self.spark, self.config).run) as failed:
            wait_for(
                lambda: failed() or self.differences(*tables, where=where, columns=columns) == [],
                limit_s=90,
                what="the mirror to be equal",
            )
            yield

    def mirror_until_equal(self, *tables: str, where: str = "true", columns: str = "*") -> None:
        with self.mirroring(*tables, where=where, columns=columns):
            pass

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


def open_shop(database: Database, spark: SparkSession, folder: Path) -> Shop:
    """Customers, orders and an empty table, mirrored into a namespace of their own in the session's lake."""
    file = folder / "pgtide.toml"
    warehouse = spark.conf.get("spark.sql.catalog.lake.warehouse")
    file.write_text(
        f'[source]\ndsn = "{database.dsn}"\nslot = "s_{database.name}"\n'
        f'[mirror]\nwarehouse = "{warehouse}"\nnamespace = "shop_{uuid.uuid4().hex[:12]}"\ntrigger_seconds = 0.1\n'
        '[spark]\nconf = { "spark.driver.defaultJavaOptions" = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" }\n'
    )
    database.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer int, note text)",
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 20) n",
        "INSERT INTO orders SELECT n, n % 20 + 1, repeat('x', n % 50) FROM generate_series(1, 3000) n",
    )
    return Shop(database, spark, load_config(file))

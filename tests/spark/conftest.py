"""A log written by hand, to be read or with a mirror on it, in a namespace of the test's own."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide.config import Config, Log, Mirror, Snapshot, Source
from pgtide.log.writer import SEGMENT_BYTES
from pgtide.schema import TableShape
from pgtide.sinks.iceberg import IcebergSink
from pgtide.spark import register
from pgtide.spark.mirror import Mirror as MirrorRun
from pgtide.spark.targets import target_of
from tests.database import Database
from tests.spark.logs import WrittenLog
from tests.spark.shop import Shop, open_shop


@pytest.fixture
def log(tmp_path: Path, spark: SparkSession) -> WrittenLog:
    """A hand-written log, and a session that can read it."""
    register(spark)
    return WrittenLog(tmp_path / "log")


@dataclass
class Mirrored:
    """A hand-written log with everything to mirror it."""

    spark: SparkSession
    log: WrittenLog
    config: Config

    @property
    def sink(self) -> IcebergSink:
        return IcebergSink(self.spark)

    def target(self, shape: TableShape) -> str:
        return target_of(self.config, shape.qualified_name)

    def run(self, *, parked: Sequence[str] = ()) -> None:
        """Mirrors until the log's end, with a new driver's knowledge: none.  `parked`: what is expected to be."""
        MirrorRun(self.spark, self.config).run(threading.Event(), until_offset=self.log.writer.end_offset)
        tables = self.progress()["tables"]
        assert {name: table["error"] for name, table in tables.items() if table["error"] and name not in parked} == {}
        assert all(tables[name]["state"] == "parked" for name in parked)

    def progress(self) -> dict[str, Any]:
        """What the mirror last said about itself."""
        file = self.log.path / "readers" / "mirror.json"
        written: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"tables": {}}
        return written

    @contextmanager
    def running(self) -> Iterator[None]:
        """A mirror beside the test, as another driver would be."""
        stop = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                MirrorRun(self.spark, self.config).run(stop)
            except BaseException as error:  # noqa: BLE001 - raised below, in the test
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]

    def states(self) -> dict[str, str]:
        return {name: table["state"] for name, table in self.progress()["tables"].items()}

    def rows(self, shape: TableShape) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The mirror table by key, which no two rows may share."""
        keys = [column.name for column in shape.key_columns]
        found = [row.asDict() for row in self.spark.table(self.target(shape)).collect()]
        by_key = {tuple(row[name] for name in keys): row for row in found}
        assert len(by_key) == len(found), "two rows for one key"
        return by_key

    def snapshots(self, shape: TableShape) -> int:
        """How many commits the table has had."""
        return self.spark.table(f"{self.target(shape)}.snapshots").count()

    def mark(self, shape: TableShape) -> int | None:
        """Up to where the table says that it is applied; None if it says nothing yet."""
        version = self.sink.recorded(self.target(shape))
        return version.mark.offset if version and version.mark else None

    def has_reached(self, shape: TableShape, offset: int) -> bool:
        return (self.mark(shape) or 0) >= offset


@contextmanager
def mirrored_in(folder: Path, spark: SparkSession, segment_bytes: int = SEGMENT_BYTES) -> Iterator[Mirrored]:
    log = WrittenLog(folder / "log", segment_bytes)
    config = Config(
        source=Source(dsn="dbname=nowhere"),
        log=Log(path=str(log.path)),
        mirror=Mirror(namespace=f"test_{uuid.uuid4().hex[:12]}", trigger_seconds=0.1),
        snapshot=Snapshot(initial="none"),
    ).at(folder / "pgtide.toml")
    yield Mirrored(spark, log, config)
    log.writer.close()


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    return open_shop(database, spark, tmp_path)


@pytest.fixture
def mirrored(spark: SparkSession, tmp_path: Path) -> Iterator[Mirrored]:
    with mirrored_in(tmp_path, spark) as opened:
        yield opened

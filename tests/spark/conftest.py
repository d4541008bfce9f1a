"""A log written by hand and a mirror on it, in a namespace of the test's own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide.config import Config, Log, Mirror, Snapshot, Source
from pgtide.schema import TableShape
from pgtide.sinks.iceberg import IcebergSink
from pgtide.spark.mirror import Mirror as MirrorRun
from pgtide.spark.targets import target_of
from tests.spark.logs import WrittenLog


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

    def run(self, until_offset: int | None = None) -> None:
        """Mirrors until the log's end, with a new driver's knowledge: none."""
        end = self.log.writer.end_offset if until_offset is None else until_offset
        MirrorRun(self.spark, self.config).run(threading.Event(), until_offset=end)

    def rows(self, shape: TableShape) -> dict[tuple[Any, ...], dict[str, Any]]:
        keys = [column.name for column in shape.key_columns]
        found = [row.asDict() for row in self.spark.table(self.target(shape)).collect()]
        by_key = {tuple(row[name] for name in keys): row for row in found}
        assert len(by_key) == len(found), "two rows for one key"
        return by_key

    def snapshots(self, shape: TableShape) -> int:
        """How many commits the table has had."""
        return self.spark.table(f"{self.target(shape)}.snapshots").count()

    def mark(self, shape: TableShape) -> int | None:
        version = self.sink.recorded(self.target(shape))
        assert version is not None
        assert version.mark is not None
        return version.mark.offset


@pytest.fixture
def mirrored(spark: SparkSession, tmp_path: Path) -> Iterator[Mirrored]:
    log = WrittenLog(tmp_path / "log")
    config = Config(
        source=Source(dsn="dbname=nowhere"),
        log=Log(path=str(log.path)),
        mirror=Mirror(namespace=f"test_{uuid.uuid4().hex[:12]}", trigger_seconds=0.1),
        snapshot=Snapshot(initial="none"),
    ).at(tmp_path / "pgtide.toml")
    yield Mirrored(spark, log, config)
    log.writer.close()

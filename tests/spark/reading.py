"""The data source as tests read it: through Spark, and as Spark's own processes would, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader

from pgtide.spark.source import PgtideSource
from tests.spark.logs import WrittenLog, table_shape

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500)


def read(spark: SparkSession, log: WrittenLog, table: str = "public.orders", **options: Any) -> DataFrame:
    return spark.read.format("pgtide").options(path=str(log.path), table=table, **options).load()


def in_order(frame: DataFrame) -> list[Row]:
    return sorted(frame.collect(), key=lambda row: (row["_offset"], row["_change_type"] != "update_preimage"))


def batch_rows(log: WrittenLog, table: str = "public.orders", **options: str) -> list[dict[str, Any]]:
    """What a batch read of the table gives, without Spark."""
    source = PgtideSource({"path": str(log.path), "table": table, **options})
    reader: Any = source.reader(source.schema())
    return [row for part in reader.partitions() for rows in reader.read(part) for row in rows.to_pylist()]


def batch_ids(log: WrittenLog, table: str = "public.orders", **options: str) -> list[int]:
    """The ids that a batch read of the table gives, without Spark."""
    return [row["id"] for row in batch_rows(log, table, **options)]


class Collected:
    """A stream that keeps the ids of each batch, stopped and started on one checkpoint."""

    def __init__(self, spark: SparkSession, log: WrittenLog, checkpoint: Path, **options: Any) -> None:
        self._checkpoint = checkpoint
        self._stream = (
            spark.readStream.format("pgtide").options(path=str(log.path), table="public.orders", **options).load()
        )
        self.batches: list[list[int]] = []

    @property
    def ids(self) -> list[int]:
        return [number for batch in self.batches for number in batch]

    def drain(self, *, failing: bool = False) -> None:
        """Runs until the log's end; `failing`: dies in its first batch, with nothing kept."""

        def keep(frame: DataFrame, _: int) -> None:
            if failing:
                raise RuntimeError("the sink is gone")
            self.batches.append([row["id"] for row in in_order(frame)])

        writer = self._stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(self._checkpoint))
        query = writer.start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()


class Restarted:
    """The process that Spark keeps for a stream's offsets, asked as Spark 4.1 asks it."""

    def __init__(self, log: WrittenLog, **options: str) -> None:
        self._source = PgtideSource({"path": str(log.path), "table": "public.orders", **options})

    def begin(self) -> DataSourceStreamReader:
        return self._source.streamReader(self._source.schema())

    def restart(self, seen: dict[str, Any]) -> DataSourceStreamReader:
        reader = self.begin()
        reader.partitions(seen, seen)
        return reader

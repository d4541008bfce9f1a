"""The mirror's own streaming source: its offsets say how far the log goes, and its rows are never read.

Changes do not pass through the streaming query: each table reads from where it has got to, which only the table
knows.  The query decides when there is something to do; a job for a plan that the driver can read from the log's
directories in a millisecond would only add to every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import LongType, StructField, StructType

from pgtide.log.reader import LogReader
from pgtide.spark.worker_process import end_quietly

NAME = "pgtide_mirror_plan"


class MirrorPlanSource(DataSource):
    """Options: `path` of the log and `start`, the offset from which the tables need changes."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return StructType([StructField("from", LongType()), StructField("to", LongType())])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return MirrorPlanReader(str(self.options["path"]), int(self.options["start"]))


class MirrorPlanReader(DataSourceStreamReader):
    def __init__(self, path: str, start: int) -> None:
        self._path = path
        self._start = start
        self._log: LogReader | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._offset(self._start)

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        return self._offset(self._reader().end().end_offset)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition((start["offset"], end["offset"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int]]:
        yield partition.value

    def stop(self) -> None:
        end_quietly()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None}

    def _reader(self) -> LogReader:
        if self._log is None:
            self._log = LogReader(self._path)
        return self._log

    def _offset(self, offset: int) -> dict[str, Any]:
        return {"log": self._reader().identity.log_id, "offset": offset}

"""The data source as a stream: each change once over restarts, in batches that end with transactions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.logs import WrittenLog, insert
from tests.spark.reading import ITEMS, ORDERS, Collected, Restarted


def test_stream_gives_each_change_once_over_a_restart(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    log.commit(insert(ORDERS, id=1), insert(ITEMS, id=9))
    log.commit(insert(ORDERS, id=2))
    collected = Collected(spark, log, tmp_path / "checkpoint")
    collected.drain()
    assert collected.ids == [1, 2]
    log.commit(insert(ORDERS, id=3))
    collected.drain()
    assert collected.ids == [1, 2, 3]


def test_lost_or_older_checkpoint_gives_the_same_changes_again(
    spark: SparkSession, log: WrittenLog, tmp_path: Path
) -> None:
    """Under the same offsets, in the same order: whoever has noted the last one that was applied can leave them out."""
    checkpoint, copy = tmp_path / "checkpoint", tmp_path / "copy"
    log.commit(insert(ORDERS, id=1), insert(ITEMS, id=9))
    collected = Collected(spark, log, checkpoint)
    collected.drain()
    shutil.copytree(checkpoint, copy)
    for number in (2, 3):
        log.commit(insert(ORDERS, id=number))
        collected.drain()
    for restored, again in ((copy, [2, 3]), (tmp_path / "none", [1, 2, 3])):
        shutil.rmtree(checkpoint)
        if restored.exists():
            shutil.copytree(restored, checkpoint)
        collected.batches.clear()
        collected.drain()
        assert collected.ids == again


@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_query_that_dies_in_its_first_batch_gives_it_when_it_is_restarted(
    spark: SparkSession, log: WrittenLog, tmp_path: Path, starting: str
) -> None:
    for number in range(3):
        log.commit(insert(ORDERS, id=number))
    collected = Collected(spark, log, tmp_path / "checkpoint", startingOffsets=starting)
    with pytest.raises(PySparkException, match="the sink is gone"):
        collected.drain(failing=True)
    log.commit(insert(ORDERS, id=3))
    collected.drain()
    assert collected.ids == {"earliest": [0, 1, 2, 3], "latest": [3]}[starting]


def test_first_batch_begins_where_it_began_at_first(tmp_path: Path) -> None:
    """A stream from the log's end: changes that come while it starts are part of its first batch."""
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(ORDERS, id=0))
    process = Restarted(log, startingOffsets="latest")
    reader = process.begin()
    initial = reader.initialOffset()
    log.commit(insert(ORDERS, id=1))
    end = reader.latestOffset()
    assert (initial["offset"], end["offset"]) == (1, 2)
    log.commit(insert(ORDERS, id=2))
    reader = process.restart(end)
    assert reader.initialOffset() == initial
    assert [row for part in reader.partitions(initial, end) for batch in reader.read(part) for row in ids(batch)] == [1]
    assert reader.latestOffset() == {**end, "offset": 3}
    assert process.restart(reader.latestOffset()).latestOffset() == reader.latestOffset()  # no batch without news


def ids(batch: pa.RecordBatch) -> list[int]:
    numbers: list[int] = batch.column("id").to_pylist()
    return numbers


def test_checkpoint_of_another_log_is_refused(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    log.commit(insert(ORDERS, id=1))
    Collected(spark, log, tmp_path / "checkpoint").drain()
    other = WrittenLog(tmp_path / "other")
    other.commit(insert(ORDERS, id=1), insert(ORDERS, id=2))
    with pytest.raises(PySparkException, match="belongs to another log"):
        Collected(spark, other, tmp_path / "checkpoint").drain()


def test_stream_batches_end_with_transactions(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    for start in range(0, 9, 3):
        log.commit(*(insert(ORDERS, id=start + place) for place in range(3)))
    collected = Collected(spark, log, tmp_path / "checkpoint", maxRowsPerTrigger="4")
    collected.drain()
    assert [batch for batch in collected.batches if batch] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    log.commit(insert(ORDERS, id=9))
    log.commit(*(insert(ORDERS, id=number) for number in (10, 11, 12, 13, 14)))
    log.commit(insert(ORDERS, id=15))
    collected.batches.clear()
    collected.drain()
    assert [batch for batch in collected.batches if batch] == [[9], [10, 11, 12, 13, 14], [15]]


def test_stream_batches_end_with_transactions_within_a_limit_of_bytes(
    spark: SparkSession, log: WrittenLog, tmp_path: Path
) -> None:
    for number in range(3):
        log.commit(insert(ORDERS, id=number, body="x" * 10_000))
    collected = Collected(spark, log, tmp_path / "checkpoint", maxBytesPerTrigger="1")
    collected.drain()
    assert [batch for batch in collected.batches if batch] == [[0], [1], [2]]


def test_limit_that_cuts_a_batch_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With availableNow, Spark 4.1 ends the query there."""
    log = WrittenLog(tmp_path / "log")
    for number in range(3):
        log.commit(insert(ORDERS, id=number))
    reader = Restarted(log, maxRowsPerTrigger="1").begin()
    start, end = reader.initialOffset(), reader.latestOffset()
    reader.partitions(start, end)
    assert reader.latestOffset()["offset"] == 2
    assert [record.getMessage()[:35] for record in caplog.records] == ["this batch ends at offset 1 of 3 (m"]
    caplog.clear()
    assert Restarted(log, maxRowsPerTrigger="3").begin().latestOffset()["offset"] == 3
    assert caplog.records == []

"""Ranges that are not, or no longer, in the log: refused or passed over; and retention that waits for a named query."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgtide.errors import ConfigurationError, LogRangeError
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, readers, remove
from pgtide.spark import register
from tests.spark.logs import WrittenLog, insert
from tests.spark.reading import ITEMS, ORDERS, Collected, Restarted, batch_ids, in_order, read
from tests.waiting import wait_for


@pytest.fixture
def short_segments(tmp_path: Path, spark: SparkSession) -> WrittenLog:
    """A log with one transaction per segment."""
    register(spark)
    return WrittenLog(tmp_path / "short", segment_bytes=1)


def test_rows_that_retention_took_are_an_error_or_passed_over(spark: SparkSession, short_segments: WrittenLog) -> None:
    log = short_segments
    for number in range(4):
        log.commit(insert(ORDERS, id=number))
    remove(log.path, plan_removal(log.path, retention_s=0, max_bytes=0))
    first = LogReader(log.path).first_offset()
    assert first > 0
    with pytest.raises(PySparkException, match="retention removed them"):
        read(spark, log, startingOffsets="0").collect()
    kept = in_order(read(spark, log, startingOffsets="0", failOnDataLoss="false"))
    assert [row["_offset"] for row in kept] == list(range(first, 4))


@pytest.fixture
def pruned(tmp_path: Path) -> WrittenLog:
    """Offsets below 4 are gone; they were orders.  Of items and of orders one change is left."""
    log = WrittenLog(tmp_path / "pruned", segment_bytes=1)
    for number in range(4):
        log.commit(insert(ORDERS, id=number))
    log.commit(insert(ITEMS, id=4))
    log.commit(insert(ORDERS, id=5))
    removal = plan_removal(log.path, retention_s=0, max_bytes=0)
    keeping = replace(removal, segments=removal.segments[:4], end_offset=4)
    remove(log.path, keeping)
    assert LogReader(log.path).first_offset() == 4
    return log


# The first transaction that is left ended at LSN 0/258, 600 µs into the day.
@pytest.mark.parametrize("start", ["0", "0/1", "2001-01-01", "2026-01-01T00:00:00.000500Z", "0/1F3"])
def test_start_that_retention_took_is_an_error_or_passed_over_in_whatever_way_it_is_named(
    pruned: WrittenLog, start: str
) -> None:
    with pytest.raises(LogRangeError, match="retention removed them"):
        batch_ids(pruned, startingOffsets=start)
    assert batch_ids(pruned, startingOffsets=start, failOnDataLoss="false") == [5]
    assert batch_ids(pruned, "public.items", startingOffsets=start) == [4]  # it has lost nothing


@pytest.mark.parametrize("start", ["4", "0/1F4", "2026-01-01T00:00:00.000600Z", "earliest"])
def test_start_at_what_retention_left_is_none_of_its_losses(pruned: WrittenLog, start: str) -> None:
    assert batch_ids(pruned, startingOffsets=start) == [5]


def test_stream_whose_changes_retention_took_fails_or_goes_on(
    spark: SparkSession, pruned: WrittenLog, tmp_path: Path
) -> None:
    register(spark)
    for number, start in enumerate(("0", "2001-01-01")):
        checkpoint = tmp_path / f"checkpoint{number}"
        with pytest.raises(PySparkException, match="retention removed them"):
            Collected(spark, pruned, checkpoint, startingOffsets=start).drain()
        collected = Collected(spark, pruned, checkpoint, startingOffsets=start, failOnDataLoss="false")
        collected.drain()
        assert collected.ids == [5]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingOffsets": "999"}, r'startingOffsets is 999, .* has offsets 4 to 6 .*\n.*"startingOffsets", "6"'),
        ({"endingOffsets": "7"}, "endingOffsets is 7, .* has offsets 4 to 6"),
        ({"startingOffsets": "0/2BD"}, r"startingOffsets is 0/2BD, .* only come to 0/2BC(.|\n)*Wait until"),
        ({"endingOffsets": "FF/0"}, "endingOffsets is FF/0, .* only come to 0/2BC"),
        ({"startingOffsets": "6", "endingOffsets": "5"}, "startingOffsets stands for offset 6, endingOffsets for 5"),
    ],
)
def test_range_that_is_not_in_the_log_is_refused(pruned: WrittenLog, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        batch_ids(pruned, **options)
    assert batch_ids(pruned, startingOffsets="6", endingOffsets="6") == []
    assert batch_ids(pruned, startingOffsets="0/2BC") == [], "the log has just come to it"


def test_stream_that_would_begin_beyond_the_log_is_refused(pruned: WrittenLog) -> None:
    with pytest.raises(ConfigurationError, match="startingOffsets is 999"):
        Restarted(pruned, startingOffsets="999").begin().initialOffset()


def test_checkpoint_beyond_the_log_is_refused_with_what_may_have_happened(pruned: WrittenLog) -> None:
    reader = Restarted(pruned).begin()
    end = reader.latestOffset()
    with pytest.raises(LogRangeError, match=r"checkpoint is at offset 9, .* ends at 6(.|\n)*new checkpointLocation"):
        reader.partitions({**end, "offset": 9}, end)


def test_retention_waits_for_a_named_query(spark: SparkSession, short_segments: WrittenLog, tmp_path: Path) -> None:
    """Until its batch is committed; of which a listener hears, also when it was the last one."""
    log = short_segments
    for number in range(3):
        log.commit(insert(ORDERS, id=number))
    collected = Collected(spark, log, tmp_path / "checkpoint", readerName="totals")
    with pytest.raises(PySparkException, match="the sink is gone"):
        collected.drain(failing=True)
    log.commit(insert(ORDERS, id=3))
    removal = plan_removal(log.path, retention_s=0, max_bytes=0)
    assert (removal.end_offset, removal.losers) == (0, ())  # the query will begin its first batch again
    collected.drain()
    wait_for(lambda: needed(log) == [("totals", 4)], what="the end of the last batch to be recorded")
    log.commit(insert(ORDERS, id=4))
    assert plan_removal(log.path, retention_s=0, max_bytes=0).end_offset == 4
    Collected(spark, log, tmp_path / "nameless").drain()
    assert needed(log) == [("totals", 4)]


def test_restart_does_not_give_up_what_the_batch_that_died_still_needs(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log")
    for number in range(2):
        log.commit(insert(ORDERS, id=number))
    process = Restarted(log, readerName="totals")
    reader = process.begin()
    start, end = reader.initialOffset(), reader.latestOffset()
    reader.partitions(start, end)
    reader = process.restart(end)
    assert needed(log) == [("totals", 0)]
    log.commit(insert(ORDERS, id=2))
    reader.partitions(end, reader.latestOffset())
    assert needed(log) == [("totals", 2)]


def needed(log: WrittenLog) -> list[tuple[str, int]]:
    return [(reader.name, reader.offset) for reader in readers(log.path)]

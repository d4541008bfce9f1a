"""The data source: a table's changes as typed rows, in order, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from pgtide.schema import Column, TableShape
from pgtide.spark import register
from tests.spark.logs import BEGINNING, INT8, WrittenLog, delete, insert, table_shape, truncate, update

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500)


@pytest.fixture
def log(tmp_path: Path, spark: SparkSession) -> WrittenLog:
    register(spark)
    return WrittenLog(tmp_path / "log")


def read(spark: SparkSession, log: WrittenLog, table: str = "public.orders", **options: Any) -> DataFrame:
    return spark.read.format("pgtide").options(path=str(log.path), table=table, **options).load()


def in_order(frame: DataFrame) -> list[Row]:
    return sorted(frame.collect(), key=lambda row: (row["_offset"], row["_change_type"] != "update_preimage"))


def test_batch_has_typed_columns_and_what_happened(spark: SparkSession, log: WrittenLog) -> None:
    log.commit(insert(ITEMS, id=5), insert(ORDERS, id=1, region="n", amount=3, body="b"))
    log.commit(
        update(ORDERS, unchanged=["body"], old_key={"id": 1}, id=2, amount=4), delete(ORDERS, id=2), truncate(ORDERS)
    )
    frame = read(spark, log)
    assert [f"{field.name} {field.dataType.simpleString()}" for field in frame.schema] == [
        "id bigint",
        "region string",
        "amount int",
        "body string",
        "_change_type string",
        "_offset bigint",
        "_commit_version bigint",
        "_commit_timestamp timestamp",
        "_xid bigint",
        "_unchanged array<string>",
    ]
    rows = in_order(frame)
    assert [(row["_offset"], row["_change_type"], row["id"], row["amount"], row["_unchanged"]) for row in rows] == [
        (1, "insert", 1, 3, []),
        (2, "update_postimage", 2, 4, ["body"]),
        (3, "delete", 2, None, []),
        (4, "truncate", None, None, []),
    ]
    assert [row["_commit_version"] for row in rows] == [192, 292, 292, 292]
    assert rows[0]["_xid"] == 200
    assert rows[0]["_commit_timestamp"].timestamp() == pytest.approx(BEGINNING.timestamp() + 200e-6)


def test_preimages_come_before_their_postimages_under_one_offset(spark: SparkSession, log: WrittenLog) -> None:
    log.commit(insert(ORDERS, id=1), update(ORDERS, old_key={"id": 1}, id=2), update(ORDERS, id=2, amount=1))
    rows = in_order(read(spark, log, includePreimage="true"))
    assert [(row["_offset"], row["_change_type"], row["id"]) for row in rows] == [
        (0, "insert", 1),
        (1, "update_preimage", 1),
        (1, "update_postimage", 2),
        (2, "update_postimage", 2),
    ]


def test_range_is_read_by_offset_and_by_lsn(spark: SparkSession, log: WrittenLog) -> None:
    for number in range(5):
        log.commit(insert(ORDERS, id=number))
    assert [row["id"] for row in in_order(read(spark, log, startingOffsets="1", endingOffsets="3"))] == [1, 2]
    assert [row["id"] for row in in_order(read(spark, log, startingOffsets="0/12C"))] == [2, 3, 4]
    assert read(spark, log, startingOffsets="latest").count() == 0


def test_rows_of_an_earlier_shape_are_padded(spark: SparkSession, log: WrittenLog) -> None:
    later = TableShape(16384, "public", "orders", "d", (*ORDERS.columns, Column(9, "vat", INT8)))
    log.commit(insert(ORDERS, id=1))
    log.commit(insert(later, id=2, vat=19))
    assert [(row["id"], row["vat"]) for row in in_order(read(spark, log))] == [(1, None), (2, 19)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "public.nothing"}, "Tables in it: public.orders"),
        ({"startingOffset": "1"}, "Valid options: path, table, startingOffsets"),
        ({"startingOffsets": "soon"}, "Valid values: earliest, latest"),
        ({"maxRowsPerTrigger": "0"}, "a number of rows from 1 on"),
        ({"includePreimage": "yes"}, "Valid values: true, false"),
    ],
)
def test_wrong_option_is_refused_naming_what_is_valid(
    spark: SparkSession, log: WrittenLog, options: dict[str, str], says: str
) -> None:
    log.commit(insert(ORDERS, id=1))
    with pytest.raises(PySparkException, match=says):
        read(spark, log, **options)


class Collected:
    """A stream that puts its rows into a memory table, stopped and started on one checkpoint."""

    def __init__(self, spark: SparkSession, log: WrittenLog, checkpoint: Path, **options: Any) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._stream = (
            spark.readStream.format("pgtide").options(path=str(log.path), table="public.orders", **options).load()
        )
        self.batches: list[list[int]] = []

    def drain(self) -> None:
        def keep(frame: DataFrame, _: int) -> None:
            self.batches.append([row["id"] for row in in_order(frame)])

        writer = self._stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(self._checkpoint))
        query = writer.start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()


def test_stream_gives_each_change_once_over_a_restart(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    log.commit(insert(ORDERS, id=1), insert(ITEMS, id=9))
    log.commit(insert(ORDERS, id=2))
    collected = Collected(spark, log, tmp_path / "checkpoint")
    collected.drain()
    assert [number for batch in collected.batches for number in batch] == [1, 2]
    log.commit(insert(ORDERS, id=3))
    collected.drain()
    assert [number for batch in collected.batches for number in batch] == [1, 2, 3]


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


def test_checkpoint_of_another_log_is_refused(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    log.commit(insert(ORDERS, id=1))
    Collected(spark, log, tmp_path / "checkpoint").drain()
    other = WrittenLog(tmp_path / "other")
    other.commit(insert(ORDERS, id=1), insert(ORDERS, id=2))
    with pytest.raises(PySparkException, match="belongs to another log"):
        Collected(spark, other, tmp_path / "checkpoint").drain()


def test_spark_finds_the_source_without_registration() -> None:
    import pyspark_pgtide

    assert pyspark_pgtide.DefaultSource.name() == "pgtide"

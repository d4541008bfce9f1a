"""The data source: a table's changes as typed rows, in order, each once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from pgtide.errors import TableError
from pgtide.schema import Column, TableShape
from tests.spark.logs import BEGINNING, INT8, WrittenLog, delete, insert, truncate, update
from tests.spark.reading import ITEMS, ORDERS, batch_rows, in_order, read


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


@pytest.mark.parametrize(("envelope", "row"), [("changes", None), ("debezium", "after")])
def test_unchanged_value_of_a_column_that_is_dropped_later_is_not_named(
    tmp_path: Path, envelope: str, row: str | None
) -> None:
    log = WrittenLog(tmp_path / "log")
    without_body = replace(ORDERS, columns=ORDERS.columns[:3])
    log.commit(insert(ORDERS, id=1, body="long"), update(ORDERS, unchanged=["body"], id=1, amount=2))
    log.commit(update(without_body, id=1, amount=3))
    found = [
        read_row if row is None else {**read_row[row], **read_row} for read_row in batch_rows(log, envelope=envelope)
    ]
    assert [(change["amount"], change["_unchanged"]) for change in found] == [(None, []), (2, []), (3, [])]


@pytest.mark.parametrize("envelope", ["changes", "debezium"])
def test_values_that_do_not_fit_a_changed_type_are_told_with_what_to_do(tmp_path: Path, envelope: str) -> None:
    log = WrittenLog(tmp_path / "log")
    key, region, *others = ORDERS.columns
    as_numbers = replace(ORDERS, columns=(key, replace(region, type=INT8), *others))
    log.commit(insert(ORDERS, id=1, region="12"), insert(ORDERS, id=2, region="north"))
    log.commit(insert(ITEMS, id=9), insert(ORDERS, id=3, region="south"))
    log.commit(insert(as_numbers, id=4, region=40))
    with pytest.raises(TableError) as told:
        batch_rows(log, envelope=envelope)
    assert told.value.what.startswith("public.orders at offset 0: column region is text (string) there, and is read as")
    assert "int8 (int64): Failed to parse string: 'north'" in told.value.what
    assert '"endingOffsets", "4"' in told.value.remedy
    assert '"startingOffsets", "4"' in told.value.remedy

    def regions(**options: str) -> list[Any]:
        rows = batch_rows(log, envelope=envelope, **options)
        return [(row["after"] if envelope == "debezium" else row)["region"] for row in rows]

    assert regions(endingOffsets="4") == ["12", "north", "south"]  # the types that the table had then
    assert regions(startingOffsets="4") == [40]
    assert regions(startingOffsets="0", endingOffsets="0/C8") == ["12", "north"]


class Registered(DataSource):
    """A source that only the session knows in which it is registered."""

    @classmethod
    def name(cls) -> str:
        return "registered"


def test_spark_finds_the_source_without_registration(spark: SparkSession, log: WrittenLog) -> None:
    """In a new session, which knows nothing of what is registered in the one that tests share."""
    log.commit(insert(ORDERS, id=7))
    spark.dataSource.register(Registered)
    fresh = spark.newSession()
    with pytest.raises(Py4JJavaError, match="DATA_SOURCE_NOT_FOUND"):
        fresh.read.format("registered").load()
    assert [row["id"] for row in read(fresh, log).collect()] == [7]


def test_range_is_read_by_time(spark: SparkSession, log: WrittenLog) -> None:
    """Transactions of this log are committed 100 µs apart, the first at 200 µs."""
    for number in range(5):
        log.commit(insert(ORDERS, id=number))
    day = BEGINNING.date().isoformat()
    between = read(spark, log, startingOffsets=f"{day}T00:00:00.000300", endingOffsets=f"{day} 01:00:00.0005+01:00")
    assert [row["id"] for row in in_order(between)] == [1, 2]
    assert read(spark, log, startingOffsets="2001-01-01").count() == 5
    assert read(spark, log, startingOffsets="2091-01-01").count() == 0


def test_one_block_is_read_by_several_tasks_when_asked_for(spark: SparkSession, log: WrittenLog) -> None:
    log.commit(*(insert(ORDERS, id=number) for number in range(10)))
    frame = read(spark, log, minPartitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert [row["id"] for row in in_order(frame)] == list(range(10))

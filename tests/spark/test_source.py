"""The data source: a table's changes as typed rows, in order, each once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import ArrayType, LongType, StructField, StructType, TimestampType

from pgtide.errors import ConfigurationError, LogRangeError, TableError
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, readers, remove
from pgtide.schema import Column, TableShape
from pgtide.spark import register
from pgtide.spark.rows import arrow_schema, frame_of
from pgtide.spark.source import PgtideSource
from pgtide.types import PgType
from tests.spark.logs import BEGINNING, INT8, WrittenLog, delete, insert, table_shape, truncate, update
from tests.waiting import wait_for

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


@pytest.mark.parametrize(("envelope", "row"), [("changes", None), ("debezium", "after")])
def test_unchanged_value_of_a_column_that_is_dropped_later_is_not_named(
    tmp_path: Path, envelope: str, row: str | None
) -> None:
    log = WrittenLog(tmp_path / "log")
    without_body = replace(ORDERS, columns=ORDERS.columns[:3])
    log.commit(insert(ORDERS, id=1, body="long"), update(ORDERS, unchanged=["body"], id=1, amount=2))
    log.commit(update(without_body, id=1, amount=3))
    found = [read_row if row is None else {**read_row[row], **read_row} for read_row in batch(log, envelope=envelope)]
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
        batch(log, envelope=envelope)
    assert told.value.what.startswith("public.orders at offset 0: column region is text (string) there, and is read as")
    assert "int8 (int64): Failed to parse string: 'north'" in told.value.what
    assert '"endingOffsets", "4"' in told.value.remedy
    assert '"startingOffsets", "4"' in told.value.remedy

    def regions(**options: str) -> list[Any]:
        rows = batch(log, envelope=envelope, **options)
        return [(row["after"] if envelope == "debezium" else row)["region"] for row in rows]

    assert regions(endingOffsets="4") == ["12", "north", "south"]  # the types that the table had then
    assert regions(startingOffsets="4") == [40]
    assert regions(startingOffsets="0", endingOffsets="0/C8") == ["12", "north"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "public.nothing"}, "Tables in it: public.orders"),
        ({"startingOffset": "1"}, "Valid options: path, table, envelope, startingOffsets"),
        ({"envelope": "avro"}, "Valid values: changes, debezium"),
        ({"envelope": "debezium", "includePreimage": "true"}, "`before` has the old row"),
        ({"json": "bson"}, "Valid values: string, variant"),
        ({"decimals": "decimal(50,2)"}, "decimal\\(38,18\\)"),
        ({"maxBytesPerTrigger": "1.5"}, "a number of bytes from 1 on"),
        ({"minPartitions": "-1"}, "a number of partitions from 1 on"),
        ({"failOnDataLoss": "no"}, "Valid values: true, false"),
        ({"readerName": "a/b"}, "letters, digits"),
        ({"readerName": "mirror"}, "Choose another name"),
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


@pytest.mark.parametrize(
    ("option", "value"), [("maxRowsPerTrigger", "5"), ("maxBytesPerTrigger", "5"), ("readerName", "totals")]
)
def test_option_that_does_nothing_in_a_batch_read_is_refused(tmp_path: Path, option: str, value: str) -> None:
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(ORDERS, id=1))
    with pytest.raises(ConfigurationError, match=rf"{option} belongs to streams(.|\n)*Leave {option} out"):
        batch(log, **{option: value})


def test_ending_offsets_are_refused_in_a_stream_and_whatever_they_are(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(ORDERS, id=1))
    for end in ("latest", "1"):
        with pytest.raises(ConfigurationError, match="endingOffsets belongs to batch reads"):
            Restarted(log, endingOffsets=end).begin()


class Collected:
    """A stream that puts its rows into a memory table, stopped and started on one checkpoint."""

    def __init__(self, spark: SparkSession, log: WrittenLog, checkpoint: Path, **options: Any) -> None:
        self._spark = spark
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


def test_stream_gives_each_change_once_over_a_restart(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    log.commit(insert(ORDERS, id=1), insert(ITEMS, id=9))
    log.commit(insert(ORDERS, id=2))
    collected = Collected(spark, log, tmp_path / "checkpoint")
    collected.drain()
    assert [number for batch in collected.batches for number in batch] == [1, 2]
    log.commit(insert(ORDERS, id=3))
    collected.drain()
    assert [number for batch in collected.batches for number in batch] == [1, 2, 3]


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
        assert [number for batch in collected.batches for number in batch] == again


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


def test_restart_does_not_give_up_what_the_batch_that_died_still_needs(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log")
    for number in range(2):
        log.commit(insert(ORDERS, id=number))
    process = Restarted(log, readerName="totals")
    reader = process.begin()
    start, end = reader.initialOffset(), reader.latestOffset()
    reader.partitions(start, end)
    reader = process.restart(end)
    assert [(needs.name, needs.offset) for needs in readers(log.path)] == [("totals", 0)]
    log.commit(insert(ORDERS, id=2))
    reader.partitions(end, reader.latestOffset())
    assert [(needs.name, needs.offset) for needs in readers(log.path)] == [("totals", 2)]


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


def test_checkpoint_of_another_log_is_refused(spark: SparkSession, log: WrittenLog, tmp_path: Path) -> None:
    log.commit(insert(ORDERS, id=1))
    Collected(spark, log, tmp_path / "checkpoint").drain()
    other = WrittenLog(tmp_path / "other")
    other.commit(insert(ORDERS, id=1), insert(ORDERS, id=2))
    with pytest.raises(PySparkException, match="belongs to another log"):
        Collected(spark, other, tmp_path / "checkpoint").drain()


_FRESH_SESSION = """
import sys
from pgtide import local
from tests.conftest import QUICK_JVM
spark = local.spark(warehouse=sys.argv[1], **QUICK_JVM)
frame = spark.read.format("pgtide").option("path", sys.argv[2]).option("table", "public.orders").load()
print("found", [row.id for row in frame.collect()])
"""


def test_spark_finds_the_source_without_registration(tmp_path: Path) -> None:
    """In a session of its own: the one that tests share has it registered."""
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(ORDERS, id=7))
    command = [sys.executable, "-c", _FRESH_SESSION, str(tmp_path / "lake"), str(log.path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert "found [7]" in ended.stdout, ended.stderr


EVENTS = TableShape(
    16700, "public", "events", "f", (Column(1, "id", INT8, key=True), Column(2, "document", PgType(3802, "jsonb")))
)


def read_all(spark: SparkSession, log: WrittenLog, **options: Any) -> DataFrame:
    return spark.read.format("pgtide").options(path=str(log.path), **options).load()


def by_offset(frame: DataFrame) -> list[Row]:
    return sorted(frame.collect(), key=lambda row: row["_offset"])


def all_kinds(log: WrittenLog) -> None:
    log.commit(insert(ITEMS, id=5, region='a "quoted"\n'), insert(ORDERS, id=1, amount=3, body="b"))
    log.commit(update(ORDERS, unchanged=["body"], old_key={"id": 1}, id=2, amount=4), delete(ORDERS, id=2))
    log.commit(truncate(ITEMS))


def test_all_tables_come_in_one_form(spark: SparkSession, log: WrittenLog) -> None:
    all_kinds(log)
    frame = read_all(spark, log)
    assert [field.name for field in frame.schema][:4] == ["table", "key", "before", "after"]
    empty = {"region": None, "amount": None, "body": None}
    assert [
        (
            row["table"],
            row["_change_type"],
            *(row[name] and json.loads(row[name]) for name in ("key", "before", "after")),
        )
        for row in by_offset(frame)
    ] == [
        ("public.items", "insert", {"id": 5}, None, {**empty, "id": 5, "region": 'a "quoted"\n'}),
        ("public.orders", "insert", {"id": 1}, None, {**empty, "id": 1, "amount": 3, "body": "b"}),
        ("public.orders", "update_postimage", {"id": 2}, {"id": 1}, {"id": 2, "region": None, "amount": 4}),
        ("public.orders", "delete", {"id": 2}, {"id": 2}, None),
        ("public.items", "truncate", None, None, None),
    ]


def test_documents_can_be_variants(spark: SparkSession, log: WrittenLog) -> None:
    all_kinds(log)
    frame = read_all(spark, log, json="variant")
    found = frame.selectExpr("_offset", "variant_get(after, '$.amount', 'int') amount", "after IS NULL gone")
    assert [(row["amount"], row["gone"]) for row in by_offset(found)] == [
        (None, False), (3, False), (4, False), (None, True), (None, True),
    ]  # fmt: skip


def test_json_columns_can_be_variants(spark: SparkSession, log: WrittenLog) -> None:
    log.commit(insert(EVENTS, id=1, document='{"a": [1, {"b": "ü"}], "c": 1.50}'), insert(EVENTS, id=2))
    frame = read(spark, log, "public.events", json="variant")
    assert frame.schema["document"].dataType.simpleString() == "variant"
    taken = frame.selectExpr("_offset", "variant_get(document, '$.a[1].b', 'string') b", "document IS NULL gone")
    assert [(row["b"], row["gone"]) for row in by_offset(taken)] == [("ü", False), (None, True)]


def test_debezium_s_form_is_typed_for_one_table(spark: SparkSession, log: WrittenLog) -> None:
    all_kinds(log)
    rows = by_offset(read(spark, log, envelope="debezium"))
    assert [
        (row["op"], row["before"] and row["before"]["id"], row["after"] and row["after"]["id"]) for row in rows
    ] == [
        ("c", None, 1),
        ("u", 1, 2),
        ("d", 2, None),
    ]
    assert rows[1]["after"]["amount"] == 4
    assert (rows[1]["after"]["body"], rows[1]["_unchanged"]) == (None, ["body"])
    source, first = rows[0]["source"], rows[0]
    assert (source["connector"], source["db"], source["schema"], source["table"]) == (
        "postgresql", "shop", "public", "orders",
    )  # fmt: skip
    assert (source["txId"], source["lsn"], first["ts_ms"]) == (200, 192, int(BEGINNING.timestamp() * 1000))
    assert [(row["transaction"]["id"], row["transaction"]["total_order"]) for row in rows] == [
        ("200:192", 2), ("300:292", 1), ("300:292", 2),
    ]  # fmt: skip


def test_debezium_s_form_holds_documents_for_all_tables(spark: SparkSession, log: WrittenLog) -> None:
    all_kinds(log)
    rows = by_offset(read_all(spark, log, envelope="debezium"))
    assert [(row["source"]["table"], row["op"]) for row in rows] == [
        ("items", "c"), ("orders", "c"), ("orders", "u"), ("orders", "d"), ("items", "t"),
    ]  # fmt: skip
    assert json.loads(rows[3]["before"]) == {"id": 2}


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


def test_stream_batches_end_with_transactions_within_a_limit_of_bytes(
    spark: SparkSession, log: WrittenLog, tmp_path: Path
) -> None:
    for number in range(3):
        log.commit(insert(ORDERS, id=number, body="x" * 10_000))
    collected = Collected(spark, log, tmp_path / "checkpoint", maxBytesPerTrigger="1")
    collected.drain()
    assert [batch for batch in collected.batches if batch] == [[0], [1], [2]]


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


def planned(log: WrittenLog, table: str = "public.orders", **options: str) -> list[int]:
    """The ids that a batch read of the table gives, without Spark."""
    return [row["id"] for row in batch(log, table, **options)]


def batch(log: WrittenLog, table: str = "public.orders", **options: str) -> list[dict[str, Any]]:
    """What a batch read of the table gives, without Spark."""
    source = PgtideSource({"path": str(log.path), "table": table, **options})
    reader: Any = source.reader(source.schema())
    return [row for part in reader.partitions() for rows in reader.read(part) for row in rows.to_pylist()]


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
        planned(pruned, startingOffsets=start)
    assert planned(pruned, startingOffsets=start, failOnDataLoss="false") == [5]
    assert planned(pruned, "public.items", startingOffsets=start) == [4]  # it has lost nothing


@pytest.mark.parametrize("start", ["4", "0/1F4", "2026-01-01T00:00:00.000600Z", "earliest"])
def test_start_at_what_retention_left_is_none_of_its_losses(pruned: WrittenLog, start: str) -> None:
    assert planned(pruned, startingOffsets=start) == [5]


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
        ({"startingOffsets": "6", "endingOffsets": "5"}, "startingOffsets stands for offset 6, endingOffsets for 5"),
    ],
)
def test_range_that_is_not_in_the_log_is_refused(pruned: WrittenLog, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        planned(pruned, **options)
    assert planned(pruned, startingOffsets="6", endingOffsets="6") == []


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


def needed(log: WrittenLog) -> list[tuple[str, int]]:
    return [(reader.name, reader.offset) for reader in readers(log.path)]


def test_an_empty_chunk_in_the_middle_loses_no_rows(spark: SparkSession) -> None:
    schema = StructType([StructField("number", LongType())])
    chunks = [pa.table({"number": pa.array(numbers, pa.int64())}) for numbers in ([1, 2], [], [3])]
    assert sorted(row["number"] for row in frame_of(spark, pa.concat_tables(chunks), schema).collect()) == [1, 2, 3]


def test_no_rows_are_a_frame_too(spark: SparkSession) -> None:
    schema = StructType([StructField("times", ArrayType(TimestampType()))])
    assert frame_of(spark, arrow_schema(schema).empty_table(), schema).schema == schema

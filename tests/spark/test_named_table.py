"""A table that is read by its name is all the relations that have had the name, each for its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from pgtide.errors import LogRangeError, TableError
from pgtide.log.retention import plan_removal, remove
from pgtide.schema import Column
from pgtide.spark import register
from pgtide.spark.source import PgtideSource
from tests.capture.running import capturing, configuration, wait_until_captured
from tests.database import Database
from tests.spark.logs import INT8, TEXT, WrittenLog, insert, table_shape, update

ORDERS = table_shape()
# Created again: another relation, with the same columns under other attribute numbers.
AGAIN = replace(
    table_shape(oid=20000), columns=tuple(replace(column, attnum=column.attnum + 4) for column in ORDERS.columns)
)
WITH_VAT = replace(AGAIN, columns=(*AGAIN.columns, Column(9, "vat", INT8)))
UNLIKE = replace(AGAIN, columns=(Column(1, "uuid", TEXT, key=True), Column(2, "note", TEXT)))


@pytest.fixture
def log(tmp_path: Path) -> WrittenLog:
    return WrittenLog(tmp_path / "log", segment_bytes=1)


def source(log: WrittenLog | Path, **options: str) -> PgtideSource:
    path = log if isinstance(log, Path) else log.path
    return PgtideSource({"path": str(path), "table": "public.orders", **options})


def stream(log: WrittenLog, **options: str) -> DataSourceStreamReader:
    """The process that Spark keeps for a stream."""
    made = source(log, **options)
    return made.streamReader(made.schema())


def planned(log: WrittenLog | Path, *columns: str, **options: str) -> list[Any]:
    """What a batch read gives."""
    made = source(log, **options)
    reader = made.reader(made.schema())
    return [row for part in reader.partitions() for row in rows(reader, part, columns or ("id",))]


def rows(reader: Any, part: InputPartition, columns: tuple[str, ...]) -> list[Any]:
    found = pa.Table.from_batches(reader.read(part)).select(columns).to_pylist() if part.slices else []  # type: ignore[attr-defined]
    return [row[columns[0]] if len(columns) == 1 else tuple(row.values()) for row in found]


def streamed(reader: DataSourceStreamReader, start: int, end: int) -> list[int]:
    at = reader.initialOffset()
    parts = reader.partitions({**at, "offset": start}, {**at, "offset": end})
    return [row for part in parts for row in rows(reader, part, ("id",))]


def test_stream_goes_on_with_a_table_that_is_created_again(log: WrittenLog) -> None:
    first = log.commit(insert(ORDERS, id=1))
    running = stream(log)
    assert streamed(running, 0, first) == [1]
    log.commit(insert(ORDERS, id=2), insert(AGAIN, id=3))
    end = log.commit(insert(AGAIN, id=4))
    assert streamed(running, first, end) == [2, 3, 4]
    assert streamed(stream(log), first, end) == [2, 3, 4]  # started anew, it plans the batch again
    assert planned(log) == [1, 2, 3, 4]


def test_tables_that_swap_their_names_are_each_the_table_for_their_time(log: WrittenLog) -> None:
    filling, old = replace(AGAIN, name="orders_new"), replace(ORDERS, name="orders_old")
    first = log.commit(insert(ORDERS, id=1), insert(filling, id=1))
    running = stream(log)
    assert streamed(running, 0, first) == [1]
    log.commit(insert(ORDERS, id=2), insert(filling, id=2))
    log.commit(insert(old, id=-3), insert(AGAIN, id=3))
    end = log.commit(insert(old, id=-4), insert(AGAIN, id=4))
    assert streamed(running, first, end) == [2, 3, 4]
    assert streamed(stream(log), first, end) == [2, 3, 4]
    assert planned(log) == [1, 2, 3, 4]
    assert planned(log, startingOffsets="0", endingOffsets=str(first)) == [1]
    assert planned(log, table="public.orders_old") == [1, 2, -3, -4]  # no other relation has had that name


def test_postgres_says_when_a_name_goes_to_another_relation(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE orders_new (note text, id int PRIMARY KEY)"
    )
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute(
            "INSERT INTO orders VALUES (1)",
            "INSERT INTO orders_new VALUES ('copied', 1)",
            "BEGIN; ALTER TABLE orders RENAME TO orders_old; ALTER TABLE orders_new RENAME TO orders; "
            "INSERT INTO orders VALUES ('swapped', 2); COMMIT",
            "INSERT INTO orders_old VALUES (-1)",
            "UPDATE orders SET note = 'changed' WHERE id = 1",
            "DROP TABLE orders",
            "CREATE TABLE orders (id int PRIMARY KEY, note text)",
            f"ALTER PUBLICATION {config.source.publication} ADD TABLE orders",
            "INSERT INTO orders VALUES (3, 'again')",
        )
        wait_until_captured(database, config)
    found = planned(Path(config.log_location), "id", "note", "_change_type")
    assert found == [
        (1, None, "insert"), (2, "swapped", "insert"), (1, "changed", "update_postimage"), (3, "again", "insert"),
    ]  # fmt: skip


def test_table_that_was_only_renamed_has_all_its_changes(log: WrittenLog) -> None:
    log.commit(insert(replace(ORDERS, name="drafts"), id=1))
    log.commit(insert(ORDERS, id=2))
    assert planned(log) == [1, 2]


def test_columns_of_the_earlier_table_are_found_by_name(log: WrittenLog) -> None:
    log.commit(insert(ORDERS, id=1, amount=10, body="x"), update(ORDERS, unchanged=["body"], id=1, amount=11))
    log.commit(insert(WITH_VAT, id=2, amount=20, vat=4), update(WITH_VAT, unchanged=["body"], id=2, amount=21, vat=5))
    assert planned(log, "id", "amount", "vat", "_unchanged") == [
        (1, 10, None, []), (1, 11, None, ["body"]), (2, 20, 4, []), (2, 21, 5, ["body"]),
    ]  # fmt: skip
    after = planned(log, "after", envelope="debezium")
    assert [(row["id"], row["amount"], row["vat"]) for row in after] == [
        (1, 10, None), (1, 11, None), (2, 20, 4), (2, 21, 5),
    ]  # fmt: skip


def test_new_columns_end_a_running_query_and_the_next_start_has_all_changes(
    spark: SparkSession, log: WrittenLog, tmp_path: Path
) -> None:
    register(spark)
    kept: list[tuple[int, ...]] = []

    def load() -> DataFrame:
        return spark.readStream.format("pgtide").options(path=str(log.path), table="public.orders").load()

    def drain(changes: DataFrame) -> None:
        def keep(batch: DataFrame, _: int) -> None:
            kept.extend(sorted(tuple(row) for row in batch.select("_offset", "id").collect()))

        query = changes.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "kept")).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    log.commit(insert(ORDERS, id=1))
    changes = load()
    drain(changes)
    log.commit(insert(ORDERS, id=2))
    log.commit(insert(WITH_VAT, id=3))
    with pytest.raises(PySparkException, match=r"another table from offset 2 on(.|\n)*does not have: vat"):
        drain(changes)
    log.commit(insert(WITH_VAT, id=4))
    drain(load())
    assert kept == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_table_with_nothing_in_common_is_read_up_to_its_end_and_the_next_from_there(log: WrittenLog) -> None:
    log.commit(insert(ORDERS, id=1))
    log.commit(insert(ORDERS, id=2))
    log.commit(insert(UNLIKE, uuid="a"))
    with pytest.raises(TableError, match=r'up to offset 2(.|\n)*"0"(.|\n)*"endingOffsets", "2"(.|\n)*"2", in a stream'):
        planned(log)
    assert planned(log, startingOffsets="0", endingOffsets="2") == [1, 2]
    assert planned(log, "uuid", startingOffsets="2") == ["a"]


def test_changes_that_retention_took_from_the_earlier_table_are_missed(log: WrittenLog) -> None:
    for number in range(2):
        log.commit(insert(ORDERS, id=number))
    log.commit(insert(AGAIN, id=2))
    log.commit(insert(AGAIN, id=3))
    removal = plan_removal(log.path, retention_s=0, max_bytes=0)
    remove(log.path, replace(removal, segments=removal.segments[:1], end_offset=1))
    with pytest.raises(LogRangeError, match="retention removed them"):
        planned(log, startingOffsets="0")
    assert planned(log, startingOffsets="0", failOnDataLoss="false") == [1, 2, 3]

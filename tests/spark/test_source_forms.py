"""The forms in which the data source gives changes: all tables in one, documents as variants, Debezium's."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from pgtide.schema import Column, TableShape
from pgtide.types import PgType
from tests.spark.logs import BEGINNING, INT8, WrittenLog, delete, insert, truncate, update
from tests.spark.reading import ITEMS, ORDERS, read

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

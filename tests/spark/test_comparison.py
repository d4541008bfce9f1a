"""The comparison of two frames finds what was planted, and nothing where nothing was."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pgtide.spark.comparison import EXAMPLES, Comparison, Difference, compare, comparison_from_json, is_cut, shown
from pgtide.spark.row_hash import VALUE_CHARACTERS
from pgtide.spark.rows import arrow_schema

COLUMNS = StructType().add("id", "long").add("a.b", "string").add("amount", "double").add("body", "string")
LONG = (3, None, None, "x" * 1000)
ROWS: list[tuple[Any, ...]] = [(1, "n", 0.0, "one"), (2, "", float("nan"), "two"), LONG]


def frame(spark: SparkSession, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    names = COLUMNS.names
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], arrow_schema(COLUMNS))
    return spark.createDataFrame(table, COLUMNS)


def compared(spark: SparkSession, mirror: Sequence[tuple[Any, ...]], key: Sequence[str] = ("id",)) -> Comparison:
    return compare(frame(spark, ROWS), frame(spark, mirror), COLUMNS, key)


def test_equal_rows_in_another_order_have_no_difference(spark: SparkSession) -> None:
    assert compared(spark, ROWS[::-1]) == Comparison(3, 3, missing=0, extra=0, differing=0)
    assert compared(spark, ROWS[::-1], key=()).equal


@pytest.mark.parametrize(
    ("mirror", "counts", "source_values", "mirror_values"),
    [
        pytest.param([*ROWS[:2], (3, None, 1.5, LONG[3])], (0, 0, 1), {"amount": None}, {"amount": "1.5"}, id="value"),
        pytest.param([*ROWS[:2], (3, "", None, LONG[3])], (0, 0, 1), {"a.b": None}, {"a.b": ""}, id="null and empty"),
        pytest.param([(1, "n", -0.0, "one"), *ROWS[1:]], (0, 0, 1), {"amount": "0.0"}, {"amount": "-0.0"}, id="zero"),
        pytest.param(ROWS[1:], (1, 0, 0), {"id": "1", "a.b": "n", "amount": "0.0", "body": "one"}, None, id="missing"),
        pytest.param(
            [*ROWS, (4, None, None, None)],
            (0, 1, 0),
            None,
            {"id": "4", "a.b": None, "amount": None, "body": None},
            id="extra",
        ),
        pytest.param(
            [*ROWS, ROWS[0]], (0, 1, 0), None, {"id": "1", "a.b": "n", "amount": "0.0", "body": "one"}, id="repeated"
        ),
    ],
)
def test_a_planted_difference_is_counted_and_shown(
    spark: SparkSession,
    mirror: list[tuple[Any, ...]],
    counts: tuple[int, int, int],
    source_values: dict[str, str | None] | None,
    mirror_values: dict[str, str | None] | None,
) -> None:
    found = compared(spark, mirror)
    assert (found.source_rows, found.mirror_rows) == (3, len(mirror))
    assert (found.missing, found.extra, found.differing) == counts
    assert [(example.source, example.mirror) for example in found.examples] == [(source_values, mirror_values)]
    assert comparison_from_json(found.to_json()) == found


def test_long_values_are_given_in_full_and_shown_where_they_differ(spark: SparkSession) -> None:
    (example,) = compared(spark, [*ROWS[:2], (3, None, None, "x" * 999 + "y")]).examples
    assert (example.source, example.mirror) == ({"body": "x" * 1000}, {"body": "x" * 999 + "y"})
    assert is_cut(example)
    told = "(characters 801 to 1,000 of 1,000)"
    assert shown(example) == (
        f"id = '3': the source has body = …'{'x' * 200}' {told}, the mirror has body = …'{'x' * 199}y' {told}"
    )


def test_values_beyond_all_measure_say_where_they_are_cut_and_still_differ(spark: SparkSession) -> None:
    ours, theirs = (
        spark.sql(f"SELECT 1 AS id, concat(repeat('x', {VALUE_CHARACTERS}), '{end}') AS body") for end in "ab"
    )
    (example,) = compare(ours, theirs, ours.schema, ["id"]).examples
    assert example.source is not None
    assert example.mirror is not None
    assert example.source["body"] != example.mirror["body"]
    for body in (example.source["body"] or "", example.mirror["body"] or ""):
        assert body.startswith(
            "x" * VALUE_CHARACTERS + "… (cut here: 65537 characters, the first 65536 are shown; md5 "
        )
    assert "md5" in shown(example)


def test_of_long_values_people_see_the_beginning_or_the_part_that_differs() -> None:
    middle = Difference("differing", {"id": "1"}, {"body": "x" * 500 + "a" * 500}, {"body": "x" * 500 + "b"})
    assert f"body = …'{'x' * 40}{'a' * 160}'… (characters 461 to 660 of 1,000)" in shown(middle)
    assert f"the mirror has body = …'{'x' * 199}b' (characters 302 to 501 of 501)" in shown(middle)
    missing = Difference("missing", {}, {"body": "x" * 1000, "n": None}, None)
    assert shown(missing) == f"only in the source: body = '{'x' * 200}'… (characters 1 to 200 of 1,000), n = NULL"
    short = Difference("differing", {"id": "1"}, {"body": "x" * 200}, {"body": None})
    assert shown(short) == f"id = '1': the source has body = '{'x' * 200}', the mirror has body = NULL"
    assert [is_cut(example) for example in (middle, missing, short)] == [True, True, False]


def test_without_a_key_rows_are_counted_as_a_multiset(spark: SparkSession) -> None:
    source, mirror = frame(spark, [ROWS[0]] * 5 + ROWS[1:]), frame(spark, [ROWS[0]] * 3 + [ROWS[1]] * 2)
    found = compare(source, mirror, COLUMNS, ())
    assert (found.missing, found.extra, found.differing) == (3, 1, 0)
    assert sorted((example.kind, example.rows, example.key) for example in found.examples) == [
        ("extra", 1, {}),
        ("missing", 1, {}),
        ("missing", 2, {}),
    ]


def test_the_first_differences_by_key_are_fetched_and_no_more(spark: SparkSession) -> None:
    source, mirror = (spark.range(1000).selectExpr("id", f"'{text}' AS text") for text in ("ours", "theirs"))
    found = compare(source, mirror, source.schema, ["id"])
    assert found.differing == 1000
    assert found.examples == tuple(
        Difference("differing", {"id": str(number)}, {"text": "ours"}, {"text": "theirs"}) for number in range(EXAMPLES)
    )


NESTED = {
    "a": "array<string>", "b": "array<int>", "s": "struct<x: int, y: string>", "m": "map<string, string>",
    "f": "array<float>",
}  # fmt: skip
PAIRS = [
    ("array('a', null), array(1), null, null, null", "array(null, 'a'), array(1), null, null, null"),
    ("array('a'), array(), null, null, null", "array('a'), null, null, null, null"),
    ("null, array(1, 2), null, null, array(3)", "null, array(1), null, null, array(2, 3)"),
    ("null, null, struct(null, null), null, null", "null, null, null, null, null"),
    ("null, null, struct(1, null), null, null", "null, null, struct(null, '1'), null, null"),
    ("null, null, null, map('a', 'b'), null", "null, null, null, map('b', 'a'), null"),
    ("null, null, null, map('a', ''), null", "null, null, null, map('a', null), null"),
    ("null, null, null, null, array(float('0.0'))", "null, null, null, null, array(float('-0.0'))"),
]


def nested(spark: SparkSession, rows: Sequence[str]) -> DataFrame:
    casts = [f"cast({name} AS {kind}) AS {name}" for name, kind in NESTED.items()]
    selects = [f"SELECT {number} AS id, * FROM VALUES ({row}) AS t(a, b, s, m, f)" for number, row in enumerate(rows)]
    frames = [spark.sql(select).selectExpr("id", *casts) for select in selects]
    return reduce(DataFrame.union, frames)


def test_nested_values_differ_in_every_place(spark: SparkSession) -> None:
    source, mirror = nested(spark, [ours for ours, _ in PAIRS]), nested(spark, [theirs for _, theirs in PAIRS])
    found = compare(source, mirror, source.schema, ["id"])
    assert found.differing == len(PAIRS)
    shown = {int(example.key["id"] or -1): example.source for example in found.examples}
    assert shown[0] == {"a": '["a",null]'}
    assert shown[4] == {"s": '{"x":1,"y":null}'}
    assert compare(source, source, source.schema, ["id"]).equal


def test_maps_are_equal_whatever_the_order_of_their_entries(spark: SparkSession) -> None:
    ours, theirs = (spark.sql(f"SELECT 1 AS id, map({pairs}) AS m") for pairs in ("'a', 1, 'b', 2", "'b', 2, 'a', 1"))
    assert compare(ours, theirs, ours.schema, ["id"]).equal


def test_instants_that_are_a_microsecond_or_an_hour_apart_look_different(spark: SparkSession) -> None:
    """The hour is the one that Berlin's clocks show twice."""
    instant = "timestamp_micros({0})"
    selected = (
        f"SELECT 1 AS id, {instant} AS at, array({instant}) AS ats, "
        "struct(CAST(timestamp_micros({0} % 1000) AS TIMESTAMP_NTZ) AS local) AS s"
    )
    twice_us = 1_729_989_000_000_000
    before = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        ours, an_hour, a_microsecond = (spark.sql(selected.format(twice_us + later)) for later in (1, 3_600_000_001, 2))
        (by_hour,) = compare(ours, an_hour, ours.schema, ["id"]).examples
        (by_microsecond,) = compare(ours, a_microsecond, ours.schema, ["id"]).examples
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    summer, winter = "2024-10-27 02:30:00.000001+02:00", "2024-10-27 02:30:00.000001+01:00"
    assert by_hour.source == {"at": summer, "ats": f'["{summer}"]'}
    assert by_hour.mirror == {"at": winter, "ats": f'["{winter}"]'}
    assert by_microsecond.source == {**by_hour.source, "s": '{"local":"1970-01-01 01:00:00.000001"}'}
    assert by_microsecond.mirror == {
        "at": summer.replace("1+", "2+"),
        "ats": f'["{summer.replace("1+", "2+")}"]',
        "s": '{"local":"1970-01-01 01:00:00.000002"}',
    }

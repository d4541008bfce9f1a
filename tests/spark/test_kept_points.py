"""Which points are kept, and that those that are say the same as before."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession

from pgtide.spark.kept_points import kept_rows
from pgtide.spark.points import SCHEMA

NOW = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)
HOUR_S = 3600.0

Said = tuple[str | None, int | None, bool]
States = dict[int, dict[str, tuple[int | None, bool]]]


def states(spark: SparkSession, view: str) -> States:
    """By offset of every point of the log: what it says of all tables."""
    now: dict[str, tuple[int | None, bool]] = {}
    found: States = {}
    rows = spark.sql(f"SELECT * FROM {view} WHERE log_id = 'mine' ORDER BY offset, covered").collect()
    for row in rows:
        if row["table"] is not None:
            now[row["table"]] = (row["version"], row["covered"])
        found[row["offset"]] = dict(now)
    return found


def prune(
    spark: SparkSession, points: Iterable[tuple[str, timedelta, list[Said]]], keep_s: float
) -> tuple[States, States]:
    """States before and after; a point is its log, its age and what it says, and its offset is its number."""
    rows = [
        (log, offset * 10, NOW - age, NOW - age, offset, table, version, covered, NOW - age)
        for offset, (log, age, said) in enumerate(points)
        for table, version, covered in said or [(None, None, False)]
    ]
    spark.createDataFrame(rows, SCHEMA).createOrReplaceTempView("points_before")
    spark.sql(kept_rows("points_before", "mine", NOW, keep_s)).createOrReplaceTempView("points_after")
    assert spark.table("points_after").schema.names == SCHEMA.names
    return states(spark, "points_before"), states(spark, "points_after")


def test_what_a_point_that_goes_has_said_moves_to_the_next_that_stays(spark: SparkSession) -> None:
    def ago(hours: float, seconds: float = 0) -> timedelta:
        return timedelta(hours=hours, seconds=seconds)

    before, after = prune(
        spark,
        [
            ("mine", ago(30), [("a", 1, True), ("b", 1, True), ("gone", 1, True)]),  # 0: too old
            ("mine", ago(29), [("a", 2, True), ("gone", None, False)]),  # 1: too old
            ("mine", ago(20, 20), [("b", 2, True)]),  # 2: not the last of its minute
            ("mine", ago(20, 10), [("c", 1, True)]),  # 3: the last of its minute
            ("mine", ago(19), []),  # 4: says nothing new
            ("mine", ago(18, 5), []),  # 5: says nothing, and goes
            ("mine", ago(18), [("a", None, False)]),  # 6
            ("other", ago(90), [("a", 77, True)]),  # 7: of another log
            ("mine", ago(0.5, 2), [("a", 3, True)]),  # 8: of the last hour
            ("mine", ago(0.5, 1), [("b", 3, True)]),  # 9
            ("mine", ago(0), [("b", 3, False), ("b", 4, True)]),  # 10: a parked table was added later
        ],
        keep_s=24 * HOUR_S,
    )
    assert sorted(after) == [3, 4, 6, 8, 9, 10]
    assert after == {offset: state for offset, state in before.items() if offset in after}
    others = spark.sql("SELECT offset, version FROM points_after WHERE log_id = 'other'").collect()
    assert [tuple(row) for row in others] == [(7, 77)]
    times = spark.sql("SELECT DISTINCT offset, published_at FROM points_after WHERE offset = 3").collect()
    assert [row["published_at"].replace(tzinfo=UTC) for row in times] == [NOW - ago(20, 10)]


def test_the_newest_point_is_kept_however_old_it_is(spark: SparkSession) -> None:
    old = timedelta(days=9)
    before, after = prune(spark, [("mine", old, [("a", 1, True)]), ("mine", old, [("b", 1, True)])], keep_s=HOUR_S)
    assert after == {1: before[1]} == {1: {"a": (1, True), "b": (1, True)}}


def test_when_fewer_hours_are_kept_the_last_hour_is_not_spared(spark: SparkSession) -> None:
    half, less = timedelta(minutes=30), timedelta(minutes=5)
    _, after = prune(
        spark, [("mine", half, [("a", 1, True)]), ("mine", less, [("a", 2, True)]), ("mine", less, [])], HOUR_S / 6
    )
    assert after == {1: {"a": (2, True)}, 2: {"a": (2, True)}}

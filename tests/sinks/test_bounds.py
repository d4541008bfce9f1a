"""Bounds of keys in a MERGE: whatever the keys look like, they find exactly the rows that they would find without."""

from __future__ import annotations

import uuid

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from pgtide.sinks import Changes, Mark
from pgtide.sinks.bounds import Bounds, bounds_of, within
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.iceberg_table import quoted
from pgtide.sinks.merge import DELETE, keep_name, merge_statement, origin_name

ODD = ["", " ", "it's", 'say "so"', "back\\slash", "\\'", "new\nline", "ä€𝄞", "{}", "%s", "null", "x" * 64, "\u0001"]
ROWS = StructType([StructField("n", LongType()), StructField("s", StringType()), StructField("body", StringType())])


def test_few_values_are_listed_and_many_are_bounded() -> None:
    assert bounds_of([pa.array([5, None, -3]), pa.chunked_array([[5], [9]])]) == Bounds(-3, 9, (5, -3, 9))
    assert bounds_of([pa.array(range(5000))]) == Bounds(0, 4999)
    assert bounds_of([pa.array(["b", "a"])]) == Bounds("a", "b", ("b", "a"))


@pytest.mark.parametrize(
    "values", [pa.array([None], pa.int64()), pa.array([1.5]), pa.array([True]), pa.array(["x" * 65]), pa.array([b"x"])]
)
def test_nothing_is_said_of_other_keys(values: pa.Array) -> None:
    assert bounds_of([values]) is None


def test_a_number_is_compared_as_itself(spark: SparkSession) -> None:
    least, greatest = -(2**63), 2**63 - 1
    condition = within("n", Bounds(least, greatest, (least, 0, greatest)))
    found = spark.sql(
        f"SELECT n FROM VALUES ({least}L), (-1L), (0L), ({greatest}L) AS t(n) WHERE {condition}"
    ).collect()
    assert sorted(row["n"] for row in found) == [least, 0, greatest]


def test_rows_with_odd_keys_are_found_by_their_bounds(spark: SparkSession) -> None:
    sink = IcebergSink(spark)
    begun = sink.create(quoted("lake", "sinks", f"t_{uuid.uuid4().hex[:12]}"), ROWS, {})
    first = [(number % 3 - 1, text, f"body {number}") for number, text in enumerate(ODD)]
    others = [(number, "other", "other") for number in range(3)]
    loaded = sink.append(begun, spark.createDataFrame([*first, *others], ROWS), Mark("log", "shape", 0))
    # Each second one goes, each third one keeps its body under a new number, the others change.
    rows = [
        (n + (10 if i % 3 == 2 and i % 2 else 0), s, "changed", i % 2 == 0, i % 3 == 2, n, s)
        for i, (n, s, _) in enumerate(first)
    ]
    gone = [(n, s, None, True, False, n, s) for i, (n, s, _) in enumerate(first) if i % 3 == 2 and i % 2]
    schema = StructType(
        [
            *ROWS,
            StructField(DELETE, BooleanType()),
            StructField(keep_name("body"), BooleanType()),
            StructField(origin_name("n"), LongType()),
            StructField(origin_name("s"), StringType()),
        ]
    )
    frame = spark.createDataFrame([*rows, *gone], schema)
    told = frame.toArrow()
    bounds = {key: bounds_of([told[key], told[origin_name(key)]]) for key in ("n", "s")}
    assert all(bounds.values())
    changes = Changes(frame, ("n", "s"), ("body",), {key: found for key, found in bounds.items() if found})
    assert " IN (" in merge_statement("t", "s", changes)
    merged = sink.upsert(loaded, changes, Mark("log", "shape", 1))
    expected = [
        (n + 10 if i % 3 == 2 else n, s, body if i % 3 == 2 else "changed")
        for i, (n, s, body) in enumerate(first)
        if i % 2
    ]
    found = [tuple(row) for row in spark.table(merged.target).collect()]
    assert sorted(found) == sorted([*expected, *others])


def test_rows_that_meet_none_of_the_table_are_appended(spark: SparkSession) -> None:
    sink = IcebergSink(spark)
    columns = StructType([StructField("n", LongType())])
    schema = StructType([*columns, StructField(DELETE, BooleanType())])
    begun = sink.create(quoted("lake", "sinks", f"t_{uuid.uuid4().hex[:12]}"), columns, {})
    version = sink.append(begun, spark.createDataFrame([(1,), (5,)], columns), Mark("log", "shape", 0))
    batches = [
        [(6, False), (7, True)],  # all beyond what is there; the second has come and gone
        [(8, True)],
        [(5, True), (9, False)],  # from here on within
        [(6, True), (2, False)],
    ]
    for offset, rows in enumerate(batches, 1):
        frame = spark.createDataFrame(rows, schema)
        bounds = bounds_of([frame.toArrow()["n"]])
        assert bounds is not None
        version = sink.upsert(version, Changes(frame, ("n",), (), {"n": bounds}), Mark("log", "shape", offset))
        assert version.mark is not None
        assert version == sink.recorded(version.target)
    assert sorted(row["n"] for row in spark.table(version.target).collect()) == [1, 2, 9]
    made = spark.sql(f"SELECT operation FROM {version.target}.snapshots ORDER BY committed_at").collect()
    assert [row["operation"] for row in made][-4:] == ["append", "append", "overwrite", "overwrite"]

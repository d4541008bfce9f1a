"""Arrow tables as Spark's frames: no rows are lost, and no rows are a frame too."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, LongType, StructField, StructType, TimestampType

from pgtide.spark.rows import arrow_schema, frame_of


def test_an_empty_chunk_in_the_middle_loses_no_rows(spark: SparkSession) -> None:
    schema = StructType([StructField("number", LongType())])
    chunks = [pa.table({"number": pa.array(numbers, pa.int64())}) for numbers in ([1, 2], [], [3])]
    assert sorted(row["number"] for row in frame_of(spark, pa.concat_tables(chunks), schema).collect()) == [1, 2, 3]


def test_no_rows_are_a_frame_too(spark: SparkSession) -> None:
    schema = StructType([StructField("times", ArrayType(TimestampType()))])
    assert frame_of(spark, arrow_schema(schema).empty_table(), schema).schema == schema

"""Files that the load writes itself: Iceberg reads from them what it reads from those of its own writer."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType, _parse_datatype_string

from pgtide.sinks import FileLayout, Mark, Version
from pgtide.sinks.iceberg import IcebergSink
from pgtide.sinks.iceberg_files import layout_of_files
from pgtide.sinks.iceberg_table import quoted
from pgtide.sinks.merge import DELETED
from pgtide.sinks.parquet_file import write_file
from pgtide.spark.rows import arrow_schema, frame_of

TYPES = (
    "id bigint, small int, flag boolean, single float, double double, price decimal(9,2), wide decimal(18,4), "
    "wider decimal(38,10), day date, at timestamp, local timestamp_ntz, note string, raw binary, "
    "numbers array<int>, tags map<string,string>, place struct<x: double, y: array<string>>"
)
NOW = datetime(2026, 11, 15, 12, 30, 0, 123456)
ROWS: list[tuple[Any, ...]] = [
    (
        1, 2, True, 1.5, float("inf"), Decimal("12.34"), Decimal("-1.0001"), Decimal("12345678901234567890.5"),
        date(1, 1, 1), NOW.replace(tzinfo=UTC), NOW, "ein Gruß", b"\0\xff", [1, None, 3], {"a": "b", "c": None},
        {"x": 1.0, "y": ["p", None]},
    ),
    (2, *[None] * 15),
    (3, -1, False, float("-inf"), -0.0, Decimal("-0.01"), Decimal(0), Decimal(-1), date(9999, 12, 31),
     NOW.replace(tzinfo=UTC), NOW, "", b"", [], {}, {"x": None, "y": []}),
]  # fmt: skip


@pytest.fixture
def version(spark: SparkSession) -> Version:
    columns = _parse_datatype_string(TYPES)
    assert isinstance(columns, StructType)
    return IcebergSink(spark).create(quoted("lake", "files", f"t_{uuid.uuid4().hex[:12]}"), columns, {})


def batch(columns: StructType) -> pa.RecordBatch:
    wanted = arrow_schema(columns)
    arrays = [pa.array(values, field.type) for values, field in zip(zip(*ROWS, strict=True), wanted, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def test_rows_of_every_type_are_those_of_icebergs_own_writer(spark: SparkSession, version: Version) -> None:
    sink, columns = IcebergSink(spark), spark.table(version.target).schema
    layout = sink.file_layout(version)
    assert layout is not None
    path = write_file([batch(columns)], layout)
    assert path is not None
    mark = Mark("log-1", "shape-1", 7, ranges=())
    written = sink.append_files(version, [path], mark)
    assert (written.mark, written.has_rows) == (mark, True)
    ours = sorted(spark.table(version.target).collect(), key=lambda row: row["id"])
    assert [tuple(row.asDict(recursive=True).values()) for row in ours] == [
        tuple(NOW.replace(tzinfo=None) if isinstance(value, datetime) else value for value in row) for row in ROWS
    ]
    sink.append(written, frame_of(spark, pa.Table.from_batches([batch(columns)]), columns), mark)
    counts = spark.sql(f"SELECT note, count(*) FROM {version.target} GROUP BY ALL").collect()
    assert sorted(row[1] for row in counts) == [2, 2, 2]
    everything = spark.table(version.target).collect()
    assert all(everything.count(row) == 2 for row in everything), "the two writers differ in something"


def test_what_files_hold_can_be_found_deleted_and_renamed(spark: SparkSession, version: Version) -> None:
    sink, columns = IcebergSink(spark), spark.table(version.target).schema
    layout = sink.file_layout(version)
    assert layout is not None
    path = write_file([batch(columns)], layout)
    assert path is not None
    sink.append_files(version, [path], Mark("log-1", "shape-1", 7))
    bounds = spark.sql(f"SELECT readable_metrics.id.* FROM {version.target}.files").collect()[0]
    assert (bounds["lower_bound"], bounds["upper_bound"]) == (1, 3), "files are skipped by their bounds"
    spark.sql(f"ALTER TABLE {version.target} RENAME COLUMN note TO remark")
    spark.sql(f"DELETE FROM {version.target} WHERE remark = '' AND wider = -1")
    assert sorted(row["id"] for row in spark.table(version.target).collect()) == [1, 2]
    rows = spark.sql(f"SELECT id, _row_id FROM {version.target} ORDER BY id").collect()
    assert len({row["_row_id"] for row in rows}) == 2


def test_no_rows_make_no_file(spark: SparkSession, version: Version) -> None:
    layout = IcebergSink(spark).file_layout(version)
    assert layout is not None
    assert write_file([], layout) is None


@pytest.mark.parametrize(
    ("folder", "path"),
    [
        ("file:/lake/public/a#b?c%20d/data", "/lake/public/a#b?c%20d/data"),
        ("file:///lake/data", "/lake/data"),
        ("/lake/a:b/data", "/lake/a:b/data"),
        ("lake/a:b/data", "lake/a:b/data"),
    ],
)
def test_files_go_into_the_folder_of_their_table_whatever_its_name(folder: str, path: str) -> None:
    layout = layout_of_files(folder, {"fields": []})
    assert layout is not None
    assert layout.folder == path


def test_only_the_mark_of_deletes_is_left_out_of_files_not_a_column_of_the_source_that_is_called_so() -> None:
    column = {"id": 1, "name": DELETED, "type": "boolean", "required": False}
    for found, names in ((column, [DELETED]), (column | {"initial-default": False}, [])):
        layout = layout_of_files("/data", {"fields": [found]})
        assert layout is not None
        assert layout.schema.names == names


def test_rows_with_a_column_that_the_file_lacks_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    layout = FileLayout(str(tmp_path), str(tmp_path), pa.schema([("id", pa.int64())]))
    batches = [pa.record_batch({"id": [1]}), pa.record_batch({"id": [2], "note": ["lost"]})]
    with pytest.raises(ValueError, match="no column note"):
        write_file(batches, layout)
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_is_partitioned_or_elsewhere_is_left_to_icebergs_writer(spark: SparkSession) -> None:
    name = quoted("lake", "files", f"t_{uuid.uuid4().hex[:12]}")
    spark.sql(f"CREATE TABLE {name} (id bigint, day date) USING iceberg PARTITIONED BY (day)")
    assert IcebergSink(spark).file_layout(Version(name, None, has_rows=False, mark=None)) is None
    assert layout_of_files("s3://bucket/data", {"fields": []}) is None
    assert layout_of_files("/data", {"fields": [{"id": 1, "name": "v", "type": "variant", "required": False}]}) is None

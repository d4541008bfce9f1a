"""Counting a mirror's rows from its metadata gives what Spark counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pgtide.demo.lake import mirror_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROPERTIES = (
    "'format-version' = '3', 'write.merge.mode' = 'merge-on-read', "
    "'write.update.mode' = 'merge-on-read', 'write.delete.mode' = 'merge-on-read'"
)


def test_rows_deleted_and_updated_in_place_are_not_counted(spark: SparkSession) -> None:
    folder = Path(spark.conf.get("spark.sql.catalog.lake.warehouse") or "") / "demo" / "counted"
    assert mirror_rows(folder) is None
    spark.sql(f"CREATE TABLE lake.demo.counted (id bigint, name string) USING iceberg TBLPROPERTIES ({PROPERTIES})")
    assert mirror_rows(folder) is None
    spark.sql("INSERT INTO lake.demo.counted SELECT id, 'first' FROM range(100)")
    assert mirror_rows(folder) == 100
    spark.sql(
        "MERGE INTO lake.demo.counted t USING (SELECT id FROM range(90, 130)) s ON t.id = s.id "
        "WHEN MATCHED AND s.id < 95 THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'second' "
        "WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.id, 'new')"
    )
    assert spark.table("lake.demo.counted").count() == 125
    assert mirror_rows(folder) == 125
    spark.sql("DELETE FROM lake.demo.counted WHERE id % 2 = 0")
    assert mirror_rows(folder) == spark.table("lake.demo.counted").count()

"""Counting a mirror's rows from its metadata gives what Spark counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgtide.demo.lake import mirror_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROPERTIES = (
    "'format-version' = '3', 'write.merge.mode' = 'merge-on-read', "
    "'write.update.mode' = 'merge-on-read', 'write.delete.mode' = 'merge-on-read'"
)


@pytest.mark.parametrize("codec", ["gzip", "none"])  # the mirror's is gzip
def test_rows_deleted_and_updated_in_place_are_not_counted(codec: str, spark: SparkSession) -> None:
    table = f"counted_{codec}"
    folder = Path(spark.conf.get("spark.sql.catalog.lake.warehouse") or "") / "demo" / table
    properties = f"{PROPERTIES}, 'write.metadata.compression-codec' = '{codec}'"
    assert mirror_rows(folder) is None
    spark.sql(f"CREATE TABLE lake.demo.{table} (id bigint, name string) USING iceberg TBLPROPERTIES ({properties})")
    assert mirror_rows(folder) is None
    spark.sql(f"INSERT INTO lake.demo.{table} SELECT id, 'first' FROM range(100)")
    assert mirror_rows(folder) == 100
    spark.sql(
        f"MERGE INTO lake.demo.{table} t USING (SELECT id FROM range(90, 130)) s ON t.id = s.id "
        "WHEN MATCHED AND s.id < 95 THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'second' "
        "WHEN NOT MATCHED THEN INSERT (id, name) VALUES (s.id, 'new')"
    )
    assert spark.table(f"lake.demo.{table}").count() == 125
    assert mirror_rows(folder) == 125
    spark.sql(f"DELETE FROM lake.demo.{table} WHERE id % 2 = 0")
    assert mirror_rows(folder) == spark.table(f"lake.demo.{table}").count()

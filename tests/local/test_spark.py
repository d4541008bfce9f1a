"""The Spark session: both table formats in one session, and nothing left where it was started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from pgtide import local
from pgtide.errors import PgtideError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MERGE = """
    MERGE INTO {target} AS t USING {source} AS s ON t.id = s.id
    WHEN MATCHED AND s.v IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *
"""


def test_iceberg_and_delta_merge_in_one_session(spark: SparkSession, tmp_path: Path) -> None:
    delta = f"delta.`{tmp_path / 'delta'}`"
    spark.sql("CREATE TABLE lake.local_test.t (id BIGINT, v STRING) USING iceberg")
    spark.sql(f"CREATE TABLE {delta} (id BIGINT, v STRING) USING delta")
    for target in ("lake.local_test.t", delta):
        spark.sql(f"INSERT INTO {target} VALUES (1, 'one'), (2, 'two'), (3, 'three')")
        changes = pa.table({"id": pa.array([1, 2, 4], pa.int64()), "v": ["uno", None, "cuatro"]})
        spark.createDataFrame(changes).createOrReplaceTempView("local_test_changes")
        spark.sql(MERGE.format(target=target, source="local_test_changes"))
        rows = [tuple(row) for row in spark.sql(f"SELECT * FROM {target} ORDER BY id").collect()]
        assert rows == [(1, "uno"), (3, "three"), (4, "cuatro")]
    spark.sql("DROP TABLE lake.local_test.t")


def test_session_that_runs_is_returned_as_it_is_or_refused(spark: SparkSession, tmp_path: Path) -> None:
    settings = dict(spark.conf.getAll)
    warehouse = settings["spark.sql.catalog.lake.warehouse"]
    assert local.spark() is spark
    assert local.spark(warehouse=warehouse) is spark
    with pytest.raises(PgtideError, match=f"catalog lake is in {warehouse}, not in {tmp_path}"):
        local.spark(warehouse=tmp_path)
    assert dict(spark.conf.getAll) == settings


def test_a_session_leaves_nothing_in_the_working_folder_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_TOOL_OPTIONS")  # of which Java says that it has seen them
    program = (
        "from pgtide.local import spark\n"
        "session = spark(warehouse='lake')\n"
        "assert session.conf.get('spark.sql.session.timeZone') == 'UTC'\n"
        "session.range(3).write.saveAsTable('plain')\n"
        "session.sql('CREATE TABLE lake.a.b (id INT) USING iceberg')\n"
        "session.stop()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["lake"]

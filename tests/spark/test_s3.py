"""A log on S3 for Spark: executors read it with the environment's credentials, and the mirror reports to it."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

from pyspark.sql import SparkSession

from pgtide.cli.status import gather
from pgtide.config import Log, Mirror
from pgtide.local import LocalS3
from pgtide.log.retention import readers
from pgtide.spark import register
from pgtide.spark.mirror import Mirror as MirrorRun
from pgtide.spark.targets import target_of
from tests.capture.running import capturing, configuration, wait_until_captured
from tests.database import Database


def test_what_was_captured_into_s3_is_read_streamed_and_mirrored_by_spark(
    spark: SparkSession, database: Database, bucket: str, object_store: LocalS3, tmp_path: Path
) -> None:
    location = f"{bucket}/log"
    config = configuration(database, tmp_path, log=Log(path=location, flush_interval_ms=20))
    mirror = Mirror(namespace=f"test_{uuid.uuid4().hex[:12]}", trigger_seconds=0.1)
    config = config.model_copy(update={"mirror": mirror}).at(config.file)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    with capturing(config):
        for number in range(5):
            database.execute(f"INSERT INTO orders VALUES ({number}, 'n{number}')")
            wait_until_captured(database, config)
    expected = [(number, f"n{number}", "insert", number) for number in range(5)]
    register(spark)
    options = {"path": location, "table": "public.orders"}

    batch = spark.read.format("pgtide").options(**options).load()
    rows = batch.select("id", "note", "_change_type", "_offset").orderBy("_offset").collect()
    assert [tuple(row) for row in rows] == expected
    plan = batch._jdf.queryExecution().toString()
    assert not [secret for secret in (object_store.access_key, object_store.secret_key) if secret in plan]

    name = f"changes_{uuid.uuid4().hex[:8]}"
    stream = spark.readStream.format("pgtide").options(**options).load()
    query = stream.writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    rows = spark.table(name).select("id", "note", "_change_type", "_offset").orderBy("_offset").collect()
    assert [tuple(row) for row in rows] == expected

    MirrorRun(spark, config).run(threading.Event(), until_offset=5)
    mirrored = spark.table(target_of(config, "public.orders")).orderBy("id").collect()
    assert [tuple(row) for row in mirrored] == [(number, f"n{number}") for number in range(5)]
    assert [(reader.name, reader.offset) for reader in readers(location)] == [("mirror", 5)]
    status = gather(config)
    assert (status.log.segments, status.log.end_offset, status.log.error) == (5, 5, None)
    assert status.tables["public.orders"]["applied_offset"] == 5

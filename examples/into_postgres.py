"""`foreachBatch` into another Postgres: a copy of a table there, each change exactly once.

Spark may run a batch again after a crash, and a checkpoint may be lost or restored from an older copy.  How far the
copy is, is therefore written in the transaction that writes its rows: as the `_offset` of the last change, which is the
same whenever the log is read.  What lies below it is not applied again.

    python into_postgres.py pgtide-data/log "dbname=reports" checkpoints/into_postgres
"""

import sys

import psycopg
from pyspark.sql import DataFrame
from pyspark.sql.functions import col

from pgtide import local

LOG, TARGET, CHECKPOINT = sys.argv[1:4]
spark = local.spark()

with psycopg.connect(TARGET) as target:
    target.execute("CREATE TABLE IF NOT EXISTS orders_copy (id int PRIMARY KEY, customer int, total numeric)")
    target.execute("CREATE TABLE IF NOT EXISTS applied (name text PRIMARY KEY, up_to bigint NOT NULL)")
    target.execute("INSERT INTO applied VALUES ('orders_copy', -1) ON CONFLICT DO NOTHING")


def apply(batch: DataFrame, batch_id: int) -> None:
    with psycopg.connect(TARGET) as target:  # one transaction
        up_to = target.execute("SELECT up_to FROM applied WHERE name = 'orders_copy' FOR UPDATE").fetchone()[0]
        # Of an update, the old row ("update_preimage") comes first, under the same offset.
        news = batch.where(col("_offset") > up_to).orderBy("_offset", col("_change_type").desc())
        for change in news.toLocalIterator():  # a batch may be all of the log
            if change._change_type in ("delete", "update_preimage"):
                target.execute("DELETE FROM orders_copy WHERE id = %s", [change.id])
            elif change._change_type == "truncate":
                target.execute("TRUNCATE orders_copy")
            else:
                row = [change.id, change.customer, change.total]
                target.execute(
                    "INSERT INTO orders_copy VALUES (%s, %s, %s) ON CONFLICT (id) "
                    "DO UPDATE SET customer = excluded.customer, total = excluded.total",
                    row,
                )
            up_to = change._offset
        target.execute("UPDATE applied SET up_to = %s WHERE name = 'orders_copy'", [up_to])


query = (
    spark.readStream.format("pgtide")
    .option("path", LOG)
    .option("table", "public.orders")
    .option("includePreimage", "true")  # the old row of an update that changed the key: it goes, the new one comes
    .load()
    .writeStream.foreachBatch(apply)
    .option("checkpointLocation", CHECKPOINT)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

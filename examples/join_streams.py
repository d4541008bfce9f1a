"""Two change streams joined: each payment with the order it pays, and how long that took.

Watermarks on the commit time let Spark forget orders that were not paid within a day.

    python join_streams.py pgtide-data/log
"""

import sys

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, expr

from pgtide import local

spark = local.spark()


def inserted(table: str) -> DataFrame:
    changes = spark.readStream.format("pgtide").option("path", sys.argv[1]).option("table", table).load()
    return changes.where("_change_type = 'insert'").withWatermark("_commit_timestamp", "1 day")


orders = inserted("public.orders").select("id", "customer", col("_commit_timestamp").alias("ordered_at"))
payments = inserted("public.payments").select("order_id", "amount", col("_commit_timestamp").alias("paid_at"))
paid = orders.join(
    payments,
    expr("id = order_id AND paid_at >= ordered_at AND paid_at <= ordered_at + INTERVAL 1 DAY"),
).select("id", "customer", "amount", expr("paid_at - ordered_at AS took"))

query = paid.writeStream.format("memory").queryName("paid_orders").trigger(availableNow=True).start()
query.awaitTermination()
spark.table("paid_orders").orderBy("id").show()

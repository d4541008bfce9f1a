"""Streaming aggregation over changes: what each customer has ordered in total, right also when orders change or go.

An insert adds its amount, a delete takes it back, an update does both: for that the old values have to be in the log,
so the table needs `ALTER TABLE orders REPLICA IDENTITY FULL`.

    python running_totals.py pgtide-data/log
"""

import sys

from pyspark.sql.functions import col, sum, when

from pgtide import local

spark = local.spark()  # or any session of yours: where pgtide is installed, Spark finds the source by itself

changes = (
    spark.readStream.format("pgtide")
    .option("path", sys.argv[1])
    .option("table", "public.orders")
    .option("includePreimage", "true")
    .load()
)
comes = col("_change_type").isin("insert", "update_postimage")
totals = changes.groupBy("customer").agg(sum(when(comes, col("total")).otherwise(-col("total"))).alias("ordered"))

query = (
    totals.writeStream.outputMode("complete")
    .format("memory")
    .queryName("running_totals")
    .trigger(availableNow=True)  # ends at the end of the log; without it the query goes on
    .start()
)
query.awaitTermination()
spark.table("running_totals").orderBy("customer").show()

"""A historic range: everything that happened to a table between two moments, as a plain DataFrame.

Moments may be times, LSNs or offsets of the log; the end is exclusive.

    python read_range.py pgtide-data/log public.orders 2026-01-31T08:00:00Z 2026-01-31T09:00:00Z
"""

import sys

from pgtide import local

log, table, begin, end = sys.argv[1:5]
spark = local.spark()

changes = (
    spark.read.format("pgtide")
    .option("path", log)
    .option("table", table)
    .option("startingOffsets", begin)
    .option("endingOffsets", end)
    .load()
)
changes.createOrReplaceTempView("changes")
spark.sql("SELECT * FROM changes ORDER BY _offset").show(truncate=False)
spark.sql("""
    SELECT _commit_timestamp, _xid, count(*) AS changes, collect_set(_change_type) AS kinds
    FROM changes GROUP BY _commit_version, _commit_timestamp, _xid ORDER BY _commit_version
""").show(truncate=False)

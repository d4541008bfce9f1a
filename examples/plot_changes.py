"""A plot of what happens in a database: changes per second, one line for each table (needs matplotlib).

python plot_changes.py pgtide-data/log changes.png
"""

import sys

import matplotlib

matplotlib.use("Agg")  # a picture in a file, without a display
import matplotlib.pyplot as plt

from pgtide import local

log, picture = sys.argv[1:3]
spark = local.spark()

changes = spark.read.format("pgtide").option("path", log).load()  # no table: all of them
per_second = (
    changes.selectExpr("`table`", "date_trunc('second', _commit_timestamp) AS second")
    .groupBy("table", "second")
    .count()
    .orderBy("second")
    .toPandas()
)

figure, axes = plt.subplots(figsize=(9, 4))
for table, rows in per_second.groupby("table"):
    axes.plot(rows["second"], rows["count"], marker=".", label=table)
axes.set(xlabel="time of commit (UTC)", ylabel="changes per second", ylim=(0, None))
axes.legend()
figure.autofmt_xdate()
figure.savefig(picture, dpi=120, bbox_inches="tight")

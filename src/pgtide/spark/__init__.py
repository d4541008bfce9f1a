"""pgtide on Spark: the data source, the mirror, and reading at consistent points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgtide.spark.at import Point, at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Makes `format("pgtide")` known to a session, and records how far its queries with a `readerName` get.

    Where this package is installed, Spark finds the source by itself; queries then record it when a batch is planned.
    """
    from pgtide.spark.reader_progress import listen
    from pgtide.spark.source import PgtideSource

    spark.dataSource.register(PgtideSource)
    listen(spark)


__all__ = ["Point", "at", "register"]

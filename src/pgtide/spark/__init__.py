"""pgtide on Spark: the data source, the mirror, and reading at consistent points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgtide.spark.at import Point, at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Makes `format("pgtide")` known to a session.  Where this package is installed, Spark finds it by itself."""
    from pgtide.spark.source import PgtideSource

    spark.dataSource.register(PgtideSource)


__all__ = ["Point", "at", "register"]

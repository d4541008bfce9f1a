"""The Iceberg and Delta jars for the installed Spark.

What Spark already ships is left out: two versions of one library on a class path is how strange errors begin.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.maven import Wanted, jars_in_cache, spark_home


@dataclass(frozen=True, slots=True)
class Lakehouse:
    """The versions of the table formats that belong to one minor version of Spark."""

    spark: str
    iceberg: str
    delta: str

    @property
    def wanted(self) -> Wanted:
        coordinates = (
            f"org.apache.iceberg:iceberg-spark-runtime-{self.spark}_2.13:{self.iceberg}",
            f"io.delta:delta-spark_{self.spark}_2.13:{self.delta}",
        )
        return Wanted("The Iceberg and Delta jars", coordinates, _SHIPPED_WITH_SPARK)


_SUPPORTED = {"4.1": Lakehouse("4.1", "1.12.0", "4.4.0")}

# Whole groups that Delta depends on and Spark ships; leaving them out spares a download of 100 MB.
_SHIPPED_WITH_SPARK = (
    "org.apache.hadoop:*",
    "org.apache.parquet:*",
    "org.apache.logging.log4j:*",
    "org.slf4j:*",
    "com.fasterxml.jackson.core:*",
    "com.fasterxml.jackson.datatype:*",
    "org.roaringbitmap:*",
)


def lakehouse_jars() -> list[Path]:
    """The jars, fetched if they are not in the cache yet."""
    release = importlib.metadata.version("pyspark")
    minor = ".".join(release.split(".")[:2])
    if minor not in _SUPPORTED:
        raise PgtideError(
            f"There are no Iceberg and Delta jars for Spark {release}: pgtide knows those for {', '.join(_SUPPORTED)}.",
            remedy=f"Install a supported version: pip install 'pyspark=={max(_SUPPORTED)}.*'",
        )
    versions = _SUPPORTED[minor]
    name = f"spark-{minor}-iceberg-{versions.iceberg}-delta-{versions.delta}"
    return _without_shipped(jars_in_cache(name, versions.wanted))


_POSTGRES_JDBC = "org.postgresql:postgresql:42.7.7"


def postgres_jdbc_jars() -> list[Path]:
    """Postgres's JDBC driver, for a catalog that is kept in a Postgres database; fetched if it is not in the cache."""
    return jars_in_cache("postgres-jdbc", Wanted("The JDBC driver of Postgres", (_POSTGRES_JDBC,)))


def _without_shipped(found: list[Path]) -> list[Path]:
    shipped = {_artifact(jar.name) for jar in (spark_home() / "jars").glob("*.jar")}
    return [jar for jar in found if _artifact(jar.name) not in shipped]


def _artifact(jar_name: str) -> str:
    """`zstd-jni` of `zstd-jni-1.5.7-3.jar` and of Ivy's `com.github.luben_zstd-jni-1.5.7-3.jar`."""
    name = re.sub(r"-\d[^/]*\.jar$", "", jar_name)
    return re.sub(r"^[a-z][\w-]*(\.[\w-]+)+_(?=[A-Za-z])", "", name)

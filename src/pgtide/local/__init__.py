"""Real parts on one machine: a throw-away Postgres, an S3 server, a JDK, the lakehouse jars, a Spark session.

Tests, the demo and the benchmarks use these and nothing else to start Postgres, S3 or Spark.
"""

from pgtide.local.installation import PostgresUnavailableError
from pgtide.local.postgres import LocalPostgres, Tls, postgres
from pgtide.local.programs import VERSIONS
from pgtide.local.s3 import LocalS3, s3
from pgtide.local.spark import build_session, spark

__all__ = [
    "VERSIONS",
    "LocalPostgres",
    "LocalS3",
    "PostgresUnavailableError",
    "Tls",
    "build_session",
    "postgres",
    "s3",
    "spark",
]

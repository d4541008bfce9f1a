"""Real parts on one machine: a throw-away Postgres, a JDK, the lakehouse jars, a Spark session.

Tests, the demo and the benchmarks use these and nothing else to start Postgres or Spark.
"""

from pgtide.local.installation import PostgresUnavailableError
from pgtide.local.postgres import LocalPostgres, Tls, postgres
from pgtide.local.programs import VERSIONS
from pgtide.local.spark import build_session, spark

__all__ = ["VERSIONS", "LocalPostgres", "PostgresUnavailableError", "Tls", "build_session", "postgres", "spark"]

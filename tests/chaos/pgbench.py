"""pgbench as traffic whose sums tell whether a state ever existed: each transaction adds the same amount to an account,
a teller and a branch, and writes it into the history."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from pgtide.config import Config
from pgtide.lsn import format_lsn
from pgtide.spark.at import points
from pgtide.spark.targets import target_of
from tests.database import Database

RATE_PER_S = 500
SUMMED = {
    "public.pgbench_accounts": "abalance",
    "public.pgbench_tellers": "tbalance",
    "public.pgbench_branches": "bbalance",
    "public.pgbench_history": "delta",
}
_SCANS_AT_ONCE = 100


def initialise(database: Database) -> None:
    command = [str(database.server.programs / "pgbench"), "--initialize", "--quiet", "--scale=1", database.dsn]
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def running(database: Database) -> Iterator[subprocess.Popen[str]]:
    """pgbench at the fixed rate beside the block; at its end pgbench is ended, and what is open then rolls back."""
    command = [str(database.server.programs / "pgbench"), "--client=4", "--jobs=2", "--no-vacuum"]
    command += [f"--rate={RATE_PER_S}", "--time=3600", database.dsn]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as traffic:
        try:
            yield traffic
        finally:
            traffic.terminate()


def books(spark: SparkSession, config: Config) -> dict[str, dict[str, tuple[int, int]]]:
    """For every point that is published, by its LSN: rows and sum of each table, read at the version it names.

    Only points from before all tables were loaded may lack some: no table may be parked later.
    """
    published = points(spark, config, 100_000)
    newest_first = [bool(point.not_covered) for point in published]
    assert newest_first == sorted(newest_first), [(format_lsn(point.lsn), point.not_covered) for point in published]
    versions = sorted({(table, version) for point in published for table, version in point.versions.items()})
    found: dict[tuple[str, int], tuple[int, int]] = {}
    # Compiling code for a hundred small scans takes ten times as long as running them.
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    for first in range(0, len(versions), _SCANS_AT_ONCE):
        scans = [
            f"SELECT '{table}', {version}L, count(*), coalesce(sum({SUMMED[table]}), 0) "
            f"FROM {target_of(config, table)} VERSION AS OF {version}"
            for table, version in versions[first : first + _SCANS_AT_ONCE]
        ]
        found |= {(row[0], row[1]): (row[2], row[3]) for row in spark.sql(" UNION ALL ".join(scans)).collect()}
    spark.conf.unset("spark.sql.codegen.wholeStage")
    return {
        format_lsn(point.lsn): {table: found[table, version] for table, version in point.versions.items()}
        for point in published
    }


def unbalanced(read: dict[str, dict[str, tuple[int, int]]]) -> dict[str, dict[str, tuple[int, int]]]:
    """The points at which the sums of the tables they cover are not all the same."""
    return {lsn: tables for lsn, tables in read.items() if len({total for _, total in tables.values()}) != 1}

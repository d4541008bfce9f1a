"""The proof: what Spark finds in the mirror, read at consistent points, against the books and against the source.

It runs in a process of its own (`prover`), with its own Spark session, which knows nothing of the pipeline's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from pgtide.config import Config
from pgtide.demo.books import Books, books_from_json, check_books
from pgtide.demo.equality import compare_table, read_source
from pgtide.demo.shop import TABLES
from pgtide.lsn import format_lsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgtide.spark import Point
    from pgtide.spark.comparison import Comparison


@dataclass(frozen=True, slots=True)
class Request:
    earlier_lsn: int  # of a point in the middle of the run
    goods_expected: int
    answer: str  # file to write the proof to

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found; `holds` says whether it is what was promised."""

    latest: Books
    earlier: Books
    tables: dict[str, Comparison]

    @property
    def books_balance(self) -> bool:
        return self.latest.balance and self.earlier.balance

    @property
    def mismatches(self) -> int:
        return sum(comparison.mismatches for comparison in self.tables.values())

    @property
    def holds(self) -> bool:
        return self.books_balance and not self.mismatches and len(self.tables) == len(TABLES)

    def to_json(self) -> str:
        return json.dumps(
            {
                "latest": self.latest.to_json(),
                "earlier": self.earlier.to_json(),
                "tables": {name: comparison.to_json() for name, comparison in self.tables.items()},
            }
        )


def proof_from_json(text: bytes) -> Proof:
    from pgtide.spark.comparison import comparison_from_json

    data: dict[str, Any] = json.loads(text)
    return Proof(
        books_from_json(data["latest"]),
        books_from_json(data["earlier"]),
        {name: comparison_from_json(comparison) for name, comparison in data["tables"].items()},
    )


def prove(spark: SparkSession, config: Config, request: Request) -> Proof:
    """The source must be at rest, and the mirror up to date.  A point that does not cover a table is an error."""
    from pgtide.spark import at

    latest = at(spark, "latest", config)
    earlier = at(spark, format_lsn(request.earlier_lsn), config)
    return Proof(
        latest=check_books(spark, latest.lsn, latest.table, request.goods_expected),
        earlier=check_books(spark, earlier.lsn, earlier.table, request.goods_expected),
        tables=_compare_all(spark, config, latest),
    )


def _compare_all(spark: SparkSession, config: Config, point: Point) -> dict[str, Comparison]:
    found = {}
    with psycopg.connect(config.source.dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        for table in TABLES:
            mirror = point.table(table.qualified_name)
            found[table.name] = compare_table(spark, table, read_source(connection, table), mirror)
    return found

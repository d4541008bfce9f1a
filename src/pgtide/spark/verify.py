"""Proves that mirrors equal their sources while both go on, or shows in what they do not.

A pair of a database snapshot and an LSN that agree exactly, and a point of the mirror at exactly that LSN: the tables
are then two pictures of one moment, and every difference between them is real.  The source is read as the first load
reads it, the mirror at the versions that the point names; Spark compares them (`comparison`).

The source table is read with the columns it has as of the snapshot, whatever is done to it meanwhile.  Everything that
passes by itself is tried again with a new pair: a mirror that was already beyond the LSN, a table that was truncated,
rewritten or had a column renamed while it was read, one that was altered so lately that its mirror has not followed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType

from pgtide.config import Config, matches
from pgtide.errors import ConfigurationError, PgtideError, TransientError
from pgtide.log.reader import LogReader
from pgtide.lsn import format_lsn
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.publication import publication_names
from pgtide.replication.server import Server
from pgtide.schema import TableShape
from pgtide.sinks.iceberg import stored_type
from pgtide.sinks.merge import DELETED
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.snapshot.table_ranges import cut
from pgtide.spark.at import Point, at
from pgtide.spark.comparison import Comparison, compare, described
from pgtide.spark.exact_pair import ExactPair, exact_pair
from pgtide.spark.request_point import Limits, Tell, publish_at
from pgtide.spark.rows import frame_of
from pgtide.spark.source_rows import errors_of_workers, rows_by_executors, rows_here, source_table

_PAIRS_MAX = 5  # a mirror that is beyond each of so many has something else wrong
_ROUNDS_MAX = 3
_TABLES_AT_ONCE = 4
# When none of an altered table's rows changes, the capture takes two looks to see it, and the mirror one more.
_FOLLOWED_WITHIN_S = 5.0
_NOT_COVERED = "the mirror's point does not cover it: it is loading or parked. See why: pgtide status"


@dataclass
class Verified:
    """What was found: for each table the LSN at which it was compared, and how it compares."""

    lsn: int = 0  # of the last point
    tables: dict[str, Comparison] = field(default_factory=dict)
    lsns: dict[str, int] = field(default_factory=dict)
    not_covered: dict[str, str] = field(default_factory=dict)  # tables that could not be compared, and why
    gone: list[str] = field(default_factory=list)  # tables that were dropped in the source: there is nothing to compare

    @property
    def equal(self) -> bool:
        """Whether all that there is was compared and is equal, and something was."""
        return bool(self.tables) and not self.not_covered and all(found.equal for found in self.tables.values())


def known_tables(config: Config, asked: Sequence[str]) -> dict[str, TableShape]:
    """The tables to compare, by qualified name: those that are asked for, or all that are configured."""
    shapes = {name: shape for name, shape in LogReader(config.log_location).shapes().items() if shape.relation_oid}
    chosen = {}
    for name in asked:
        meant = [known for known in shapes if name in (known, known.partition(".")[2])]
        if len(meant) != 1:
            problem = f"{name} could be any of {', '.join(meant)}" if meant else f"there is no table {name} in the log"
            raise ConfigurationError(problem, remedy=f"Tables: {', '.join(sorted(shapes)) or 'none yet'}.")
        chosen[meant[0]] = shapes[meant[0]]
    return chosen if asked else {name: shape for name, shape in shapes.items() if matches(config.source.tables, name)}


class Verifier:
    def __init__(self, spark: SparkSession, config: Config, limits: Limits, stop: threading.Event, tell: Tell) -> None:
        self._spark = spark
        self._config = config
        self._stop = stop
        self._tell = tell
        self._limits = limits
        self._publications = publication_names(config.source)

    def verify(self, tables: Mapping[str, TableShape]) -> Verified:
        verified = Verified()
        left = dict(tables)
        for round_number in range(_ROUNDS_MAX):
            if round_number and any(name in verified.tables for name in left):
                self._stop.wait(_FOLLOWED_WITHIN_S)
            with self._moment() as (pair, point):
                verified.lsn = pair.lsn
                again = self._compare_all(left, pair, point, verified)
            left = {name: left[name] for name in again}
            if not left:
                break
        return verified

    @contextmanager
    def _moment(self) -> Iterator[tuple[ExactPair, Point]]:
        """A pair, and the point that the mirror has published for it."""
        for _ in range(_PAIRS_MAX):
            with exact_pair(self._config, self._stop, self._limits.snapshot_s) as pair:
                self._tell(f"comparing as of {format_lsn(pair.lsn)}")
                if publish_at(self._config, pair.lsn, self._limits, self._stop, self._tell):
                    point = at(self._spark, pair.lsn, self._config)
                    if point.offset == LogReader(self._config.log_location).position_after(pair.lsn):
                        yield pair, point
                        return
            self._tell("the mirror was already beyond that")
        raise TransientError(
            f"the mirror was beyond {_PAIRS_MAX} snapshots in turn before it could publish a point for one",
            remedy="Verify again; if it stays so, run only one mirror on this log.",
        )

    def _compare_all(
        self, tables: Mapping[str, TableShape], pair: ExactPair, point: Point, verified: Verified
    ) -> set[str]:
        """Small tables several at a time, then large ones one by one; returns those that are worth another look."""
        for name in tables:
            verified.tables.pop(name, None)
            verified.not_covered.pop(name, None)
        present = self._present(tables, pair)
        verified.gone += sorted(tables.keys() - present)
        verified.not_covered |= dict.fromkeys(present - point.versions.keys(), _NOT_COVERED)
        failed: dict[str, str] = {}
        large: dict[str, list[CtidRange]] = {}

        def one(name: str, ranges: list[CtidRange] | None = None) -> None:
            if self._stop.is_set():
                return
            try:
                found = self._compare(name, tables[name].relation_oid, pair, point, ranges)
            except PgtideError as error:  # truncated meanwhile, locked, the snapshot gone: its own trouble
                self._tell(f"{name}: {error.what}")
                failed[name] = error.what
                return
            if isinstance(found, Comparison):
                verified.tables[name], verified.lsns[name] = found, pair.lsn
                self._tell(f"{name}: {described(found)}")
            else:
                large[name] = found

        covered = sorted(present & point.versions.keys())
        with ThreadPoolExecutor(min(_TABLES_AT_ONCE, self._config.snapshot.connections), "pgtide-verify") as pool:
            list(pool.map(one, covered))
        for name, ranges in large.items():
            self._tell(f"{name}: comparing {len(ranges)} ranges")
            one(name, ranges)
        if self._stop.is_set():
            raise KeyboardInterrupt
        verified.not_covered |= failed
        return {*failed, *(name for name in covered if name in verified.tables and verified.tables[name].problems)}

    def _present(self, tables: Mapping[str, TableShape], pair: ExactPair) -> set[str]:
        """Those that are still in the source."""
        oids = [shape.relation_oid for shape in tables.values()]
        with self._connected(pair) as connection, postgres_errors("reading the catalog"):
            rows = connection.execute(
                "SELECT oid::int8 FROM pg_catalog.pg_class WHERE oid::int8 = ANY(%s)", [oids]
            ).fetchall()
        there = {row[0] for row in rows}
        return {name for name, shape in tables.items() if shape.relation_oid in there}

    def _connected(self, pair: ExactPair) -> AbstractContextManager[Connection]:
        source = self._config.source
        return Server(source.dsn, pair.snapshot.server_started).connect(timeout_s=source.connect_timeout_seconds)

    def _compare(
        self, name: str, relation_oid: int, pair: ExactPair, point: Point, ranges: list[CtidRange] | None
    ) -> Comparison | list[CtidRange]:
        """The comparison; of a large table, unless `ranges` are given, only its ranges."""
        mirror = point.table(name)
        if self._config.mirror.options_of(name).soft_delete and DELETED in mirror.columns:
            mirror = mirror.where(f"NOT {DELETED}")
        here = None
        with self._connected(pair) as connection:
            source = source_table(connection, relation_oid, pair.snapshot, self._publications)
            columns, problems = shared_columns(source.columns, mirror.schema)
            source = replace(source, columns=columns)
            if ranges is None:
                ranges = cut(connection, source, self._config.snapshot.range_bytes)
                here = rows_here(connection, source, ranges)
                if here is None:
                    return ranges
        if here is not None:
            rows = frame_of(self._spark, here, columns)
        else:
            rows = rows_by_executors(self._spark, self._config, source, ranges)
        key = [column.name for column in source.shape.key_columns]
        with errors_of_workers(name):
            found = compare(rows, mirror, columns, key if set(key) <= set(columns.names) else [])
        return replace(found, problems=problems)


def shared_columns(source: StructType, mirror: StructType) -> tuple[StructType, tuple[str, ...]]:
    """The columns that both have with the same type, and what is wrong with the others.

    A column that the source has no more stays in the mirror, and is no difference.
    """
    types = {field.name.lower(): field.dataType for field in mirror}
    shared: list[StructField] = []
    problems = []
    for column in source:
        wanted, found = stored_type(column.dataType), types.get(column.name.lower())
        if found is None:
            problems.append(f"the mirror has no column {column.name} ({wanted.simpleString()})")
        elif found.simpleString() != wanted.simpleString():
            problems.append(
                f"column {column.name} should be {wanted.simpleString()}, the mirror has {found.simpleString()}"
            )
        else:
            shared.append(StructField(column.name, wanted))
    return StructType(shared), tuple(problems)

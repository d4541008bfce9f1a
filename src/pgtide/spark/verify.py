"""Proves that mirrors equal their sources while both go on, or shows in what they do not.

A pair of a database snapshot and an LSN that agree exactly, and a point of the mirror at exactly that LSN: the tables
are then two pictures of one moment, and every difference between them is real.  The source is read as the first load
reads it, the mirror at the versions that the point names; Spark compares them (`comparison`).

Everything that passes by itself is tried again with a new pair: a mirror that was already beyond the LSN, a table that
was truncated or rewritten while it was read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType

from pgtide.config import Config, matches
from pgtide.errors import ConfigurationError, PgtideError, TransientError
from pgtide.log.reader import LogReader
from pgtide.lsn import format_lsn
from pgtide.replication.catalog import Catalog
from pgtide.replication.publication import publication_names
from pgtide.replication.published import published_tables
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
from pgtide.spark.rows import table_schema
from pgtide.spark.source_rows import errors_of_workers, rows_by_executors, rows_here
from pgtide.spark.source_table import SourceTable

_PAIRS_MAX = 5  # a mirror that is beyond each of so many has something else wrong
_ROUNDS_MAX = 3
_TABLES_AT_ONCE = 4


@dataclass
class Verified:
    """What was found: for each table the LSN at which it was compared, and how it compares."""

    lsn: int = 0  # of the last point
    tables: dict[str, Comparison] = field(default_factory=dict)
    lsns: dict[str, int] = field(default_factory=dict)
    not_covered: dict[str, str] = field(default_factory=dict)  # tables that could not be compared, and why

    @property
    def equal(self) -> bool:
        """Whether all that was compared is equal, and something was."""
        return bool(self.tables) and all(found.equal for found in self.tables.values())


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
        failed: dict[str, str] = {}
        for _ in range(_ROUNDS_MAX):
            with self._moment() as (pair, point):
                verified.lsn = pair.lsn
                covered = {name: shape for name, shape in left.items() if name in point.versions}
                verified.not_covered |= dict.fromkeys(left.keys() - covered.keys(), "loading or parked")
                failed = self._compare_all(covered, pair, point, verified)
            left = {name: left[name] for name in failed}
            if not left:
                break
        verified.not_covered |= failed
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
    ) -> dict[str, str]:
        """Small tables several at a time, then large ones one by one; returns those that could not be read, and why."""
        sources = self._sources(tables, pair)
        verified.not_covered |= dict.fromkeys(tables.keys() - sources.keys(), "it is not in the source any more")
        failed: dict[str, str] = {}
        large: dict[str, list[CtidRange]] = {}

        def one(name: str, ranges: list[CtidRange] | None = None) -> None:
            if self._stop.is_set():
                return
            try:
                found = self._compare(name, sources[name], point, ranges)
            except PgtideError as error:  # truncated meanwhile, locked, the snapshot gone: its own trouble
                self._tell(f"{name}: {error.what}")
                failed[name] = error.what
                return
            if isinstance(found, Comparison):
                verified.tables[name], verified.lsns[name] = found, pair.lsn
                self._tell(f"{name}: {described(found)}")
            else:
                large[name] = found

        with ThreadPoolExecutor(min(_TABLES_AT_ONCE, self._config.snapshot.connections), "pgtide-verify") as pool:
            list(pool.map(one, sorted(sources)))
        for name, ranges in large.items():
            self._tell(f"{name}: comparing {len(ranges)} ranges")
            one(name, ranges)
        if self._stop.is_set():
            raise KeyboardInterrupt
        return failed

    def _sources(self, tables: Mapping[str, TableShape], pair: ExactPair) -> dict[str, SourceTable]:
        """What to read of each table that is still there: what its publication lets through of its present columns."""
        oids = {shape.relation_oid: name for name, shape in tables.items()}
        source = self._config.source
        server = Server(source.dsn, pair.server_started)
        with server.connect(timeout_s=source.connect_timeout_seconds) as connection:
            shapes = Catalog(connection).shapes(oids.keys(), self._publications)
            published = published_tables(connection, self._publications, list(oids))
        return {
            oids[oid]: SourceTable(
                shape,
                pair.snapshot,
                pair.server_started,
                published[oid].row_filter if oid in published else None,
                columns=table_schema(shape),
            )
            for oid, shape in shapes.items()
        }

    def _compare(
        self, name: str, source: SourceTable, point: Point, ranges: list[CtidRange] | None
    ) -> Comparison | list[CtidRange]:
        """The comparison; of a large table, unless `ranges` are given, only its ranges."""
        mirror = point.table(name)
        if self._config.mirror.options_of(name).soft_delete and DELETED in mirror.columns:
            mirror = mirror.where(f"NOT {DELETED}")
        columns, problems = shared_columns(source.columns, mirror.schema)
        source = replace(source, columns=columns)
        if ranges is None:
            timeout_s = self._config.source.connect_timeout_seconds
            server = Server(self._config.source.dsn, source.server_started)
            with server.connect(timeout_s=timeout_s) as connection:
                ranges = cut(connection, source, self._config.snapshot.range_bytes)
                here = rows_here(connection, source, ranges)
            if here is None:
                return ranges
            rows = self._spark.createDataFrame(here, columns)
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

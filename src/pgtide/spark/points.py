"""Consistent points: for a commit LSN, the version of every table at which they all equal their sources.

A point is written when every table of a batch is done, once per log and place, into `<catalog>.pgtide.points`.  It
has a row only for tables whose version or coverage changed since the point before: what a point says of the others is
in earlier rows.  A point at which nothing of that changed has one row without a table.

A point's place is its offset and its LSN.  Its LSN is that of the last commit, or a later one that somebody asked for
(`barriers`): nothing was committed in between, so both name the same state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType, TimestampType

from pgtide.errors import TableError
from pgtide.failpoints import declare, reach
from pgtide.sinks import Conflict, Mark, Sink, Version
from pgtide.spark.kept_points import NEWEST, kept_rows
from pgtide.spark.rows import arrow_schema

SCHEMA = StructType(
    [
        StructField("log_id", StringType()),
        StructField("lsn", LongType()),
        StructField("commit_timestamp", TimestampType()),
        StructField("max_commit_timestamp", TimestampType()),
        StructField("offset", LongType()),
        StructField("table", StringType()),
        StructField("version", LongType()),
        StructField("covered", BooleanType()),
        StructField("published_at", TimestampType()),
    ]
)

_OPEN_ATTEMPTS = 10
_PRUNE_ATTEMPTS = 10

POINT_READY = declare("mirror.point.ready", "all tables of a batch are written, their point is not")
POINT_PUBLISHED = declare("mirror.point.published", "a point is published, the batch not yet over")
POINTS_PRUNED = declare("mirror.points.pruned", "old points are gone, the versions they named are still there")


@dataclass(frozen=True, slots=True)
class Moment:
    """The end of a batch in the source's own terms."""

    offset: int
    lsn: int
    commit_timestamp: datetime | None  # None: the tables as they were loaded, before the first transaction

    @property
    def place(self) -> tuple[int, int]:
        return self.offset, self.lsn


@dataclass(frozen=True, slots=True)
class Coverage:
    version: int | None
    covered: bool


_NOT_COVERED = Coverage(None, covered=False)


class Points:
    """Writes points for one log."""

    def __init__(self, spark: SparkSession, sink: Sink, target: str, log_id: str) -> None:
        self._spark = spark
        self._sink = sink
        self.target = target
        self._log_id = log_id
        self._version: Version | None = None
        self._is_open = False
        self._known: dict[str, Coverage] = {}
        self._max_commit_timestamp: datetime | None = None
        self.last: Moment | None = None  # the newest point

    def open(self) -> None:
        """Finds out what is published, so that `last` is known before anything is written."""
        if self._is_open:
            return
        for left in reversed(range(_OPEN_ATTEMPTS)):
            version = self._sink.recorded(self.target)
            try:
                if version is not None:
                    self._sink.evolve(self._loaded(version), SCHEMA, {})
                break
            except Conflict:  # the mirror of another log has published a point
                if not left:
                    raise
        self._is_open = True

    def publish(self, moment: Moment, tables: Mapping[str, Coverage], renewed: Collection[str] = ()) -> bool:
        """Writes the point; false if a later one is there.  One that is there gains coverage, and never loses any.

        A name that is not among `tables` is covered no more: its table has another name now, or is captured no more.
        Tables that are `renewed` have another version with the same rows, or with those they should have had.
        """
        reach(POINT_READY)
        while True:
            version = self._version or self._load()
            if self.last is not None and self.last.offset == moment.offset:
                moment = max(moment, self.last, key=lambda one: one.lsn)
            if self.last is not None and self.last.place > moment.place:
                return False
            everything = dict.fromkeys(self._known, _NOT_COVERED) | dict(tables)
            changed = {name: now for name, now in everything.items() if self._known.get(name) != now}
            if self.last is not None and self.last.place == moment.place:
                changed = {
                    name: now
                    for name, now in changed.items()
                    if now.covered and (name in renewed or not self._covers(name))
                }
                if not changed:
                    return True
            latest = max(filter(None, (self._max_commit_timestamp, moment.commit_timestamp)), default=None)
            rows = self._rows(moment, latest, changed)
            try:
                self._version = self._sink.append(version, rows, Mark(self._log_id, "points", moment.offset))
                break
            except Conflict:
                self._version = None
            except BaseException:
                self._version = None  # the table may be gone by the next attempt, or another's
                raise
        self._known |= changed
        self._max_commit_timestamp = latest
        self.last = moment
        reach(POINT_PUBLISHED)
        return True

    def prune(self, keep_s: float) -> None:
        """Lets go of points that are older, and of most that are older than an hour; see `kept_points`."""
        for left in reversed(range(_PRUNE_ATTEMPTS)):
            version = self._version or self._load()
            if self.last is None:
                return
            pinned = f"{self.target} VERSION AS OF {version.snapshot_id}"
            rows = self._spark.sql(kept_rows(pinned, self._log_id, datetime.now(UTC), keep_s)).coalesce(1)
            try:
                self._version = self._sink.replace(version, rows, Mark(self._log_id, "points", self.last.offset))
                break
            except Conflict:  # the mirror of another log has published a point
                self._version = None
                if not left:
                    raise
            except BaseException:
                self._version = None
                raise
        reach(POINTS_PRUNED)

    def versions(self) -> dict[str, set[int]]:
        """By table, the versions that published points name."""
        version = self._version or self._load()
        if version.snapshot_id is None:
            return {}
        rows = self._spark.sql(
            f"SELECT `table`, collect_set(version) FROM {self.target} VERSION AS OF {version.snapshot_id} "
            f"WHERE log_id = '{self._log_id}' AND version IS NOT NULL GROUP BY `table`"
        )
        return {row[0]: set(row[1]) for row in rows.collect()}

    def _covers(self, name: str) -> bool:
        return name in self._known and self._known[name].covered

    def _rows(self, moment: Moment, latest: datetime | None, changed: Mapping[str, Coverage]) -> pa.Table:
        listed: list[tuple[str | None, int | None, bool]] = [
            (name, now.version, now.covered) for name, now in sorted(changed.items())
        ] or [(None, None, False)]
        values = [
            (self._log_id, moment.lsn, moment.commit_timestamp, latest, moment.offset, *said, datetime.now(UTC))
            for said in listed
        ]
        wanted = arrow_schema(SCHEMA)
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*values, strict=True), wanted, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=wanted)

    def _load(self) -> Version:
        return self._loaded(self._sink.recorded(self.target) or self._sink.create(self.target, SCHEMA, {}))

    def _loaded(self, version: Version) -> Version:
        """What is published so far, read at exactly the version that the next write will be compared with."""
        if version.snapshot_id is None:
            self._version, self.last, self._known, self._max_commit_timestamp = version, None, {}, None
            return version
        # One question for all: a second one costs most of a second of a session that has just begun.
        try:
            asked = self._spark.sql(
                f"SELECT `table`, {NEWEST} said, max(max_commit_timestamp) latest, "
                "max_by(struct(`offset`, lsn, commit_timestamp), struct(`offset`, lsn)) point "
                f"FROM {self.target} VERSION AS OF {version.snapshot_id} WHERE log_id = '{self._log_id}' "
                "GROUP BY `table`"
            )
        except AnalysisException as error:
            if not (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
                raise
            raise TableError(
                f"{self.target} is not a table of points: it is somebody else's.",
                remedy="Rename or drop it, or mirror into another catalog ([mirror] catalog).",
            ) from error
        found = asked.toArrow().to_pylist()
        self._max_commit_timestamp = max((row["latest"] for row in found if row["latest"]), default=None)
        self.last = max((Moment(**row["point"]) for row in found), key=lambda moment: moment.place, default=None)
        self._known = {row["table"]: Coverage(**row["said"]) for row in found if row["table"]}
        self._version = version
        return version

"""Reading all tables as of one consistent point: joins across them never see a state that the source did not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgtide.config import DEFAULT_FILE, Config, load_config
from pgtide.errors import ConfigurationError, PgtideError
from pgtide.log.identity import read_identity
from pgtide.lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


NOT_COVERED = "it was loading, parked, renamed or not captured any more"
_NO_VERSION = "Cannot find snapshot"  # in Iceberg's words


@dataclass(frozen=True)
class Point:
    """A published point.  `versions` has the tables it covers, by qualified name; `not_covered` names the others."""

    lsn: int
    commit_timestamp: datetime | None
    offset: int
    versions: dict[str, int]
    not_covered: tuple[str, ...]
    _spark: SparkSession = field(repr=False)
    _config: Config = field(repr=False)

    def table(self, name: str) -> DataFrame:
        """A table at this point, by `schema.table`, or by `table` alone where that is clear."""
        found = self._find(name)
        try:
            return self._spark.sql(f"SELECT * FROM {self._pinned(found)}")
        except Exception as error:
            if _NO_VERSION not in str(error):
                raise
            raise PgtideError(
                f"The point at {format_lsn(self.lsn)} is not kept any more: the version of {found} is gone.",
                remedy=f"{_kept_for(self._config)} Those that there are: pgtide points list",
            ) from None

    def create_views(self) -> list[str]:
        """Temporary views of all covered tables: under the table's name, or schema_table where names collide."""
        names = view_names([*self.versions, *self.not_covered])
        views = []
        for qualified in sorted(self.versions):
            view = names[qualified]
            self.table(qualified).createOrReplaceTempView("`" + view.replace("`", "``") + "`")
            views.append(view)
        return views

    def _pinned(self, qualified: str) -> str:
        from pgtide.spark.targets import target_of

        return f"{target_of(self._config, qualified)} VERSION AS OF {self.versions[qualified]}"

    def _find(self, name: str) -> str:
        everything = [*self.versions, *self.not_covered]
        matching = [qualified for qualified in everything if name in (qualified, qualified.partition(".")[2])]
        if len(matching) != 1:
            problem = f"{name} could be any of {', '.join(matching)}" if matching else f"there is no table {name}"
            known = ", ".join(sorted(everything))
            raise PgtideError(f"At {format_lsn(self.lsn)} {problem}.", remedy=f"Tables: {known}.")
        if matching[0] in self.not_covered:
            raise PgtideError(
                f"The point at {format_lsn(self.lsn)} does not cover {matching[0]}: {NOT_COVERED}.",
                remedy="Take an earlier or later point, or see what is wrong with the table: pgtide status.",
            )
        return matching[0]


def view_names(tables: Collection[str]) -> dict[str, str]:
    """The view of each table, which no other has; `tables` are all there are, so that it does not depend on which of
    them a point covers.  Spark does not tell the names of views apart by case."""
    parts = {qualified: qualified.partition(".") for qualified in tables}
    times = Counter(name.lower() for _, _, name in parts.values())
    views = {
        qualified: name if times[name.lower()] == 1 else f"{schema}_{name}"
        for qualified, (schema, _, name) in parts.items()
    }
    taken: dict[str, str] = {}
    for qualified, view in sorted(views.items()):
        other = taken.setdefault(view.lower(), qualified)
        if other != qualified:
            raise PgtideError(
                f"{other} and {qualified} would be the same view, {view}; no view was made.",
                remedy=f'Make views of your own: .table("{qualified}").createOrReplaceTempView(…).',
            )
    return views


def at(spark: SparkSession, point: str | int | datetime = "latest", config: Config | str | Path | None = None) -> Point:
    """The newest point that is not later than `point`: "latest", an LSN, or a timestamp."""
    if not isinstance(config, Config):
        config = load_config(Path(config or DEFAULT_FILE))
    found = _newest(spark, config, point, 1)
    if not found:
        raise PgtideError(
            f"There is no consistent point at or before {point}; it never was, or is not kept any more.",
            remedy=f"{_kept_for(config)} Those that there are: pgtide points list",
        )
    return found[0]


def points(spark: SparkSession, config: Config, limit: int) -> list[Point]:
    """The newest points, newest first."""
    return _newest(spark, config, "latest", limit)


def _newest(spark: SparkSession, config: Config, point: str | int | datetime, limit: int) -> list[Point]:
    """All looks are at one version of the points table, because points come and go."""
    from pyspark.sql.functions import col, desc, expr

    from pgtide.spark.targets import points_target

    target = points_target(config)
    if not spark.catalog.tableExists(target):
        raise PgtideError(
            f"There is no consistent point yet: no table {target}.", remedy="Start the mirror: pgtide run."
        )
    spark.sql(f"REFRESH TABLE {target}")  # the session's catalog may hold what it saw before
    head = spark.sql(f"SELECT snapshot_id FROM {target}.refs WHERE name = 'main'").collect()
    if not head:
        return []
    rows = spark.sql(f"SELECT * FROM {target} VERSION AS OF {head[0]['snapshot_id']}").where(
        col("log_id") == read_identity(config.log_location).log_id
    )
    chosen = rows.where(_not_after(point)).groupBy("offset", "lsn").agg(expr("any_value(commit_timestamp) AS time"))
    places = _collect(chosen.orderBy(desc("offset"), desc("lsn")).limit(limit))
    found = []
    for place, tables in zip(places, reversed(_tables_at(rows, places[::-1])), strict=True):
        versions = {name: now["version"] for name, now in sorted(tables.items()) if now["covered"]}
        others = tuple(sorted(tables.keys() - versions.keys()))
        found.append(Point(place["lsn"], place["time"], place["offset"], versions, others, spark, config))
    return found


def _tables_at(rows: DataFrame, places: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """For each of these consecutive places, oldest first, what is known of every table there."""
    from pyspark.sql.functions import expr

    from pgtide.spark.kept_points import NEWEST

    if not places:
        return []
    of_tables = rows.where("`table` IS NOT NULL")
    oldest, newest = (f"struct({place['offset']:d}L, {place['lsn']:d}L)" for place in (places[0], places[-1]))
    before = of_tables.where(f"struct(`offset`, lsn) <= {oldest}").groupBy("table").agg(expr(f"{NEWEST} AS now"))
    states = [{row["table"]: row["now"] for row in _collect(before)}]
    if len(places) == 1:
        return states
    later = of_tables.where(f"struct(`offset`, lsn) > {oldest} AND struct(`offset`, lsn) <= {newest}")
    changed: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in _collect(later.orderBy("offset", "lsn", "covered", "published_at")):
        now = {"version": row["version"], "covered": row["covered"]}
        changed.setdefault((row["offset"], row["lsn"]), {})[row["table"]] = now
    for place in places[1:]:
        states.append(states[-1] | changed.get((place["offset"], place["lsn"]), {}))
    return states


def _kept_for(config: Config) -> str:
    hours = config.mirror.keep_points_hours
    return f"Points are kept for {hours:g} hours ([mirror] keep_points_hours)."


def _collect(rows: DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.toArrow().to_pylist()
    return found


def _not_after(point: str | int | datetime) -> Column:
    """Which points are not later than the one that is asked for."""
    from pyspark.sql.functions import col, lit

    if point == "latest":
        return lit(True)
    if isinstance(point, str):
        try:
            point = parse_lsn(point) if "/" in point else datetime.fromisoformat(point)
        except ValueError:
            raise ConfigurationError(
                f"{point!r} names no point.", remedy='Give "latest", an LSN such as 16/B374D848, or a timestamp.'
            ) from None
    if isinstance(point, datetime):
        # Commit timestamps may go backwards in commit order; the greatest so far does not.
        return col("max_commit_timestamp") <= lit(point if point.tzinfo else point.replace(tzinfo=UTC))
    return col("lsn") <= lit(point)

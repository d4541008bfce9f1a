"""Reading all tables as of one consistent point: joins across them never see a state that the source did not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pgtide.config import DEFAULT_FILE, Config, load_config
from pgtide.errors import PgtideError
from pgtide.lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
        return self._spark.sql(f"SELECT * FROM {self._pinned(self._find(name))}")

    def create_views(self) -> list[str]:
        """Temporary views of all covered tables: under the table's name, or schema_table where names collide."""
        names = [name.partition(".")[2] for name in self.versions]
        views = []
        for qualified in sorted(self.versions):
            schema, _, name = qualified.partition(".")
            view = name if names.count(name) == 1 else f"{schema}_{name}"
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
                f"The point at {format_lsn(self.lsn)} does not cover {matching[0]}: it was loading or parked.",
                remedy="Take an earlier or later point, or see what is wrong with the table: pgtide status.",
            )
        return matching[0]


def at(spark: SparkSession, point: str | int | datetime = "latest", config: Config | str | Path | None = None) -> Point:
    """The newest point that is not later than `point`: "latest", an LSN, or a timestamp."""
    from pgtide.spark.targets import points_target

    if not isinstance(config, Config):
        config = load_config(Path(config or DEFAULT_FILE))
    points = points_target(config)
    if not spark.catalog.tableExists(points):
        raise PgtideError(
            f"There is no consistent point yet: no table {points}.", remedy="Start the mirror: pgtide run."
        )
    # One look at the table, so that a point published meanwhile cannot mix with an older one.
    found = spark.sql(f"SELECT * FROM {points} WHERE log_id = '{_log_id(config)}'").toArrow().to_pylist()
    chosen = max((row for row in found if _not_later(row, point)), key=lambda row: int(row["offset"]), default=None)
    if chosen is None:
        raise PgtideError(
            f"There is no consistent point at or before {point}.",
            remedy=f"Those that there are: SELECT DISTINCT lsn, commit_timestamp FROM {points}",
        )
    newest: dict[str, dict[str, object]] = {}
    for row in sorted(found, key=lambda row: (int(row["offset"]), bool(row["covered"]))):
        if row["table"] is not None and row["offset"] <= chosen["offset"]:
            newest[row["table"]] = row
    versions = {name: int(str(row["version"])) for name, row in newest.items() if row["covered"]}
    others = tuple(sorted(newest.keys() - versions.keys()))
    return Point(chosen["lsn"], chosen["commit_timestamp"], chosen["offset"], versions, others, spark, config)


def _log_id(config: Config) -> str:
    from pgtide.log.identity import read_identity

    return read_identity(config.log_path).log_id


def _not_later(row: dict[str, object], point: str | int | datetime) -> bool:
    if point == "latest":
        return True
    if isinstance(point, str) and "/" in point:
        point = parse_lsn(point)
    elif isinstance(point, str):
        point = datetime.fromisoformat(point)
    if isinstance(point, datetime):
        moment = point if point.tzinfo else point.replace(tzinfo=UTC)
        latest = row["max_commit_timestamp"]
        return isinstance(latest, datetime) and latest <= moment
    return int(str(row["lsn"])) <= point

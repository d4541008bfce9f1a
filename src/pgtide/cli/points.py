"""`pgtide points …`: the consistent points that the mirror has published, and what each of them covers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pgtide.cli.parts import with_spark
from pgtide.config import Config
from pgtide.errors import ConfigurationError
from pgtide.log.identity import read_identity
from pgtide.lsn import format_lsn

if TYPE_CHECKING:
    from pgtide.spark import Point


def list_points(config: Config, *, limit: int, as_json: bool) -> None:
    from pgtide.spark.at import points

    if limit < 1:
        raise ConfigurationError(f"--limit: found {limit}, expected a number from 1 on")
    read_identity(config.log_location)  # says that there is no log before Spark takes its seconds to start
    found = with_spark(config, lambda spark: points(spark, config, limit))
    if as_json:
        print(json.dumps([_as_json(point) for point in found], indent=1))
        return
    table = Table("LSN", "committed", "offset", "tables", "not covered", box=None)
    for point in found:
        committed = str(point.commit_timestamp or "–")
        covered, others = f"{len(point.versions):,}", ", ".join(point.not_covered)
        table.add_row(format_lsn(point.lsn), committed, f"{point.offset:,}", covered, others)
    Console().print(table)


def show_point(config: Config, *, point: str, as_json: bool) -> None:
    from pgtide.spark import at
    from pgtide.spark.at import NOT_COVERED

    read_identity(config.log_location)
    found = with_spark(config, lambda spark: at(spark, point, config))
    if as_json:
        print(json.dumps(_as_json(found), indent=1))
        return
    print(f"{format_lsn(found.lsn)}, offset {found.offset:,}, last commit {found.commit_timestamp or 'before the log'}")
    table = Table("table", "version", box=None)
    for name, version in found.versions.items():
        table.add_row(name, str(version))
    for name in found.not_covered:
        table.add_row(name, f"not covered: {NOT_COVERED}")
    Console().print(table)


def _as_json(point: Point) -> dict[str, Any]:
    return {
        "lsn": format_lsn(point.lsn),
        "commit_timestamp": point.commit_timestamp and point.commit_timestamp.isoformat(),
        "offset": point.offset,
        "tables": point.versions,
        "not_covered": list(point.not_covered),
    }

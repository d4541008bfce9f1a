"""`pgtide log …`: what is in the change log, for people."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pgtide.change import Op
from pgtide.config import Config
from pgtide.errors import ConfigurationError, LogError
from pgtide.log.check import check_log
from pgtide.log.reader import LogReader, LogRows
from pgtide.log.retention import Removal, plan_removal, readers, remove
from pgtide.lsn import format_lsn

_POLL_S = 0.2


def show(config: Config, *, as_json: bool) -> None:
    """Identity, extent, segments, readers and tables."""
    log = LogReader(config.log_location)
    end = log.end()
    extents = log.extents()
    found = {
        "path": config.log_location,
        "log_id": log.identity.log_id,
        "database": log.identity.database,
        "slot": log.identity.slot,
        "start_lsn": format_lsn(log.identity.start_lsn),
        "durable_lsn": format_lsn(end.durable_lsn),
        "first_offset": log.first_offset(),
        "end_offset": end.end_offset,
        "segments": [
            {"name": str(extent.name), "first_offset": extent.name.first_offset, "end_offset": extent.end_offset}
            for extent in extents
        ],
        "readers": {reader.name: reader.offset for reader in readers(config.log_location)},
        "tables": {
            name: {"columns": [column.name for column in shape.columns], "key": [c.name for c in shape.key_columns]}
            for name, shape in sorted(log.shapes().items())
        },
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for key in ("path", "log_id", "database", "slot", "start_lsn", "durable_lsn"):
        print(f"{key:14} {found[key]}")
    print(f"{'offsets':14} {found['first_offset']} to {end.end_offset} (exclusive), in {len(extents)} segments")
    for reader in readers(config.log_location):
        print(f"{'reader':14} {reader.name} at {reader.offset}, {max(0, end.end_offset - reader.offset)} behind")
    table = Table("table", "key", "columns", box=None)
    for name, shape in sorted(log.shapes().items()):
        key = ", ".join(column.name for column in shape.key_columns) or "none"
        table.add_row(name, key, ", ".join(column.name for column in shape.columns))
    Console().print(table)


def tail(config: Config, stop: threading.Event, *, table: str | None, last: int, follow: bool, as_json: bool) -> None:
    """The newest changes, and with `follow` those to come."""
    log = LogReader(config.log_location)
    relation_oid = None if table is None else _relation(log, table)
    position = max(log.first_offset(), log.end().end_offset - last)
    while True:
        end = log.end().end_offset
        for row in _changes(log, position, end, relation_oid):
            print(json.dumps(row, default=str) if as_json else _line(row), flush=True)
        position = end
        if not follow or stop.wait(_POLL_S):
            return


def check(config: Config, *, as_json: bool) -> bool:
    """Reads everything; true if nothing is wrong."""
    result = check_log(config.log_location)
    if as_json:
        print(json.dumps(asdict(result), indent=1))
        return not result.problems
    for problem in result.problems:
        print(f"{problem.what}\n    {problem.remedy}", file=sys.stderr)
    word = "fine" if not result.problems else f"{len(result.problems)} problems"
    print(f"{word}: {result.changes} changes of {result.transactions} transactions in {result.blocks} blocks")
    return not result.problems


def prune(config: Config, *, hours: float | None, max_bytes: int | None, yes: bool) -> None:
    """Retention by hand: shows what would go, and removes it when told to."""
    removal = plan_removal(
        config.log_location,
        retention_s=(config.log.retention_hours if hours is None else hours) * 3600,
        max_bytes=config.log.max_bytes if max_bytes is None else max_bytes,
    )
    _describe(removal, done=yes)
    if removal.losers and not yes:
        print("Readers named above would lose changes.")
    if yes:
        remove(config.log_location, removal)
    elif removal.segments:
        print("Nothing was removed. Add --yes to do it.")


def _describe(removal: Removal, *, done: bool) -> None:
    if not removal.segments:
        print("nothing to remove")
        return
    verb = "removing" if done else "would remove"
    print(f"{verb} {len(removal.segments)} segments, {removal.nbytes} bytes: changes below offset {removal.end_offset}")
    for reader in removal.losers:
        print(f"reader {reader.name} is at {reader.offset}: it has not read all of that")


def _relation(log: LogReader, table: str) -> int:
    shapes = log.shapes()
    if table not in shapes:
        raise LogError(f"the log has no table {table!r}", remedy=f"It has: {', '.join(sorted(shapes)) or 'none yet'}.")
    return shapes[table].relation_oid


def _changes(log: LogReader, start: int, end: int, relation_oid: int | None) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for piece in log.plan(start, end, relation_oid):
        rows += _named(log.read(piece))
    yield from sorted(rows, key=lambda row: int(row["offset"]))


def _named(found: LogRows) -> list[dict[str, Any]]:
    """Changes with the columns' own names; values of deletes are those of the key, or of the whole old row."""
    names = {column.storage_name: column.name for column in found.shape.columns}
    result = []
    for row in found.rows.to_pylist():
        result.append(
            {
                "offset": row["_offset"],
                "lsn": format_lsn(row["_commit_lsn"]),
                "xid": row["_xid"],
                "committed": row["_commit_timestamp"].isoformat(),
                "table": found.shape.qualified_name,
                "change": Op(row["_op"]).name.lower(),
                "row": {name: row[storage_name] for storage_name, name in names.items()},
            }
        )
    return result


def _line(row: dict[str, Any]) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in row["row"].items() if value is not None)
    return f"{row['offset']:>12} {row['lsn']:>12} {row['xid']:>8} {row['change']:8} {row['table']} {values}"


def positive(value: int, option: str) -> int:
    if value < 0:
        raise ConfigurationError(f"{option}: found {value}, expected a number that is not negative")
    return value

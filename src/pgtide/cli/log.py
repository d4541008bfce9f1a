"""`pgtide log …`: what is in the change log, for people."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pgtide.change import OldImage, Op
from pgtide.cli.sizes import size_of
from pgtide.config import Config, matches
from pgtide.errors import ConfigurationError, LogError
from pgtide.log.check import check_log
from pgtide.log.large import FOLDER as LARGE
from pgtide.log.reader import LogReader, LogRows
from pgtide.log.retention import Removal, plan_removal, readers, remove
from pgtide.log.segment import Extent
from pgtide.lsn import format_lsn

_POLL_S = 0.2
_LOOK_BACK = 1000


def show(config: Config, *, as_json: bool) -> None:
    """Identity, extent, segments, readers and tables."""
    log = LogReader(config.log_location)
    end = log.end()
    extents = log.extents()
    shapes = sorted(log.shapes().items())
    known = readers(config.log_location)
    sizes = [log.stored(extent).nbytes for extent in extents]
    total_bytes = sum(sizes) + sum(entry.nbytes for entry in log.storage.entries(LARGE))
    oldest, newest = _commit_times(log, extents)
    found = {
        "path": config.log_location,
        "log_id": log.identity.log_id,
        "database": log.identity.database,
        "slot": log.identity.slot,
        "start_lsn": format_lsn(log.identity.start_lsn),
        "durable_lsn": format_lsn(end.durable_lsn),
        "first_offset": log.first_offset(),
        "end_offset": end.end_offset,
        "oldest_commit": oldest,
        "newest_commit": newest,
        "bytes": total_bytes,
        "segments": [
            {"name": str(extent.name), "first_offset": extent.first_offset, "end_offset": extent.end_offset,
             "bytes": size}
            for extent, size in zip(extents, sizes, strict=True)
        ],
        "readers": {reader.name: reader.offset for reader in known},
        "tables": {
            name: {"columns": [column.name for column in shape.columns], "key": [c.name for c in shape.key_columns]}
            for name, shape in shapes
        },
    }  # fmt: skip
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for key in ("path", "log_id", "database", "slot", "start_lsn", "durable_lsn"):
        print(f"{key:14} {found[key]}")
    print(f"{'offsets':14} {found['first_offset']} to {end.end_offset} (exclusive)")
    print(f"{'committed':14} {oldest or 'nothing yet'}" + (f" to {newest}" if newest != oldest else ""))
    print(f"{'size':14} {size_of(total_bytes)} in {len(extents)} segments")
    print(f"{'retention':14} {_rules(config)}")
    for reader in known:
        print(f"{'reader':14} {reader.name} at {reader.offset}, {max(0, end.end_offset - reader.offset)} behind")
    if not known:
        print(f"{'reader':14} none is registered: what is older than the retention time goes, read or not")
    table = Table("table", "key", "columns", box=None)
    for name, shape in shapes:
        key = ", ".join(column.name for column in shape.key_columns) or "none"
        table.add_row(Text(name), Text(key), Text(", ".join(column.name for column in shape.columns)))
    Console().print(table)


def tail(
    config: Config,
    stop: threading.Event,
    *,
    tables: Sequence[str],
    changes: Sequence[str],
    last: int,
    follow: bool,
    as_json: bool,
) -> None:
    """The newest changes, and with `follow` those to come."""
    log = LogReader(config.log_location)
    wanted = _Wanted(_relations(log, tables) if tables else None, _ops(changes) if changes else None)
    position = log.end().end_offset
    _print(_newest(log, position, last, wanted), as_json=as_json)
    while follow and not stop.wait(_POLL_S):
        end = log.end().end_offset
        if tables:
            wanted = _Wanted(_relations(log, tables), wanted.ops)  # a table may have come since
        _print(_changes(log, position, end, wanted), as_json=as_json)
        position = end


def check(config: Config, *, as_json: bool) -> bool:
    """Reads everything; true if nothing is wrong."""
    result = check_log(config.log_location)
    if as_json:
        print(json.dumps(asdict(result), indent=1))
        return not result.problems
    for problem in result.problems:
        print(f"{problem.what}\n    {problem.remedy}", file=sys.stderr)
    count = len(result.problems)
    word = "fine" if not count else "1 problem" if count == 1 else f"{count} problems"
    print(f"{word}: {result.changes} changes of {result.transactions} transactions in {result.blocks} blocks")
    return not result.problems


def prune(config: Config, *, hours: float | None, max_bytes: int | None, yes: bool, as_json: bool) -> None:
    """Retention by hand: shows what would go, and removes it when told to."""
    removal = plan_removal(
        config.log_location,
        retention_s=(config.log.retention_hours if hours is None else hours) * 3600,
        max_bytes=config.log.max_bytes if max_bytes is None else max_bytes,
    )
    if as_json:
        print(json.dumps({
            "segments": removal.segments, "large": removal.large,
            "bytes": removal.nbytes, "end_offset": removal.end_offset, "kept_because": removal.kept_because,
            "losers": {reader.name: reader.offset for reader in removal.losers}, "removed": yes,
        }, indent=1))  # fmt: skip
    else:
        _describe(removal, done=yes)
    if yes:
        remove(config.log_location, removal)


def _describe(removal: Removal, *, done: bool) -> None:
    if not removal.segments:
        print(f"nothing to remove: {removal.kept_because}")
        return
    verb = "removing" if done else "would remove"
    large = f" and {len(removal.large)} files of large transactions" if removal.large else ""
    print(f"{verb} {len(removal.segments)} segments{large}, {size_of(removal.nbytes)}")
    print(f"changes below offset {removal.end_offset} go; {removal.kept_because}")
    for reader in removal.losers:
        loses = "loses" if done else "would lose"
        print(f"reader {reader.name} {loses} offsets {reader.offset} to {removal.end_offset}, which it has not read")
    if not done:
        print("Nothing was removed. Add --yes to do it.")


@dataclass(frozen=True, slots=True)
class _Wanted:
    relation_oids: frozenset[int] | None  # None: all
    ops: frozenset[int] | None


def _relations(log: LogReader, patterns: Sequence[str]) -> frozenset[int]:
    shapes = log.shapes()
    found = frozenset(shape.relation_oid for name, shape in shapes.items() if matches(patterns, name))
    if not found:
        asked = ", ".join(map(repr, patterns))
        raise LogError(f"the log has no table {asked}", remedy=f"It has: {', '.join(sorted(shapes)) or 'none yet'}.")
    return found


def _ops(changes: Sequence[str]) -> frozenset[int]:
    names = {op.name.lower(): int(op) for op in Op}
    unknown = [change for change in changes if change not in names]
    if unknown:
        raise ConfigurationError(
            f"--change {unknown[0]}: there is no such change", remedy=f"There are: {', '.join(names)}."
        )
    return frozenset(names[change] for change in changes)


def _newest(log: LogReader, end: int, count: int, wanted: _Wanted) -> list[dict[str, Any]]:
    """The last `count` changes that are wanted, however far back they lie."""
    found: list[dict[str, Any]] = []
    first, step = log.first_offset(), max(count, _LOOK_BACK)
    while end > first and len(found) < count:
        start = max(first, end - step)
        found = [*_changes(log, start, end, wanted), *found]
        end, step = start, 2 * step
    return found[len(found) - count :] if len(found) > count else found


def _changes(log: LogReader, start: int, end: int, wanted: _Wanted) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for piece in log.plan(start, end):
        if wanted.relation_oids is None or piece.relation_oid in wanted.relation_oids:
            rows += _named(log.read(piece), wanted.ops)
    return sorted(rows, key=lambda row: int(row["offset"]))


def _named(found: LogRows, ops: frozenset[int] | None) -> list[dict[str, Any]]:
    """Changes with the columns' own names; values of deletes are those of the key, or of the whole old row."""
    columns, result = found.shape.columns, []
    for row in found.rows.to_pylist():
        op = Op(row["_op"])
        if ops is not None and op not in ops:
            continue
        bits = int.from_bytes(row.get("_unchanged") or b"", "little")
        unchanged = [column.name for place, column in enumerate(columns) if bits >> place & 1]
        key_only = op is Op.DELETE and row.get("_old") == OldImage.KEY
        shown = [c for c in columns if c.name not in unchanged and (c.key or not key_only) and op is not Op.TRUNCATE]
        change = {
            "offset": row["_offset"],
            "lsn": format_lsn(row["_commit_lsn"]),
            "xid": row["_xid"],
            "committed": row["_commit_timestamp"].isoformat(),
            "table": found.shape.qualified_name,
            "change": op.name.lower(),
            "row": {column.name: row[column.storage_name] for column in shown},
        }
        if unchanged:
            change["unchanged"] = unchanged
        if op is Op.UPDATE and row.get("_old"):
            kept = [c for c in columns if f"_old.{c.storage_name}" in row and (c.key or row["_old"] == OldImage.FULL)]
            change["old"] = {column.name: row[f"_old.{column.storage_name}"] for column in kept}
        result.append(change)
    return result


def _print(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    for row in rows:
        print(json.dumps(row, default=str) if as_json else _line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    values = [f"{name}={'NULL' if value is None else repr(value)}" for name, value in row["row"].items()]
    values += [f"{name}=(unchanged)" for name in row.get("unchanged", ())]
    if "old" in row:
        values.append("was " + ", ".join(f"{name}={value!r}" for name, value in row["old"].items()))
    committed = row["committed"][:19].replace("T", " ")
    return f"{row['offset']:>12} {committed} {row['lsn']:>12} {row['xid']:>8} {row['change']:8} {row['table']} " + (
        ", ".join(values)
    )


def _commit_times(log: LogReader, extents: Sequence[Extent]) -> tuple[str | None, str | None]:
    """When the oldest and the newest transaction that are there were committed, by the server's clock."""
    blocks = (
        [*itertools.islice(log.blocks_of(extents[0]), 1), *list(log.blocks_of(extents[-1]))[-1:]] if extents else []
    )
    times = [log.directory(block).transactions["commit_timestamp"] for block in blocks]
    if not times:
        return None, None
    return times[0][0].as_py().isoformat(), times[-1][-1].as_py().isoformat()


def _rules(config: Config) -> str:
    limit = f", at most {size_of(config.log.max_bytes)}" if config.log.max_bytes else ", no limit on size"
    return f"{config.log.retention_hours:g} hours{limit}"


def positive(value: int, option: str) -> int:
    if value < 0:
        raise ConfigurationError(f"{option}: found {value}, expected a number that is not negative")
    return value

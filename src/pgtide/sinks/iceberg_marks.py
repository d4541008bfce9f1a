"""What the commits of a mirror table say of it: the mark in a commit's summary, and the version that marks add up to.

Nothing else is kept anywhere about how far a table is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from pgtide.errors import TableError
from pgtide.sinks import Conflict, Mark, Version
from pgtide.sinks.iceberg_table import MAIN, IcebergTable

BESIDE = "pgtide-load"  # the branch of a load that is to replace what main has; `sweep` leaves it alone
_OURS = "pgtide."  # what the names of properties begin with that say what the columns are
LOG, OFFSET, SHAPE = "pgtide.log", "pgtide.offset", "pgtide.shape"
CHANGES, LOAD, RANGES = "pgtide.changes", "pgtide.load", "pgtide.ranges"


def base_of(version: Version) -> str:
    return BESIDE if version.beside else MAIN


def version_of(table: IcebergTable, branch: str = MAIN) -> Version:
    head = table.head(branch)
    mark: Mark | None = None
    ranges: set[str] = set()
    has_rows, rows = False, 0
    for snapshot_id, summary in account(table, branch):
        if snapshot_id == head:
            has_rows, rows = _has_rows(summary), int(summary.get("total-records", "0"))
        if LOG not in summary:
            continue
        found = _mark(summary)
        mark = mark or replace(found, ranges=())
        if mark.offset is None and found.offset is None and found.load == mark.load:
            ranges.update(found.ranges)
    beside = branch == BESIDE
    return Version(table.identifier, head, has_rows, mark, frozenset(ranges), table.properties(), rows, beside)


def account(table: IcebergTable, branch: str = MAIN) -> Iterator[tuple[int, dict[str, str]]]:
    """The commits that say what the table holds: from its head down to the newest mark.

    A loading table's ranges are spread over the commits since its load began, so all of those belong to it.
    """
    newest: Mark | None = None
    for snapshot_id, summary in table.summaries(table.head(branch)):
        yield snapshot_id, summary
        if LOG in summary:
            found = _mark(summary)
            newest = newest or found
            loading = newest.offset is None and found.offset is None and found.load == newest.load
            if not loading or RANGES not in summary:
                return


def _mark(summary: dict[str, str]) -> Mark:
    return Mark(
        log_id=summary[LOG],
        shape=summary.get(SHAPE, ""),
        offset=int(summary[OFFSET]) if OFFSET in summary else None,
        changes=int(summary.get(CHANGES, "0")),
        load=summary.get(LOAD),
        ranges=tuple(json.loads(summary.get(RANGES, "[]"))),
    )


def summary_of(mark: Mark) -> dict[str, str]:
    summary = {LOG: mark.log_id, SHAPE: mark.shape, CHANGES: str(mark.changes)}
    if mark.offset is not None:
        summary[OFFSET] = str(mark.offset)
    if mark.load is not None:
        summary[LOAD] = mark.load
    if mark.ranges:
        summary[RANGES] = json.dumps(mark.ranges)
    return summary


def _has_rows(summary: dict[str, str]) -> bool:
    return summary.get("total-records", "1") != "0"


def version_after(table: IcebergTable, version: Version, branch: str, mark: Mark) -> Version:
    """What the version has become on the branch."""
    head = table.head(branch)
    summary = next(table.summaries(head))[1]
    assert summary.get(LOG) == mark.log_id, "the commit on the branch does not carry the mark"
    # Ranges count only together with those read under the same snapshot.
    same_load = version.mark is not None and version.mark.load == mark.load
    earlier = version.loaded_ranges if same_load else frozenset()
    ranges = earlier | set(mark.ranges) if mark.offset is None else frozenset()
    return replace(
        version,
        snapshot_id=head,
        has_rows=_has_rows(summary),
        mark=replace(mark, ranges=()),
        loaded_ranges=ranges,
        rows=int(summary.get("total-records", "0")),
    )


def has_moved(table: IcebergTable, version: Version) -> bool:
    """Whether the table has other rows than the version, or other columns: those are shared with a state beside."""
    found = table.properties()
    ours = {name for name in found.keys() | version.properties.keys() if name.startswith(_OURS)}
    return table.head(base_of(version)) != version.snapshot_id or any(
        found.get(name) != version.properties.get(name) for name in ours
    )


def check_not_moved(table: IcebergTable, version: Version) -> None:
    if has_moved(table, version):
        raise Conflict(f"{version.target} has moved since its mark was read.")


def check_ours(version: Version, log_id: str) -> None:
    """Refuses a table that holds rows we cannot account for."""
    if version.mark is None and version.has_rows:
        raise TableError(
            f"{version.target} has rows but no mark of pgtide, so it is not known what they are.",
            remedy=f"Drop it (DROP TABLE {version.target}) or mirror into another namespace ([mirror] namespace).",
        )
    if version.mark is not None and version.mark.log_id != log_id:
        raise TableError(
            f"{version.target} follows another log ({version.mark.log_id}, this one is {log_id}).",
            remedy=f"Drop it (DROP TABLE {version.target}) to load it anew, or mirror into another namespace.",
        )

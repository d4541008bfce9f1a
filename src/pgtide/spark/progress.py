"""How far the mirror has got, for people and for retention: `<log>/readers/mirror.json`, replaced after each batch."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pgtide.failpoints import declare, reach
from pgtide.log.retention import report_reader
from pgtide.lsn import format_lsn
from pgtide.spark.apply import MirrorTable
from pgtide.spark.points import Points

NAME = "mirror"

REPORTED = declare("mirror.reported", "the mirror has written down how far it got")


class Progress:
    def __init__(self, log_location: str, log_id: str) -> None:
        self._log_location = log_location
        self._log_id = log_id

    def write(
        self,
        tables: Iterable[MirrorTable],
        done: int,
        points: Points,
        upkeep: dict[str, Any],
        timings: dict[str, dict[str, float]],
        point_error: str,
    ) -> None:
        """`offset` is the start of what the mirror still needs: parked tables and those that join hold it back."""
        listed = list(tables)
        kept = [table.needs_from for table in listed if table.needs_from is not None and not table.removed]
        kept += [table.clean_to for table in listed if (table.error or table.catching_up) and not table.removed]
        needed = min(kept, default=done)
        moment = points.last
        content = {
            "name": NAME,
            "log_id": self._log_id,
            "offset": min(needed, done),
            "tables": {table.name: _table(table) for table in listed},
            "point": moment and {
                "lsn": format_lsn(moment.lsn),
                "offset": moment.offset,
                "commit_timestamp": moment.commit_timestamp and moment.commit_timestamp.isoformat(),
            },
            "point_error": point_error or None,
            "upkeep": upkeep,
            "timings": timings,
            "updated_at": datetime.now(UTC).isoformat(),
        }  # fmt: skip
        report_reader(self._log_location, NAME, content)
        reach(REPORTED)


def _table(table: MirrorTable) -> dict[str, Any]:
    mark = table.mark
    loading = table.joining or not table.is_loaded
    state = "removed" if table.removed else "parked" if table.error else "loading" if loading else "streaming"
    return {
        "state": state,
        "rows_applied": mark.changes if mark else 0,
        "applied_offset": None if loading else table.clean_to,
        "error": table.error or None,
        "load": table.progress.report() if table.progress.is_under_way else None,
        "load_error": table.load_error or None,
    }

"""How far the load of a table is: rows, bytes, ranges, how fast, and how long it will take.

For the report that the mirror leaves beside the log, for the terminal, and as metrics.  Ranges are of about the same
size in the source, so the share of ranges that are loaded is the share of bytes; a rate is that of this run, not of
one before that was broken off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pgtide.metrics import gauge

_rows = gauge("snapshot_rows", "Rows of a table that is being loaded that the lake has.", ["table"])
_bytes = gauge(
    "snapshot_bytes", "Bytes of a table in the source, its large values included, that are loaded.", ["table"]
)
_bytes_total = gauge("snapshot_bytes_expected", "Bytes that the table has in the source.", ["table"])
_ranges = gauge("snapshot_ranges", "Ranges of a table that are loaded.", ["table"])
_ranges_total = gauge("snapshot_ranges_expected", "Ranges that the table was cut into.", ["table"])
_eta = gauge("snapshot_eta_seconds", "How long the load will take at the rate so far; -1: not known yet.", ["table"])


class LoadProgress:
    """Of one table; written by the thread that loads it, read by others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        self._table = ""
        self._began_s = 0.0
        self._ranges_before = 0
        self._rows_before = 0
        self.rows = self.bytes_total = self.ranges = self.ranges_total = 0
        self._made_way = 0

    def begin(self, table: str, bytes_total: int, ranges: int, ranges_total: int, rows: int) -> None:
        """A run begins, or goes on with what an earlier one has loaded."""
        with self._changing:
            self._table, self._began_s = table, self._clock()
            self.bytes_total, self.ranges_total = bytes_total, ranges_total
            self.ranges = self._ranges_before = ranges
            self.rows = self._rows_before = rows
            self._made_way = 0
        self._show()

    def loaded(self, ranges: int, rows: int) -> None:
        """So many more ranges are loaded; `rows` are all that the table has now."""
        with self._changing:
            self.ranges, self.rows = self.ranges + ranges, rows
        self._show()

    def cut_further(self, more_ranges: int) -> None:
        """Some ranges were cut into more, because reading them took too long."""
        with self._changing:
            self.ranges_total += more_ranges

    def made_way(self) -> None:
        """What was being read was left for somebody who waited for our lock; it is read again."""
        with self._changing:
            self._made_way += 1

    def end(self) -> None:
        with self._changing:
            table, self._table = self._table, ""
        if table:
            for metric in (_rows, _bytes, _bytes_total, _ranges, _ranges_total, _eta):
                metric.remove(table)

    @property
    def is_under_way(self) -> bool:
        return bool(self._table)

    def report(self) -> dict[str, Any]:
        with self._changing:
            passed_s = max(self._clock() - self._began_s, 1e-9)
            done = self.ranges - self._ranges_before
            left = max(0, self.ranges_total - self.ranges)
            return {
                "rows": self.rows,
                "bytes": self.bytes_total * self.ranges // max(self.ranges_total, 1),
                "bytes_total": self.bytes_total,
                "ranges": self.ranges,
                "ranges_total": self.ranges_total,
                "rows_per_s": round((self.rows - self._rows_before) / passed_s, 1) if done else None,
                "eta_seconds": round(passed_s * left / done, 1) if done else None,
                "made_way": self._made_way,
            }

    def _show(self) -> None:
        found = self.report()
        for metric, key in (
            (_rows, "rows"), (_bytes, "bytes"), (_bytes_total, "bytes_total"), (_ranges, "ranges"),
            (_ranges_total, "ranges_total"), (_eta, "eta_seconds"),
        ):  # fmt: skip
            metric.labels(self._table).set(-1 if found[key] is None else found[key])


def load_line(report: dict[str, Any]) -> str:
    """The same for people."""
    gib = 1 << 30
    line = (
        f"{report['rows']:,} rows, {report['bytes'] / gib:.2f} of {report['bytes_total'] / gib:.2f} GiB, "
        f"{report['ranges']} of {report['ranges_total']} ranges"
    )
    if report.get("made_way"):
        line += f", {report['made_way']} times left to others who lock the table"
    if report["rows_per_s"] is None:
        return line
    left_s = int(report["eta_seconds"])
    return f"{line}, {report['rows_per_s']:,.0f} rows/s, about {left_s // 60}:{left_s % 60:02} min left"

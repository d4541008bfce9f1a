"""The live view: source and mirror side by side in a terminal, plain lines elsewhere.

Milestones are lines that stay; below them, in a terminal, a table is drawn anew several times a second.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pgtide.demo.observe import Seen
from pgtide.demo.shop import TABLES
from pgtide.lsn import format_lsn

_RATE_WINDOW_S = 3.0
_PLAIN_EVERY_S = 5.0


class View(Protocol):
    """Where the demo tells what happens."""

    def milestone(self, text: str, style: str = "") -> None: ...
    def show(self, seen: Seen, doing: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def view_for(*, as_json: bool) -> View:
    """With --json standard output belongs to the result, so the story goes to standard error."""
    if not as_json and sys.stdout.isatty():
        return LiveView(Console())
    return PlainView(sys.stderr if as_json else sys.stdout)


class Rates:
    """Transactions per second over the last few seconds."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()

    def transactions_per_second(self, seen: Seen) -> float:
        self._recent.append((seen.at_s, seen.tally.committed))
        while seen.at_s - self._recent[0][0] > _RATE_WINDOW_S and len(self._recent) > 2:
            self._recent.popleft()
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class PlainView:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rates = Rates()
        self.began_s = time.monotonic()
        self._shown_s = self.began_s

    def milestone(self, text: str, style: str = "") -> None:
        self._print(text)

    def show(self, seen: Seen, doing: str) -> None:
        rate = self._rates.transactions_per_second(seen)
        if seen.at_s - self._shown_s >= _PLAIN_EVERY_S:
            self._shown_s = seen.at_s
            mirrored = sum(rows or 0 for rows in seen.mirror_rows.values())
            self._print(
                f"  {doing}: {sum(seen.source_rows.values()):,} rows in the source, {mirrored:,} in the mirror, "
                f"{rate:.0f} transactions/s, point {_point(seen)}"
            )

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:5.1f} s  {text}", file=self._out, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveView:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._rates = Rates()
        self.began_s = time.monotonic()
        # Drawn by us alone: a refreshing thread of its own would only repeat what it has.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def milestone(self, text: str, style: str = "") -> None:
        line = Text(f"{time.monotonic() - self.began_s:5.1f} s  ", style="dim")
        self._console.print(line.append(text, style=style or "default not dim"))

    def show(self, seen: Seen, doing: str) -> None:
        self._live.update(render(seen, doing, self._rates.transactions_per_second(seen)), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def render(seen: Seen, doing: str, transactions_per_second: float) -> Panel:
    """What the terminal shows at one moment."""
    rows = Table(box=None, pad_edge=False, expand=False)
    rows.add_column("table")
    for heading in ("rows in Postgres", "rows in the mirror", "difference"):
        rows.add_column(heading, justify="right", min_width=12)
    for table in TABLES:
        source, mirror = seen.source_rows[table.name], seen.mirror_rows[table.name]
        rows.add_row(table.name, f"{source:,}", "–" if mirror is None else f"{mirror:,}", _difference(source, mirror))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("traffic", f"{transactions_per_second:.0f} transactions/s", _traffic(seen))
    facts.add_row("log", "–" if seen.log is None else format_lsn(seen.log.durable_lsn), _log_lag(seen))
    facts.add_row("mirror", _applied(seen), _mirror_lag(seen))
    facts.add_row("point", _point(seen), "latest consistent point: all tables as of this commit")
    troubles = [Text(trouble, style="red") for trouble in seen.troubles]
    return Panel(Group(rows, "", facts, *troubles), title=doing, title_align="left", expand=False)


def _difference(source: int, mirror: int | None) -> Text:
    if mirror is None:
        return Text("–")
    return Text("0", style="green") if source == mirror else Text(f"{mirror - source:+,}", style="yellow")


def _traffic(seen: Seen) -> str:
    return f"{seen.tally.committed:,} committed, {seen.tally.rolled_back:,} rolled back"


def _log_lag(seen: Seen) -> str:
    lag_bytes = seen.log_lag_bytes
    if lag_bytes is None:
        return "not there yet"
    return "has everything" if lag_bytes == 0 else f"{lag_bytes / 1024:,.0f} KiB of WAL behind Postgres"


def _applied(seen: Seen) -> str:
    return "–" if seen.applied_offset is None else f"offset {seen.applied_offset:,}"


def _mirror_lag(seen: Seen) -> str:
    lag = seen.mirror_lag_changes
    if lag is None:
        return "not there yet"
    return "has everything that is in the log" if lag == 0 else f"{lag:,} changes behind the log"


def _point(seen: Seen) -> str:
    if seen.point is None:
        return "none yet"
    age = "as loaded" if seen.point.age_s is None else f"{seen.point.age_s:.1f} s ago"
    return f"{format_lsn(seen.point.lsn)}, {age}"

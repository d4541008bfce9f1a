"""The view shows both sides, and the lag between them."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime

from rich.console import Console

from pgtide.demo.observe import CatchUp, PointSeen, Seen
from pgtide.demo.shop import TABLES
from pgtide.demo.traffic import Tally
from pgtide.demo.view import LiveView, PlainView, Rates, render
from pgtide.log.reader import LogEnd

POINT = PointSeen(0x1000, 80, datetime(2024, 1, 1, tzinfo=UTC))
SEEN = Seen(
    at_s=10.0,
    source_rows={table.name: 1_200 for table in TABLES},
    mirror_rows={table.name: 1_150 for table in TABLES} | {"orders": None},
    tally=Tally(300, 20),
    wal_lsn=0x3000,
    log=LogEnd(end_offset=100, durable_lsn=0x2000, last_commit_lsn=0x1F00),
    applied_offset=90,
    point=POINT,
    states={table.qualified_name: "streaming" for table in TABLES},
    troubles=(),
)


def shown(seen: Seen) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(render(seen, "following", 75.4))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_source_and_mirror_stand_side_by_side() -> None:
    text = shown(SEEN)
    rows = {line.split()[1]: line.split()[2:5] for line in text.splitlines() if "1,200" in line}
    assert rows["customers"] == ["1,200", "1,150", "-50"]
    assert rows["orders"] == ["1,200", "–", "–"]
    assert rows.keys() == {table.name for table in TABLES}


def test_lag_rate_and_point_are_shown() -> None:
    text = shown(SEEN)
    for words in ("75 transactions/s", "300 committed, 20 rolled back", "4 KiB of WAL", "10 changes behind", "0/1000"):
        assert words in text


def test_before_anything_is_there_the_view_says_so() -> None:
    text = shown(replace(SEEN, log=None, applied_offset=None, point=None, mirror_rows=dict.fromkeys(SEEN.mirror_rows)))
    assert "none yet" in text
    assert text.count("not there yet") == 2


def test_a_parked_table_is_named() -> None:
    assert "public.orders: no room" in shown(replace(SEEN, troubles=("public.orders: no room",)))


def test_the_rate_is_of_the_last_seconds_only() -> None:
    rates = Rates()
    assert rates.transactions_per_second(SEEN) == 0
    for second in range(1, 20):
        seen = replace(SEEN, at_s=10.0 + second, tally=Tally(300 + 10 * second, 0))
        assert rates.transactions_per_second(seen) == 10
    assert rates.transactions_per_second(replace(seen, at_s=60.0)) < 1


def test_without_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    view = PlainView(out)
    with view:
        view.milestone("It begins.", "bold")
        view.show(replace(SEEN, at_s=view.began_s + 60), "loading")
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("It begins.")
    assert "loading: 6,000 rows in the source, 4,600 in the mirror" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_milestones_stay_and_the_table_goes() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=140)) as view:
        view.milestone("It begins.")
        view.show(SEEN, "loading")
    text = out.getvalue()
    assert text.index("It begins.") < text.index("customers")
    assert text.endswith(("\x1b[2K", "\x1b[?25h"))  # the table's lines were erased


def test_loaded_means_every_table_and_a_point() -> None:
    assert SEEN.loaded
    assert not replace(SEEN, point=None).loaded
    assert not replace(SEEN, states=SEEN.states | {"public.orders": "loading"}).loaded
    assert not replace(SEEN, states={"public.orders": "streaming"}).loaded


def test_caught_up_means_applied_up_to_what_the_log_held_at_that_wal_position() -> None:
    caught_up = CatchUp(0x3000)
    assert not caught_up(SEEN), "the log is not there yet"
    assert not caught_up(replace(SEEN, log=LogEnd(120, 0x3000, 0x2F00)))
    assert not caught_up(replace(SEEN, log=LogEnd(150, 0x4000, 0x3F00), applied_offset=120)), "no point yet"
    assert caught_up(
        replace(SEEN, log=LogEnd(150, 0x4000, 0x3F00), applied_offset=120, point=replace(POINT, offset=120))
    )

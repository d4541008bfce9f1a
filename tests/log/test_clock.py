"""A clock that goes backwards, or went wrong for a while: order, retention, rolling and the marker do not follow it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from pgtide.change import TRANSACTIONS, Committed
from pgtide.log.check import check_log
from pgtide.log.marker import read_marker
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal
from pgtide.log.writer import LogWriter
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()
HOUR_S = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_log(tmp_path / "log")


def committed_at(transaction: Committed, timestamp_us: int) -> Committed:
    column = pa.array([timestamp_us], pa.int64()).cast(TRANSACTIONS.field("commit_timestamp").type)
    index = TRANSACTIONS.get_field_index("commit_timestamp")
    changed = transaction.transactions.set_column(index, TRANSACTIONS.field(index), column)
    return Committed(changed, transaction.tables)


def test_transactions_stay_in_commit_order_when_their_times_go_backwards(path: Path) -> None:
    writer = LogWriter(path)
    for number in range(6):
        one = transaction(200 + 10 * number, [(ORDERS, number, "a")])
        writer.write([committed_at(one, (10 - number) * 1_000_000)])
    assert [key for _, key, _ in contents(path)] == [0, 1, 2, 3, 4, 5]
    log = LogReader(path)
    times = log.transactions(0, 6)["commit_timestamp"].cast(pa.int64()).to_pylist()
    assert times == [10_000_000, 9_000_000, 8_000_000, 7_000_000, 6_000_000, 5_000_000]
    assert [log.position_after(lsn) for lsn in (199, 200, 225, 250)] == [0, 1, 3, 6]
    assert log.boundary(0, 3, 1 << 30) == 3
    assert check_log(path).problems == []


def segments_written_at(path: Path, *hours_ago: float) -> float:
    """One segment with one change for each, and the newest; returns now."""
    now_s = time.time()
    writer = LogWriter(path, segment_bytes=1)
    for number in range(len(hours_ago) + 1):
        writer.write([transaction(200 + 10 * number, [(ORDERS, number, "a")])])
    for file, ago in zip(sorted((path / "segments").iterdir()), [*hours_ago, 0], strict=True):
        os.utime(file, (now_s, now_s - ago * HOUR_S))
    return now_s


@pytest.mark.parametrize(
    ("hours_ago", "gone"),
    [
        ((4, 3, 0.5), 2),  # a clock that is right
        ((4, -9000, 3, 0.5), 3),  # a year ahead for a while: the segment is older than those after it
        ((4, 3, -9000), 2),  # ahead until now: nothing after it tells how old it is
        ((0.6, 500_000, 500_000), 0),  # 1970 for a while: not older than those before it
        ((-1, -0.5, -0.2), 0),  # set back by an hour just now: everything is from the future, nothing is old
    ],
)
def test_segments_go_when_they_are_old_whatever_the_clock_said_when_they_were_written(
    path: Path, hours_ago: tuple[float, ...], gone: int
) -> None:
    now_s = segments_written_at(path, *hours_ago)
    assert len(plan_removal(path, retention_s=HOUR_S, max_bytes=0, now_s=now_s).segments) == gone


def test_a_clock_that_is_set_back_lets_less_go_not_more(path: Path) -> None:
    now_s = segments_written_at(path, 2, 1.5)
    going = {
        hours: len(plan_removal(path, retention_s=HOUR_S, max_bytes=0, now_s=now_s - hours * HOUR_S).segments)
        for hours in (0, 0.7, 3, 1e5)
    }
    assert going == {0: 2, 0.7: 1, 3: 0, 1e5: 0}


def test_segments_roll_by_their_age_and_never_without_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: 0.0)
    writer = LogWriter(path, segment_age_s=HOUR_S, clock=lambda: now_s)

    def segments() -> int:
        return len(list((path / "segments").iterdir()))

    for number, (passed_s, expected) in enumerate([(0, 1), (HOUR_S - 1, 1), (1, 2), (3 * HOUR_S, 3), (0, 3)]):
        now_s += passed_s
        writer.write([transaction(200 + 10 * number, [(ORDERS, number, "a")])])
        assert segments() == expected
    now_s += HOUR_S
    writer.advance(1000)
    assert segments() == 3, "an idle position needs no segment"
    assert len(contents(path)) == 5


def test_the_marker_that_counts_is_chosen_by_epoch_and_sequence(path: Path) -> None:
    LogWriter(path).write([transaction(200, [(ORDERS, 1, "a")])])
    writer = LogWriter(path)
    for number in range(2, 5):
        writer.write([transaction(200 + number, [(ORDERS, number, "a")])])
        for age_s, file in enumerate(sorted((path / "control").glob("marker-*"))):
            os.utime(file, (0, 1_000_000 - age_s))  # the newest seems to be the oldest
        epoch, marker = read_marker(path / "control")
        assert (epoch, marker.end_offset) == (2, number)

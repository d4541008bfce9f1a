"""Retention: what every reader has passed goes when it is old; nobody loses anything without an error."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from pgtide.errors import LogRangeError
from pgtide.log.check import check_log
from pgtide.log.control import Removed, record_removed, removed
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.log.writer import LogWriter
from tests.log.building import contents, new_log, shape, transaction

BUSY = shape()
QUIET = shape(16400, "quiet")
HOUR_S = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of five segments with two changes each; a quiet table has one change, in the second."""
    path = new_log(tmp_path / "log")
    writer = LogWriter(path, segment_bytes=1)
    for number in range(5):
        second = (QUIET, 0, "q") if number == 1 else (BUSY, number, "b")
        writer.write([transaction(200 + 10 * number, [(BUSY, number, "a"), second])])
    writer.close()
    return path


def register(path: Path, name: str, offset: int) -> None:
    (path / "readers").mkdir(exist_ok=True)
    (path / "readers" / f"{name}.json").write_text(json.dumps({"offset": offset}))


def later() -> float:
    return time.time() + 2 * HOUR_S


def test_nothing_young_goes(path: Path) -> None:
    assert plan_removal(path, retention_s=HOUR_S, max_bytes=0).segments == ()


def test_without_readers_everything_old_goes_but_the_newest_segment(path: Path) -> None:
    remove(path, plan_removal(path, retention_s=HOUR_S, max_bytes=0, now_s=later()))
    assert [offset for offset, _, _ in contents(path)] == [8, 9]
    assert LogWriter(path).end_offset == 10


def test_a_slow_reader_keeps_what_it_needs(path: Path) -> None:
    register(path, "fast", 10)
    register(path, "slow", 5)
    removal = plan_removal(path, retention_s=HOUR_S, max_bytes=0, now_s=later())
    assert removal.end_offset == 4
    assert removal.losers == ()
    remove(path, removal)
    assert [offset for offset, _, _ in contents(path)] == [4, 5, 6, 7, 8, 9]
    with pytest.raises(LogRangeError, match=r"0 to 4 .*retention removed") as error:
        LogReader(path).plan(0, 10)
    assert error.value.remedy == "start from a later offset (startingOffsets), or take a new snapshot of the tables"


def test_a_dead_reader_keeps_what_it_needs_as_long_as_there_is_no_limit(path: Path) -> None:
    register(path, "dead", 0)
    register(path, "alive", 10)
    assert plan_removal(path, retention_s=0, max_bytes=0, now_s=later()).segments == ()


def test_the_size_limit_takes_the_oldest_and_names_who_loses(path: Path) -> None:
    register(path, "dead", 1)
    register(path, "alive", 9)
    size = sum(file.stat().st_size for file in (path / "segments").iterdir())
    removal = plan_removal(path, retention_s=HOUR_S, max_bytes=size // 2)
    assert [reader.name for reader in removal.losers] == ["dead"]
    assert 0 < removal.nbytes < size
    remove(path, removal)
    assert sum(file.stat().st_size for file in (path / "segments").iterdir()) <= size // 2
    with pytest.raises(LogRangeError, match=r"1 to .* no longer in the log .* retention removed them") as error:
        LogReader(path).plan(1, 10)
    assert "take a new snapshot" in error.value.remedy
    assert [piece.start for piece in LogReader(path).plan(9, 10)] == [9]


def test_a_reader_of_a_quiet_table_loses_nothing(path: Path) -> None:
    remove(path, plan_removal(path, retention_s=0, max_bytes=0, now_s=later()))
    reader = LogReader(path)
    assert reader.plan(4, 10, QUIET.relation_oid) == []
    with pytest.raises(LogRangeError, match="retention removed"):
        reader.plan(3, 10, QUIET.relation_oid)
    with pytest.raises(LogRangeError, match="retention removed"):
        reader.plan(4, 10, BUSY.relation_oid)
    assert [piece.entry.first_offset for piece in reader.plan(8, 10, BUSY.relation_oid)] == [8]


def test_a_prune_beside_another_forgets_nothing_of_what_went(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.stat().st_size for file in (path / "segments").iterdir())
    little = plan_removal(path, retention_s=HOUR_S, max_bytes=size - 1)
    much = plan_removal(path, retention_s=0, max_bytes=0, now_s=later())
    assert (little.end_offset, much.end_offset) == (2, 8)
    other = threading.Thread(target=remove, args=[path, much])

    def paused(log_path: Path, removed: Removed) -> None:
        """The first has looked at what is recorded, and will record; the other does the same in between, if it can."""
        monkeypatch.setattr("pgtide.log.retention.record_removed", record_removed)
        other.start()
        other.join(0.5)
        record_removed(log_path, removed)

    monkeypatch.setattr("pgtide.log.retention.record_removed", paused)
    remove(path, little)
    other.join()
    found = removed(path)
    assert (found.end_offset, found.end_lsn) == (8, 230)
    assert found.last_offsets == {BUSY.relation_oid: 7, QUIET.relation_oid: 3}
    assert [offset for offset, _, _ in contents(path)] == [8, 9]


def test_superseded_segments_go_and_their_successors_stay(path: Path) -> None:
    writer = LogWriter(path, segment_bytes=1)
    writer.write([transaction(300, [(BUSY, 7, "half")], ends=False)])
    successor = LogWriter(path)
    successor.write([transaction(300, [(BUSY, 7, "whole")])])
    before = contents(path)
    removal = plan_removal(path, retention_s=HOUR_S, max_bytes=0)
    assert len(removal.segments) == 1
    remove(path, removal)
    assert contents(path) == before


def test_a_clean_log_checks_clean_and_a_damaged_one_does_not(path: Path) -> None:
    clean = check_log(path)
    assert (clean.changes, clean.transactions, clean.problems) == (10, 5, [])
    segment = sorted((path / "segments").iterdir())[2]
    damaged = bytearray(segment.read_bytes())
    damaged[-3] ^= 1
    segment.write_bytes(damaged)
    found = check_log(path)
    assert len(found.problems) == 1
    assert segment.name in found.problems[0].what
    assert found.changes == 8

"""Readers beside writers that roll and take over, writers that fail in the middle of failing, retention beside both."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from pgtide.capture.appender import Appender
from pgtide.change import LargeTransaction
from pgtide.errors import FencedError, LogRangeError
from pgtide.log import large as large_module
from pgtide.log import layout as layout_module
from pgtide.log import marker as marker_module
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.log.segment import SegmentName, list_segments
from pgtide.log.writer import LogWriter
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()
FOR_EVER_S = 1e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_log(tmp_path / "log")


def spooled(folder: Path, end_lsn: int) -> LargeTransaction:
    buffer = TransactionBuffer(Spool(folder), memory_bytes=1)
    buffer.begin(7)
    buffer.append(7, np.array([7, 7], np.uint32), transaction(end_lsn, [(ORDERS, 2, "b"), (ORDERS, 3, "c")]).tables)
    committed = buffer.commit(7, Commit(end_lsn - 8, end_lsn, 0))
    assert isinstance(committed, LargeTransaction)
    return committed


def test_a_writer_that_rolls_or_takes_over_while_segments_are_listed_confuses_no_reader(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(path, segment_bytes=1)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    writer.write([transaction(300, [(ORDERS, 9, "half")], ends=False)])
    real = list_segments

    def listing(folder: Path) -> list[SegmentName]:
        names = real(folder)
        monkeypatch.setattr(layout_module, "list_segments", real)
        LogWriter(path).write([transaction(250, [(ORDERS, 2, "whole")])])
        return names

    reader = LogReader(path)
    monkeypatch.setattr(layout_module, "list_segments", listing)
    assert [extent.end_offset for extent in reader.extents()] == [1], "only what was durable before the listing"
    assert contents(path) == [(0, 1, "a"), (1, 2, "whole")]


def test_a_restart_that_fails_again_leaves_other_files_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "full")

    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    with monkeypatch.context() as patched:
        patched.setattr(marker_module, "create_durably", full)
        with pytest.raises(OSError, match="full"):
            writer.restart()
        others = [(tmp_path / f"other{number}").open("wb") for number in range(8)]
        with pytest.raises(OSError, match="full"):
            writer.restart()
    for other in others:
        other.write(b"somebody else's")
        other.close()


def test_a_writer_that_was_fenced_does_not_take_the_log_back(path: Path) -> None:
    first = LogWriter(path)
    first.write([transaction(200, [(ORDERS, 1, "a")])])
    second = LogWriter(path)
    with pytest.raises(FencedError):
        first.restart()
    second.write([transaction(300, [(ORDERS, 2, "b")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "b")]


def test_a_failed_fsync_of_a_spooled_file_is_not_taken_for_success_later(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = spooled(tmp_path / "spool", 300)
    calls: list[Path] = []

    def failing_once(file: Path) -> None:
        calls.append(file)
        if len(calls) == 1:
            raise OSError(errno.EIO, "the pages are clean now, the rows are not on disk")

    monkeypatch.setattr(large_module, "fsync_path", failing_once)
    appender = Appender(LogWriter(path), lambda: None)
    appender.offer([large], 1)
    appender.drained(10)
    assert appender.durable_lsn < 300
    assert appender.failure is not None, "the transaction must be read again"


def test_retention_does_not_cut_inside_a_transaction(path: Path) -> None:
    writer = LogWriter(path, segment_bytes=1)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    writer.write([transaction(300, [(ORDERS, 2, "first half")], ends=False)])
    writer.write([transaction(300, [(ORDERS, 3, "second half")], first_place=1)])
    writer.write([transaction(400, [(ORDERS, 4, "d")])])
    sizes = [file.stat().st_size for file in sorted((path / "segments").iterdir())]
    remove(path, plan_removal(path, retention_s=FOR_EVER_S, max_bytes=sum(sizes[2:])))
    assert [note for _, _, note in contents(path)] == ["first half", "second half", "d"]


def test_what_retention_took_is_told_wherever_it_is_asked_for(path: Path) -> None:
    writer = LogWriter(path, segment_bytes=1)
    for number in range(5):
        writer.write([transaction(200 + 100 * number, [(ORDERS, number, "a")])])
    reader = LogReader(path)
    planned = reader.plan(0, 5)
    sizes = [file.stat().st_size for file in sorted((path / "segments").iterdir())]
    stale = plan_removal(path, retention_s=FOR_EVER_S, max_bytes=sum(sizes[1:]))
    remove(path, plan_removal(path, retention_s=FOR_EVER_S, max_bytes=1))
    remove(path, stale)
    for asked in (lambda: reader.read(planned[0]), lambda: reader.position_after(200), lambda: reader.plan(0, 5)):
        with pytest.raises(LogRangeError, match="retention removed"):
            asked()
    assert reader.position_after(500) == 4


def test_of_two_tables_with_one_name_the_newer_one_counts(path: Path) -> None:
    writer = LogWriter(path)
    for number in range(10):
        writer.write([transaction(200 + 10 * number, [(shape(20_000 + number, f"t{number}"), 1, "dropped")])])
        writer.write([transaction(205 + 10 * number, [(shape(30_000 - number, f"t{number}"), 1, "made again")])])
    assert {found.relation_oid for found in LogReader(path).shapes().values()} == {30_000 - n for n in range(10)}


def test_batches_count_the_bytes_of_large_transactions(path: Path, tmp_path: Path) -> None:
    writer = LogWriter(path)
    for number in range(3):
        writer.write_large(spooled(tmp_path / str(number), 300 + 100 * number))
    assert LogReader(path).boundary(0, 1000, 10) == 2

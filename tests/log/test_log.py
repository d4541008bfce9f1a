"""The log: what is written is read, under the same offsets, and nothing else ever is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pgtide.errors import FencedError, LogCorruptError, LogError, LogRangeError
from pgtide.log.reader import LogReader
from pgtide.log.segment import Extent, SegmentName, valid_extents
from pgtide.log.writer import LogWriter
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()
ITEMS = shape(16400, "items")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_log(tmp_path / "log")


def test_written_transactions_are_read_in_order_with_consecutive_offsets(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a"), (ITEMS, 10, "x"), (ORDERS, 2, "b")])])
    writer.write([transaction(300, [(ITEMS, 11, "y")]), transaction(400, [(ORDERS, 3, "c")])])
    assert contents(path) == [(0, 1, "a"), (1, 10, "x"), (2, 2, "b"), (3, 11, "y"), (4, 3, "c")]
    end = LogReader(path).end()
    assert (end.end_offset, end.durable_lsn, end.last_commit_lsn) == (5, 400, 392)
    assert LogReader(path).touched(0, 5) == {ORDERS.relation_oid: (0, 4), ITEMS.relation_oid: (1, 3)}


def test_a_table_is_planned_in_the_order_of_its_offsets_when_its_layout_changes_back_and_forth(path: Path) -> None:
    other = replace(ORDERS, replica_identity="f")
    writer = LogWriter(path)
    writer.write([transaction(200 + n, [(other if n % 2 else ORDERS, n, "a"), (ITEMS, n, "b")]) for n in range(6)])
    reader = LogReader(path)
    found = [reader.read(piece) for piece in reader.plan(0, 12, ORDERS.relation_oid)]
    assert [offset for rows in found for offset in rows.rows["_offset"].to_pylist()] == [0, 2, 4, 6, 8, 10]
    assert [rows.shape.replica_identity for rows in found] == ["d", "f"] * 3
    assert len(reader.plan(0, 12, ITEMS.relation_oid)) == 1


def test_a_range_yields_the_same_rows_however_it_is_cut(path: Path) -> None:
    writer = LogWriter(path, segment_bytes=4000)
    for n in range(20):
        writer.write([transaction(200 + n, [(ORDERS, n, "a"), (ORDERS, n, "b")])])
    assert len(list((path / "segments").iterdir())) > 2
    reader = LogReader(path)
    whole = contents(path)
    for start, end in [(0, 7), (7, 8), (8, 40), (13, 26)]:
        rows = [
            (offset, key, note)
            for piece in reader.plan(start, end, ORDERS.relation_oid)
            for batch in [reader.read(piece).rows]
            for offset, key, note in zip(*(batch[c].to_pylist() for c in ("_offset", "c1", "c2")), strict=True)
        ]
        assert rows == whole[start:end]


def test_half_a_transaction_is_not_seen_until_its_end_is_durable(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    first = transaction(300, [(ORDERS, 2, "b"), (ORDERS, 3, "c")], ends=False)
    writer.write([transaction(250, [(ORDERS, 9, "i")]), first])
    assert contents(path) == [(0, 1, "a"), (1, 9, "i")]
    assert writer.durable_lsn == 250
    writer.write([transaction(300, [(ORDERS, 4, "d")], first_place=2), transaction(350, [(ITEMS, 5, "e")])])
    assert contents(path) == [(0, 1, "a"), (1, 9, "i"), (2, 2, "b"), (3, 3, "c"), (4, 4, "d"), (5, 5, "e")]
    ended = LogReader(path).transactions(0, 6)
    assert ended["end_lsn"].to_pylist() == [200, 250, 300, 350]


def test_a_writer_that_takes_over_drops_the_half_transaction_and_keeps_offsets(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    writer.write([transaction(300, [(ORDERS, 2, "half")], ends=False)])
    successor = LogWriter(path)
    assert (successor.end_offset, successor.durable_lsn) == (1, 200)
    successor.write([transaction(300, [(ORDERS, 2, "whole"), (ORDERS, 3, "too")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "whole"), (2, 3, "too")]
    with pytest.raises(FencedError):
        writer.write([transaction(300, [(ORDERS, 9, "late")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "whole"), (2, 3, "too")]


def test_blocks_that_were_fsynced_but_not_marked_survive_a_power_loss(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    marker = path / "control" / "marker-0000000001"
    as_of_then = marker.read_bytes()
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    writer.write([transaction(400, [(ORDERS, 3, "c")], ends=False)])
    marker.write_bytes(as_of_then)
    successor = LogWriter(path)
    assert (successor.end_offset, successor.durable_lsn) == (2, 300)
    successor.write([transaction(400, [(ORDERS, 4, "d")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "b"), (2, 4, "d")]


def test_an_idle_position_is_recorded_and_never_goes_back(path: Path) -> None:
    writer = LogWriter(path)
    assert writer.durable_lsn == 100
    writer.advance(500)
    writer.advance(400)
    assert LogReader(path).end().durable_lsn == 500
    writer.close()
    assert LogWriter(path).durable_lsn == 500


def test_writing_goes_on_after_a_failed_write(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    os.close(writer._descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.write([transaction(300, [(ORDERS, 2, "b")])])
    writer._descriptor = -1
    writer.restart()
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "b")]


def test_a_range_that_is_not_there_is_an_error(path: Path) -> None:
    writer = LogWriter(path, segment_bytes=1)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    reader = LogReader(path)
    with pytest.raises(LogRangeError, match="beyond the end"):
        reader.plan(0, 3)
    min((path / "segments").iterdir()).unlink()
    with pytest.raises(LogCorruptError, match="retention did not remove"):
        LogReader(path).plan(0, 2)


def test_a_folder_without_a_log_says_so(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"no change log"):
        LogReader(tmp_path)


def test_position_after_an_lsn_is_the_first_transaction_that_ends_later(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a"), (ORDERS, 2, "a")]), transaction(300, [(ORDERS, 3, "a")])])
    writer.write([transaction(400, [(ORDERS, 4, "a")])])
    reader = LogReader(path)
    assert [reader.position_after(lsn) for lsn in (0, 199, 200, 299, 300, 399, 400)] == [0, 0, 2, 2, 3, 3, 4]


def test_batches_end_at_transactions(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, n, "a") for n in range(3)]), transaction(300, [(ORDERS, 3, "a")])])
    writer.write([transaction(400, [(ORDERS, n, "a") for n in range(5)])])
    reader = LogReader(path)
    assert [reader.boundary(0, rows, 1 << 30) for rows in (1, 3, 4, 8, 9)] == [3, 3, 4, 4, 9]
    assert reader.boundary(4, 1, 1 << 30) == 9
    assert reader.boundary(9, 1, 1 << 30) == 9
    assert reader.boundary(0, 100, 1) == 3


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([(0, 1), (5, 1)], [((0, 1), 5), ((5, 1), 9)]),
        ([(0, 1), (5, 1), (3, 2)], [((0, 1), 3), ((3, 2), 9)]),
        ([(0, 1), (5, 2), (5, 1)], [((0, 1), 5), ((5, 2), 9)]),
        ([(0, 1), (2, 3), (4, 2)], [((0, 1), 2), ((2, 3), 9)]),
        ([(0, 1), (9, 2)], [((0, 1), 9)]),
    ],
)
def test_a_segment_is_void_from_where_a_higher_epoch_begins(
    names: list[tuple[int, int]], expected: list[tuple[tuple[int, int], int]]
) -> None:
    extents = valid_extents([SegmentName(*name) for name in names], 9)
    assert extents == [Extent(SegmentName(*name), end) for name, end in expected]

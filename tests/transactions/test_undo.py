"""Changes that are taken back one by one: what is left equals a plain list from which they were removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtide.change import LargeTransaction
from pgtide.errors import PgtideError
from pgtide.log.writer import LogWriter
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.places import Places, merged
from pgtide.transactions.row_ids import RowIds
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log
from tests.transactions.rows import inserts, quick_disk, write

XID = 7

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 3), min_size=1, max_size=6)),
        st.tuples(st.just("undo rows"), st.lists(st.integers(0, 3), max_size=3)),
        st.tuples(st.just("undo count"), st.lists(st.integers(0, 3), max_size=3)),
    ),
    min_size=3,
    max_size=25,
)


@given(steps=steps, memory_bytes=st.sampled_from([1, 600, 1 << 20]))
def test_what_is_undone_is_not_in_the_log(steps: list[tuple[str, list[int]]], memory_bytes: int) -> None:
    """A change is to one of four rows; undone are newest changes, or the newest of a row that has one."""
    with quick_disk() as folder:
        path = new_log(folder / "log")
        writer = LogWriter(path)
        buffer = TransactionBuffer(Spool(path / "spool", file_bytes=1000), memory_bytes)
        buffer.begin(XID)
        model: list[tuple[int, int]] = []  # row, key
        key = 0
        for kind, rows in steps:
            if kind == "append":
                changes = inserts(buffer.next_place(XID), [(key + at, row % 2) for at, row in enumerate(rows)])
                buffer.append(XID, np.zeros(len(rows), np.uint32), changes, [b"row %d" % row for row in rows])
                model += [(row, key + at) for at, row in enumerate(rows)]
                key += len(rows)
                assert buffer.memory_bytes <= memory_bytes
            elif kind == "undo rows":
                for row in rows:
                    newest = max((at for at, (each, _) in enumerate(model) if each == row), default=None)
                    if newest is not None:
                        buffer.undo(XID, [b"row %d" % row])
                        del model[newest]
            else:
                count = min(len(rows), len(model))
                buffer.undo(XID, count)
                del model[len(model) - count :]
        out = buffer.commit(XID, Commit(990, 1000, 1))
        write(writer, [out] if isinstance(out, LargeTransaction) else out)
        assert [found for _, found, _ in contents(path)] == [each for _, each in model]
        assert list((path / "spool").iterdir()) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=60))
def test_places_that_are_undone_stay_in_few_ranges(steps: list[tuple[bool, int]]) -> None:
    places, kept = Places(), list[int]()
    for adds, number in steps:
        if adds:
            kept += range(places.count, places.count + number % 7)
            places.add(np.zeros(number % 7, np.uint32))
        elif kept and number % 2:
            places.undo(kept.pop(number % len(kept)))
        else:
            count = min(len(kept), number % 4)
            places.undo_newest(count)
            del kept[len(kept) - count :]
        assert places.kept == len(kept)
        assert places.end == (kept[-1] + 1 if kept else 0)
        assert merged(places.gone) == places.gone
    assert [place for place in range(places.count) if not any(low <= place < high for low, high in places.gone)] == kept


def test_rows_far_back_in_the_file_are_found(tmp_path: Path) -> None:
    ids, places = RowIds(), Places()
    for first in range(0, 50_000, 10_000):
        ids.append([b"%d" % number for number in range(first, first + 10_000)])
        places.add(np.zeros(10_000, np.uint32))
        if first < 40_000:
            ids.spill(tmp_path / "ids")
    assert ids.nbytes == 160_000, "the rest is in the file"
    for number in (49_999, 40_000, 39_999, 12_345, 0):
        assert ids.newest(b"%d" % number, places) == number
    assert ids.newest(b"none", places) is None
    places.undo(12_345)
    assert ids.newest(b"12345", places) is None


def test_undoing_a_hundred_thousand_changes_one_by_one_looks_at_few_of_them(tmp_path: Path) -> None:
    """In memory and in the file."""
    ids, places = RowIds(), Places()
    rows = [b"%d" % number for number in range(100_000)]
    ids.append(rows[:90_000])
    ids.spill(tmp_path / "ids")
    ids.append(rows[90_000:])
    places.add(np.zeros(100_000, np.uint32))
    for row in reversed(rows):
        place = ids.newest(row, places)
        assert place is not None
        places.undo(place)
    assert places.gone == [(0, 100_000)]


def test_undoing_what_was_not_done_is_an_error(tmp_path: Path) -> None:
    buffer = TransactionBuffer(Spool(tmp_path))
    buffer.begin(XID)
    buffer.append(XID, np.zeros(1, np.uint32), inserts(0, [(1, 0)]), [b"a"])
    with pytest.raises(PgtideError, match=r"transaction 7.*b'b'"):
        buffer.undo(XID, [b"b"])
    with pytest.raises(PgtideError, match="2 changes are undone, but it has 1"):
        buffer.undo(XID, 2)
    with pytest.raises(PgtideError, match="either all changes have row ids or none"):
        buffer.append(XID, np.zeros(2, np.uint32), inserts(1, [(2, 0), (3, 0)]), [b"c"])

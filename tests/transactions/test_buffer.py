"""The transaction buffer under tiny budgets equals a plain model in memory, and what it spools the log reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtide.change import LargeTransaction
from pgtide.errors import PgtideError
from pgtide.log.reader import LogReader
from pgtide.log.writer import LogWriter
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.places import Places, dense, merged
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log
from tests.transactions.rows import TABLES, inserts, quick_disk, rows_of


class Model:
    """What should come out: open transactions as lists of (subtransaction, key)."""

    def __init__(self) -> None:
        self.open: dict[int, list[tuple[int, int]]] = {}
        self.committed: list[int] = []

    def commit(self, xid: int) -> None:
        self.committed += [key for _, key in self.open.pop(xid, [])]

    def abort(self, xid: int, subxid: int) -> None:
        if xid == subxid:
            self.open.pop(xid, None)
        elif xid in self.open:
            self.open[xid] = [(writer, key) for writer, key in self.open[xid] if writer != subxid]


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("append"),
            st.integers(1, 4),
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6),
        ),
        st.tuples(st.just("abort"), st.integers(1, 4), st.integers(0, 3)),
        st.tuples(st.just("commit"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(
    steps=steps, memory_bytes=st.sampled_from([1, 400, 1500, 1 << 20]), piece_bytes=st.sampled_from([1, 500, 1 << 20])
)
def test_committed_transactions_equal_the_model_whatever_the_budget(
    steps: list[tuple[object, ...]], memory_bytes: int, piece_bytes: int
) -> None:
    model = Model()
    with quick_disk() as folder:
        path = new_log(folder / "log")
        writer = LogWriter(path)
        buffer = TransactionBuffer(Spool(path / "spool", file_bytes=1000), memory_bytes, piece_bytes)
        key, lsn = 0, 1000
        for step in steps:
            xid = int(str(step[1])) * 10
            if step[0] == "append":
                changes = list(step[2])  # type: ignore[call-overload]
                buffer.begin(xid)
                tables = inserts(buffer.next_place(xid), [(key + at, owner) for at, (_, owner) in enumerate(changes)])
                subxids = np.array([xid + sub for sub, _ in changes], np.uint32)
                buffer.append(xid, subxids, tables)
                model.open.setdefault(xid, []).extend((xid + sub, key + at) for at, (sub, _) in enumerate(changes))
                key += len(changes)
                assert buffer.memory_bytes <= memory_bytes
            elif step[0] == "abort":
                subxid = xid + int(str(step[2]))
                if subxid != xid or xid in model.open:
                    buffer.abort(xid, subxid)
                    model.abort(xid, subxid)
            else:
                lsn += 10
                out = buffer.commit(xid, Commit(lsn, lsn + 5, lsn))
                if isinstance(out, LargeTransaction):
                    writer.write_large(out)
                elif out:
                    writer.write(out)
                model.commit(xid)
            assert buffer.open_transactions <= len({int(str(s[1])) for s in steps})
        found = contents(path)
        assert [found_key for _, found_key, _ in found] == model.committed
        assert len({offset for offset, _, _ in found}) == len(found)
        if memory_bytes == 1 << 20:
            assert [offset for offset, _, _ in found] == list(range(len(found))), "in memory there are no holes"
        buffer.forget_all()
        assert list((path / "spool").iterdir()) == []
        assert buffer.memory_bytes == 0


def test_a_spooled_transaction_is_taken_by_reference_and_read_by_table(tmp_path: Path) -> None:
    path = new_log(tmp_path / "log")
    writer = LogWriter(path)
    buffer = TransactionBuffer(Spool(path / "spool"), memory_bytes=1)
    buffer.begin(7)
    for first in range(0, 100, 10):
        subxids = np.full(10, 8 if first == 50 else 7, np.uint32)
        places = list(range(first, first + 10))
        buffer.append(7, subxids, [rows_of(TABLES[first // 10 % 2], places, places, "row")])
    buffer.abort(7, 8)
    spooled = sum(file.stat().st_size for file in (path / "spool").iterdir())
    out = buffer.commit(7, Commit(990, 1000, 123))
    assert isinstance(out, LargeTransaction)
    writer.write_large(out)
    assert list((path / "spool").iterdir()) == []
    assert sum(file.stat().st_size for file in (path / "large").iterdir()) == spooled
    reader = LogReader(path)
    assert [key for _, key, _ in contents(path)] == [*range(50), *range(60, 100)]
    (entry,) = reader.transactions(0, 100).to_pylist()
    assert (entry["changes"], entry["end_offset"], entry["end_lsn"]) == (90, 100, 1000)
    assert all(piece.relation_oid == 2 for piece in reader.plan(0, 100, 2))
    assert [k for piece in reader.plan(35, 75, 2) for k in reader.read(piece).rows["c1"].to_pylist()] == [
        *range(35, 40),
        *range(70, 75),
    ]
    assert set(reader.shapes()) == {"public.a", "public.b"}


def test_files_of_a_commit_that_did_not_become_durable_are_removed(tmp_path: Path) -> None:
    path = new_log(tmp_path / "log")
    LogWriter(path)
    orphan = path / "large" / f"{0:020d}-{1:010d}-0000.seg"
    orphan.parent.mkdir()
    orphan.write_bytes(b"x")
    LogWriter(path)
    assert not orphan.exists()


def test_the_spool_has_a_limit_that_is_told(tmp_path: Path) -> None:
    buffer = TransactionBuffer(Spool(tmp_path / "spool", max_bytes=100), memory_bytes=1)
    buffer.begin(42)
    with pytest.raises(PgtideError, match=r"transaction 42") as told:
        buffer.append(42, np.full(1, 42, np.uint32), [rows_of(TABLES[0], [0], [0], "x")])
    assert "spool_max_bytes" in told.value.remedy


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_thousands_of_open_transactions_are_ordinary(count: int, tmp_path: Path) -> None:
    buffer = TransactionBuffer(Spool(tmp_path / "spool"), memory_bytes=1 << 18)
    row = rows_of(TABLES[0], [0], [0], "x" * 100)
    for xid in range(1, count + 1):
        buffer.begin(xid)
        buffer.append(xid, np.full(1, xid, np.uint32), [row])
    assert buffer.open_transactions == count
    assert buffer.memory_bytes <= 1 << 18
    total = 0
    for xid in range(1, count + 1):
        out = buffer.commit(xid, Commit(xid, xid, xid))
        total += 1 if isinstance(out, LargeTransaction) else len(out)
    assert total == count


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=4))
def test_places_know_who_wrote_them(writers: list[int], rolled_back: list[int]) -> None:
    places = Places()
    for start in range(0, len(writers), 7):
        places.add(np.array(writers[start : start + 7], np.uint32))
    for subxid in rolled_back:
        places.roll_back(subxid)
    kept = [place for place, writer in enumerate(writers) if writer not in rolled_back]
    assert places.kept == len(kept)
    assert merged(places.gone) == places.gone
    assert dense(np.array(kept, np.int64), places.gone).tolist() == list(range(len(kept)))

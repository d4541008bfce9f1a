"""The log on an object store: who may go on, what a crash leaves, and what merging and retention do to readers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.errors import FencedError, LogCorruptError, LogError, LogRangeError, TransientError
from pgtide.log.check import check_log
from pgtide.log.control import Barrier, TableHistory, barriers, histories, put_barrier, record_histories, remove_barrier
from pgtide.log.objects import merge as merging
from pgtide.log.objects.layout import GRACE_S, cover
from pgtide.log.objects.merge import merge
from pgtide.log.objects.names import ObjectName, parse_name
from pgtide.log.objects.orphans import OrphanSweep
from pgtide.log.objects.writer import ObjectLogWriter
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove, report_reader
from pgtide.log.segment import Extent
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log, shape, transaction
from tests.log.object_store import MemoryStore

ORDERS, ITEMS = shape(), shape(16400, "items")
HOUR_S = 3600.0


@pytest.fixture
def store() -> MemoryStore:
    return new_log(MemoryStore())


def segments(store: MemoryStore) -> list[str]:
    return [entry.name.removeprefix("segments/") for entry in store.entries("segments")]


def write_many(store: MemoryStore, count: int, first_lsn: int = 200) -> ObjectLogWriter:
    """A writer that has flushed `count` objects of one change each."""
    writer = ObjectLogWriter(store)
    for number in range(count):
        table = ITEMS if number == 3 else ORDERS
        writer.write([transaction(first_lsn + number, [(table, number, f"n{number}")])])
    return writer


def spooled(folder: Path, end_lsn: int, count: int = 2) -> LargeTransaction:
    buffer = TransactionBuffer(Spool(folder), memory_bytes=1)
    buffer.begin(7)
    rows = [(ORDERS, number, "large") for number in range(count)]
    buffer.append(7, np.full(count, 7, np.uint32), transaction(end_lsn, rows).tables)
    committed = buffer.commit(7, Commit(end_lsn - 8, end_lsn, 0))
    assert isinstance(committed, LargeTransaction)
    return committed


def test_every_flush_is_an_object_named_by_its_first_offset(store: MemoryStore) -> None:
    writer = ObjectLogWriter(store)
    writer.write([transaction(200, [(ORDERS, 1, "a"), (ITEMS, 2, "b")]), transaction(300, [(ORDERS, 3, "c")])])
    writer.write([transaction(400, [(ORDERS, 4, "d")])])
    assert segments(store) == [f"{0:020d}.seg", f"{3:020d}.seg"]
    assert contents(store) == [(0, 1, "a"), (1, 2, "b"), (2, 3, "c"), (3, 4, "d")]
    assert (writer.durable_lsn, writer.end_offset) == (400, 4)
    assert check_log(store).problems == []


def test_a_writer_that_was_replaced_stops_and_has_done_no_harm(store: MemoryStore) -> None:
    first = ObjectLogWriter(store)
    first.write([transaction(200, [(ORDERS, 1, "a")])])
    second = ObjectLogWriter(store)
    second.write([transaction(300, [(ORDERS, 2, "b")])])
    before = dict(store.objects)
    steps: list[Callable[[], None]] = [
        lambda: first.write([transaction(300, [(ORDERS, 2, "late")])]),
        lambda: first.advance(900),
        first.restart,
    ]
    for step in steps:
        with pytest.raises(FencedError, match="another capture has taken over the log in memory://log"):
            step()
    assert store.objects == before
    second.write([transaction(400, [(ORDERS, 3, "c")])])
    assert contents(store) == [(0, 1, "a"), (1, 2, "b"), (2, 3, "c")]


def test_what_a_writer_thought_dead_wrote_first_is_kept_and_its_successor_goes_on_behind_it(store: MemoryStore) -> None:
    late = ObjectLogWriter(store)
    successor = ObjectLogWriter(store)
    with pytest.raises(FencedError):
        late.write([transaction(200, [(ORDERS, 1, "a"), (ORDERS, 2, "b")])])
    assert contents(store) == [], "stored, but not marked: nobody sees it"
    with pytest.raises(TransientError, match="thought gone"):
        successor.write([transaction(200, [(ORDERS, 1, "a")])])
    again = ObjectLogWriter(store)
    assert (again.end_offset, again.durable_lsn) == (2, 200)
    again.write([transaction(300, [(ORDERS, 3, "c")])])
    assert contents(store) == [(0, 1, "a"), (1, 2, "b"), (2, 3, "c")]


def test_rows_that_a_writer_thought_dead_had_stored_are_there_when_it_names_them(store: MemoryStore) -> None:
    late = ObjectLogWriter(store)
    late.write([transaction(300, [(ORDERS, 1, "a")], ends=False)])
    ObjectLogWriter(store)
    OrphanSweep(store).sweep()
    with pytest.raises(FencedError):
        late.write([transaction(300, [(ORDERS, 2, "b")], first_place=1)])
    ObjectLogWriter(store)
    assert contents(store) == [(0, 1, "a"), (1, 2, "b")]


def test_an_object_that_was_stored_but_not_marked_is_marked_by_the_next_writer(store: MemoryStore) -> None:
    writer = ObjectLogWriter(store)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    as_of_then = store.objects["control/marker"]
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    writer.write([transaction(400, [(ORDERS, 3, "c")])])
    store.objects["control/marker"] = as_of_then
    assert contents(store) == [(0, 1, "a")]
    successor = ObjectLogWriter(store)
    assert (successor.end_offset, successor.durable_lsn, successor.last_commit_lsn) == (3, 400, 392)
    assert contents(store) == [(0, 1, "a"), (1, 2, "b"), (2, 3, "c")]


def test_a_damaged_object_above_the_marker_is_an_error_that_names_it(store: MemoryStore) -> None:
    writer = write_many(store, 2)
    as_of_then = store.objects["control/marker"]
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    store.objects["control/marker"] = as_of_then
    name = f"segments/{2:020d}.seg"
    data, modified_s = store.objects[name]
    store.objects[name] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)
    with pytest.raises(LogCorruptError, match=name):
        ObjectLogWriter(store)


def test_a_store_that_ignores_conditions_is_refused() -> None:
    class Careless(MemoryStore):
        def create(self, name: str, data: bytes) -> str | None:
            return self._put(name, data)

    store = new_log(Careless())
    with pytest.raises(LogError, match="ignores conditional writes"):
        ObjectLogWriter(store)


def test_a_transaction_in_pieces_is_seen_when_its_end_is_there(store: MemoryStore) -> None:
    writer = ObjectLogWriter(store)
    begun = transaction(300, [(ORDERS, 2, "b"), (ITEMS, 3, "c")], ends=False)
    writer.write([transaction(200, [(ORDERS, 1, "a")]), begun])
    assert writer.unfinished
    assert contents(store) == [(0, 1, "a")]
    assert writer.durable_lsn == 200
    # As `whole` hands it on: the end of one transaction and the next, in one piece.
    end, following = transaction(300, [(ORDERS, 4, "d")], first_place=2), transaction(400, [(ORDERS, 5, "e")])
    writer.write([joined(end, following), transaction(500, [(ITEMS, 6, "f")])])
    assert contents(store) == [(0, 1, "a"), (1, 2, "b"), (2, 3, "c"), (3, 4, "d"), (4, 5, "e"), (5, 6, "f")]
    assert writer.durable_lsn == 500
    assert LogReader(store).transactions(0, 6)["end_lsn"].to_pylist() == [200, 300, 400, 500]
    assert check_log(store).problems == []


def joined(first: Committed, second: Committed) -> Committed:
    """Two transactions of one table as one piece."""
    transactions = pa.Table.from_batches([first.transactions, second.transactions]).combine_chunks().to_batches()[0]
    rows = second.tables[0].rows
    number = rows.schema.get_field_index("_txn")
    rows = rows.set_column(number, rows.schema.field(number), pa.array([1] * rows.num_rows, pa.uint32()))
    both = pa.Table.from_batches([first.tables[0].rows, rows]).combine_chunks().to_batches()[0]
    return Committed(transactions, (TableRows(first.tables[0].shape, both),))


def test_a_transaction_that_comes_again_from_its_start_is_there_once(store: MemoryStore) -> None:
    writer = ObjectLogWriter(store)
    writer.write([transaction(300, [(ORDERS, 1, "half")], ends=False)])
    writer.forget_unfinished()
    writer.write([transaction(300, [(ORDERS, 1, "whole"), (ORDERS, 2, "too")])])
    assert contents(store) == [(0, 1, "whole"), (1, 2, "too")]
    assert len(store.entries("large")) == 1
    assert OrphanSweep(store).sweep() == 1
    assert store.entries("large") == []


def test_a_spooled_transaction_is_copied_and_its_local_files_go(store: MemoryStore, tmp_path: Path) -> None:
    writer = write_many(store, 1)
    large = spooled(tmp_path / "spool", 300)
    writer.write_large(large)
    assert not any(file.exists() for file in large.files)
    assert contents(store) == [(0, 0, "n0"), (1, 0, "large"), (2, 1, "large")]
    assert OrphanSweep(store).sweep() == 0
    assert contents(store) == [(0, 0, "n0"), (1, 0, "large"), (2, 1, "large")]


def test_orphans_stay_until_nobody_can_refer_to_them_any_more(store: MemoryStore, tmp_path: Path) -> None:
    late = ObjectLogWriter(store)
    late.write([transaction(300, [(ORDERS, 1, "half")], ends=False)])
    successor = ObjectLogWriter(store)
    assert OrphanSweep(store).sweep() == 0, "the late writer may still create the block that names it"
    successor.write([transaction(300, [(ORDERS, 1, "whole")])])
    with pytest.raises(FencedError):
        late.write([transaction(300, [(ORDERS, 2, "end")], first_place=1)])
    assert OrphanSweep(store).sweep() == 2
    assert contents(store) == [(0, 1, "whole")]


@pytest.mark.parametrize(
    ("names", "removed_to", "expected"),
    [
        (["0", "5"], 0, [("0", 5, None), ("5", 9, None)]),
        (["0", "5", "0-5"], 0, [("0-5", 5, None), ("5", 9, None)]),
        (["0-5", "3", "5", "9"], 0, [("0-5", 5, None), ("5", 9, None)]),
        (["0-5", "2-7", "7"], 0, [("0-5", 5, None), ("2-7", 7, 5), ("7", 9, None)]),
        (["0-5", "5"], 5, [("5", 9, None)]),
        (["2", "5"], 5, [("5", 9, None)]),
        (["0-7", "5", "7"], 5, [("0-7", 7, 5), ("7", 9, None)]),
        (["0-20"], 0, [("0-20", 9, None)]),
        ([], 9, []),
    ],
)
def test_merged_objects_go_before_what_lies_within_them(
    names: list[str], removed_to: int, expected: list[tuple[str, int, int | None]]
) -> None:
    def name(text: str) -> ObjectName:
        first, _, end = text.partition("-")
        return ObjectName(int(first), int(end), 1) if end else ObjectName(int(first))

    found = cover([name(text) for text in names], removed_to, 9)
    assert found == [Extent(name(text), end, begins) for text, end, begins in expected]


def test_names_say_what_an_object_covers() -> None:
    for name in (ObjectName(17), ObjectName(17, 2**40, 2)):
        assert parse_name(f"segments/{name}") == name
    assert parse_name("segments/something-else.seg") is None
    assert str(ObjectName(5, 9, 1)) < str(ObjectName(5)) < str(ObjectName(6))


def test_merged_objects_have_the_same_rows_and_the_originals_stay_for_a_while(store: MemoryStore) -> None:
    write_many(store, 70)
    before = contents(store)
    old_reader = LogReader(store)
    planned = old_reader.plan(0, 70)
    assert merge(store, store.clock_s) == 2
    names = segments(store)
    assert len(names) == 72
    assert {f"{0:020d}-{32:020d}-1.seg", f"{32:020d}-{64:020d}-1.seg"} < set(names)
    assert contents(store) == before
    assert [extent.end_offset for extent in LogReader(store).extents()] == [32, 64, 65, 66, 67, 68, 69, 70]
    assert check_log(store).problems == []
    assert merge(store, store.clock_s) == 0, "nothing is left to merge"

    remove(store, plan_removal(store, retention_s=HOUR_S, max_bytes=0, now_s=store.clock_s + GRACE_S - 1))
    assert segments(store) == names, "readers that planned with them still find them"
    remove(store, plan_removal(store, retention_s=9 * HOUR_S, max_bytes=0, now_s=store.clock_s + GRACE_S))
    assert len(segments(store)) == 8
    assert contents(store) == before
    rows = [row for piece in planned for row in old_reader.read(piece).rows["_offset"].to_pylist()]
    assert sorted(rows) == list(range(70)), "even a plan that is older than that can be read"
    assert len(old_reader.plan(0, 70)) == 70


def test_a_reader_that_slept_while_objects_came_were_merged_and_removed_finds_them(store: MemoryStore) -> None:
    writer = write_many(store, 5)
    sleeper = LogReader(store)
    assert len(sleeper.plan(0, 5)) == 5
    for number in range(5, 70):
        writer.write([transaction(1000 + number, [(shape(), number, f"n{number}")])])
    assert merge(store, store.clock_s) == 2
    before = dict(store.objects)
    remove(store, plan_removal(store, retention_s=9 * HOUR_S, max_bytes=0, now_s=store.clock_s + GRACE_S))
    still_there = f"segments/{ObjectName(4)}"  # what it knows goes last
    store.objects[still_there] = before[still_there]
    assert len(sleeper.plan(4, 70)) == 66


def test_merging_goes_on_over_levels_and_leaves_old_objects_alone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "RUN", 4)
    writer = write_many(store, 4 * 3)
    assert merge(store, store.clock_s) == 3
    for number in range(5):
        writer.write([transaction(5000 + number, [(ORDERS, number, "later")])])
    assert merge(store, store.clock_s) == 1
    assert merge(store, store.clock_s) == 1
    assert [name for name in segments(store) if name.endswith("-2.seg")] == [f"{0:020d}-{16:020d}-2.seg"]
    assert len(contents(store)) == 17

    store.clock_s += 2 * HOUR_S
    for number in range(3):
        writer.write([transaction(6100 + number, [(ORDERS, number, "young")])])
    assert merge(store, store.clock_s) == 0, "three young ones beside an old one are no run"
    writer.write([transaction(6200, [(ORDERS, 9, "young")])])
    assert merge(store, store.clock_s) == 1


def test_a_run_that_is_large_enough_need_not_be_long(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3000
    monkeypatch.setattr(merging, "_MERGED_BYTES", 2 * size)
    monkeypatch.setattr(merging, "_SMALL_BYTES", 4 * size)
    writer = ObjectLogWriter(store)
    for number in range(6):
        note = "".join(random.Random(number).choices("abcdefghijklmnop", k=size if number != 3 else 20 * size))
        writer.write([transaction(200 + number, [(ORDERS, number, note)])])
    assert merge(store, store.clock_s) == 2
    merged = [name for name in segments(store) if name.endswith("-1.seg")]
    assert merged == [f"{0:020d}-{2:020d}-1.seg", f"{4:020d}-{6:020d}-1.seg"], "the large one stays as it is"


def test_planning_with_merged_objects_takes_few_requests(store: MemoryStore) -> None:
    write_many(store, 64)
    before = store.requests
    LogReader(store).plan(0, 64)
    unmerged = store.requests - before
    merge(store, store.clock_s)
    reader = LogReader(store)
    before = store.requests
    assert sum(1 for _ in reader.blocks(0, 64)) == 64
    assert store.requests - before < 10 < unmerged


def test_a_merge_of_something_damaged_makes_nothing(store: MemoryStore) -> None:
    write_many(store, 40)
    name = f"segments/{7:020d}.seg"
    data, modified_s = store.objects[name]
    store.objects[name] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)
    with pytest.raises(LogCorruptError, match=name):
        merge(store, store.clock_s)
    assert len(segments(store)) == 40


def test_large_transactions_survive_the_merging_of_the_blocks_that_name_them(
    store: MemoryStore, tmp_path: Path
) -> None:
    writer = write_many(store, 20)
    writer.write_large(spooled(tmp_path / "spool", 400, 5))
    for number in range(20):
        writer.write([transaction(500 + number, [(ORDERS, number, "after")])])
    before = contents(store)
    assert merge(store, store.clock_s) == 1
    remove(store, plan_removal(store, retention_s=9 * HOUR_S, max_bytes=0, now_s=store.clock_s + GRACE_S))
    OrphanSweep(store).sweep()
    assert contents(store) == before


def test_retention_takes_what_every_reader_has_passed(store: MemoryStore) -> None:
    write_many(store, 10)
    report_reader(store, "slow", {"offset": 6})
    removal = plan_removal(store, retention_s=HOUR_S, max_bytes=0, now_s=store.clock_s + 2 * HOUR_S)
    assert removal.end_offset == 6
    remove(store, removal)
    assert [offset for offset, _, _ in contents(store)] == [6, 7, 8, 9]
    reader = LogReader(store)
    with pytest.raises(LogRangeError, match=r"0 to 6 .*retention removed"):
        reader.plan(0, 10)
    assert reader.plan(4, 10, ITEMS.relation_oid) == [], "the other table's last change was at 3: it loses nothing"
    with pytest.raises(LogRangeError, match="retention removed"):
        reader.plan(3, 10, ITEMS.relation_oid)


def test_an_object_that_comes_back_below_what_retention_took_is_ignored_and_removed(store: MemoryStore) -> None:
    write_many(store, 10)
    late = store.objects[f"segments/{2:020d}.seg"]
    remove(store, plan_removal(store, retention_s=HOUR_S, max_bytes=0, now_s=store.clock_s + 2 * HOUR_S))
    left = contents(store)
    store.objects[f"segments/{2:020d}.seg"] = late
    assert contents(store) == left
    remove(store, plan_removal(store, retention_s=HOUR_S, max_bytes=0, now_s=store.clock_s))
    assert f"segments/{2:020d}.seg" not in store.objects


def test_a_reader_that_is_slower_than_retention_gets_an_error_not_silence(store: MemoryStore) -> None:
    write_many(store, 10)
    reader = LogReader(store)
    planned = reader.plan(0, 10)
    remove(store, plan_removal(store, retention_s=HOUR_S, max_bytes=0, now_s=store.clock_s + 2 * HOUR_S))
    with pytest.raises(LogRangeError, match="retention removed"):
        reader.read(planned[0])
    with pytest.raises(LogRangeError, match="retention removed"):
        reader.plan(0, 10)


def test_a_missing_object_below_the_marker_is_an_error(store: MemoryStore) -> None:
    write_many(store, 10)
    del store.objects[f"segments/{0:020d}.seg"]
    with pytest.raises(LogCorruptError, match="retention did not remove"):
        LogReader(store).plan(0, 10)
    store.objects = {name: value for name, value in store.objects.items() if not name.startswith("segments/")}
    with pytest.raises(LogCorruptError, match=r"offset 0 .*retention did not remove"):
        LogReader(store).plan(0, 10)


def test_a_table_that_goes_back_to_an_earlier_shape_has_that_shape_again(store: MemoryStore) -> None:
    narrow = replace(ORDERS, columns=ORDERS.columns[:1])
    for current in (ORDERS, narrow, ORDERS):
        ObjectLogWriter(store).record_shape(current)
        assert LogReader(store).shapes()["public.orders"] == current


def test_a_writer_that_was_replaced_does_not_bring_back_an_earlier_shape(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(ORDERS, columns=ORDERS.columns[:1])
    before, create = ObjectLogWriter(store), store.create
    before.record_shape(ORDERS)

    def overtaken(name: str, data: bytes) -> str | None:
        """The request is held up until a successor has seen the table change, and change back."""
        monkeypatch.setattr(store, "create", create)
        after = ObjectLogWriter(store)
        after.record_shape(narrow)
        after.record_shape(ORDERS)
        return create(name, data)

    monkeypatch.setattr(store, "create", overtaken)
    for _ in range(2):  # the request itself, and one that begins later
        with pytest.raises(FencedError):
            before.record_shape(narrow)
        assert LogReader(store).shapes()["public.orders"] == ORDERS


def test_rows_that_must_be_kept_are_copied_and_stay(store: MemoryStore, tmp_path: Path) -> None:
    large = replace(spooled(tmp_path, 300), kept=True)
    ObjectLogWriter(store).write_large(large)
    assert contents(store) == [(0, 0, "large"), (1, 1, "large")]
    assert all(file.exists() for file in large.files)


def test_notes_are_left_and_found_on_a_store(store: MemoryStore) -> None:
    noted = {7: TableHistory("public.orders", 12, None), 8: TableHistory("public.items", 0, 99)}
    record_histories(store, noted)
    assert histories(store) == noted
    wish = Barrier("one", 77, datetime(2026, 1, 1, tzinfo=UTC))
    put_barrier(store, wish)
    assert barriers(store) == [wish]
    remove_barrier(store, "one")
    assert barriers(store) == []

"""What is sent is cut exactly at an LSN: transactions that end there or before are in front, all others behind."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from pgtide.capture.appender import Work
from pgtide.capture.cut import split_at
from pgtide.capture.whole import Idle
from pgtide.change import TRANSACTIONS, Committed, LargeTransaction, TableRows, TransactionKind
from tests.log.building import shape, transaction

ORDERS, ITEMS = shape(), shape(16390, "items")


def several(*end_lsns: int) -> Committed:
    """One piece of several transactions, with a row of each table in each."""
    parts = [transaction(lsn, [(ORDERS, lsn, "o"), (ITEMS, -lsn, "i")]) for lsn in end_lsns]
    tables = []
    for place, table in enumerate((ORDERS, ITEMS)):
        rows = pa.Table.from_batches([part.tables[place].rows for part in parts]).combine_chunks().to_batches()[0]
        index = rows.schema.get_field_index("_txn")
        numbers = pa.array(range(len(parts)), pa.uint32())
        tables.append(TableRows(table, rows.set_column(index, rows.schema.field(index), numbers)))
    entries = pa.Table.from_batches([part.transactions for part in parts]).combine_chunks().to_batches()[0]
    return Committed(entries, tuple(tables))


def large(end_lsn: int) -> LargeTransaction:
    entry = transaction(end_lsn, [(ORDERS, 1, "large")]).transactions
    return LargeTransaction(entry, 1, (), (Path("rows"),), (10,), (ORDERS,))


def end_lsns(work: list[Work]) -> list[int]:
    found: list[int] = []
    for item in work:
        if isinstance(item, Committed):
            found += item.transactions["end_lsn"].to_pylist()
            for table in item.tables:
                keys = [abs(key) for key in table.rows["c1"].to_pylist()]
                assert keys == [item.transactions["end_lsn"].to_pylist()[n] for n in table.rows["_txn"].to_pylist()]
        elif isinstance(item, LargeTransaction):
            found += item.transaction["end_lsn"].to_pylist()
        else:
            assert isinstance(item, Idle)
            found.append(item.lsn)
    return found


@pytest.mark.parametrize(
    ("work", "before", "after"),
    [
        ([several(100, 200, 300, 400)], [100, 200], [300, 400]),
        ([several(100, 200), several(300)], [100, 200], [300]),
        ([several(300)], [], [300]),
        ([several(100), large(250), several(300)], [100], [250, 300]),
        ([large(100), Idle(150), Idle(200), several(300)], [100, 150], [200, 300]),
        ([several(100, 200), Idle(500)], [100, 200], [500]),
    ],
)
def test_cut_at_200(work: list[Work], before: list[int], after: list[int]) -> None:
    cut = split_at(work, 200)
    assert cut is not None
    assert (end_lsns(cut[0]), end_lsns(cut[1])) == (before, after)


def test_nothing_is_cut_before_the_stream_is_there() -> None:
    assert split_at([several(100, 200), large(200), Idle(199)], 200) is None
    assert split_at([], 200) is None


def test_message_at_the_lsn_is_in_front_of_it() -> None:
    """So that it is not taken for one that the log has when it is sent again."""

    def message(lsn: int) -> Committed:
        piece = transaction(lsn, [(ORDERS, lsn, "message")], commit_lsn=lsn)
        index = TRANSACTIONS.get_field_index("kind")
        kind = pa.array([int(TransactionKind.MESSAGE)], pa.uint8())
        return Committed(piece.transactions.set_column(index, TRANSACTIONS.field(index), kind), piece.tables)

    cut = split_at([message(200), message(201)], 200)
    assert cut is not None
    assert (end_lsns(cut[0]), end_lsns(cut[1])) == ([200], [201])

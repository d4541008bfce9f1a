"""The assembler: however the stream is cut into feeds, the same transactions come out, in order, once."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pgtide.capture.assemble import Assembler
from pgtide.capture.whole import Idle, WholeTransactions
from pgtide.change import Committed, TransactionKind
from pgtide.decode import CONTROL, Decoded, ShapedRows
from pgtide.schema import MESSAGES
from pgtide.transactions.buffer import TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import shape

TABLES = (shape(1, "a"), shape(2, "b"))


@dataclass(frozen=True)
class Event:
    kind: str  # B, C, k, b, P, K, r, I (a change) or M (a message outside of transactions)
    table: int = 0
    lsn: int = 0
    end_lsn: int = 0
    xid: int = 0
    gid: str = ""


def stream(transactions: list[list[int]], extras: list[str]) -> list[Event]:
    """Transactions given by the tables of their changes; between them keepalives and messages."""
    events, lsn = [], 1000
    for number, changes in enumerate(transactions):
        commit_lsn, end_lsn = lsn, lsn + 10
        events.append(Event("B", lsn=commit_lsn, xid=number))
        events += [Event("I", table=table) for table in changes]
        events.append(Event("C", lsn=commit_lsn, end_lsn=end_lsn, xid=number))
        lsn = end_lsn
        extra = extras[number] if number < len(extras) else ""
        for kind in extra:
            events.append(Event(kind, lsn=lsn + 5, end_lsn=lsn + 5))
            lsn += 10
    return events


def decoded(events: list[Event], first_change: int) -> Decoded:
    controls: list[tuple[int, ...]] = []
    rows, gids = [], {}
    change = first_change
    for event in events:
        if event.kind in "IM":
            rows.append((event, change))
            change += 1
        else:
            if event.gid:
                gids[len(controls)] = event.gid
            controls.append((ord(event.kind), change, event.xid, 0, event.lsn, event.end_lsn, event.lsn, 0))
    tables = []
    for number, table in enumerate(TABLES):
        mine = [at for event, at in rows if event.kind == "I" and event.table == number]
        if mine:
            columns: dict[str, pa.Array] = {
                "_op": pa.array([1] * len(mine), pa.uint8()),
                "_change": pa.array(mine, pa.int64()),
                "_subxid": pa.array([0] * len(mine), pa.uint32()),
                "c1": pa.array(mine, pa.int64()),
            }
            tables.append(ShapedRows(table, pa.RecordBatch.from_pydict(columns)))
    alone = [(event.lsn, at) for event, at in rows if event.kind == "M"]
    if alone:
        columns = {
            "_op": pa.array([6] * len(alone), pa.uint8()),
            "_change": pa.array([at for _, at in alone], pa.int64()),
            "_subxid": pa.array([0] * len(alone), pa.uint32()),
            "c1": pa.array(["p"] * len(alone)),
            "c2": pa.array([b""] * len(alone)),
            "c3": pa.array([False] * len(alone)),
            "c4": pa.array([lsn for lsn, _ in alone], pa.int64()),
        }
        tables.append(ShapedRows(MESSAGES, pa.RecordBatch.from_pydict(columns)))
    return Decoded(first_change, change - first_change, tuple(tables), np.array(controls, CONTROL), {}, gids, 0)


def two_phase_stream(transactions: list[tuple[list[int], str]]) -> list[Event]:
    """Transactions given by the tables of their changes and their end: C at once, or prepared and later K or r."""
    events, lsn = [], 1000
    prepared: list[Event] = []
    for xid, (changes, end) in enumerate(transactions, 1):
        gid = "" if end == "C" else f"g{xid}"
        begin, last = ("B", "C") if end == "C" else ("b", "P")
        events.append(Event(begin, lsn=lsn, end_lsn=lsn + 10 if gid else 0, xid=xid, gid=gid))
        events += [Event("I", table=table) for table in changes]
        events.append(Event(last, lsn=lsn, end_lsn=lsn + 10, xid=xid, gid=gid))
        lsn += 10
        if gid:
            prepared.append(Event(end, xid=xid, gid=gid))
        if len(prepared) > xid % 3:
            ended = prepared.pop(0)
            events.append(Event(ended.kind, lsn=lsn, end_lsn=lsn + 10, xid=ended.xid, gid=ended.gid))
            lsn += 10
    return events


def expected_of_two_phase(events: list[Event]) -> list[tuple[int, int, list[tuple[int, str]]]]:
    result: list[tuple[int, int, list[tuple[int, str]]]] = []
    current: list[tuple[int, str]] = []
    prepared: dict[int, list[tuple[int, str]]] = {}
    for event in events:
        if event.kind in "Bb":
            current = []
        elif event.kind == "I":
            current.append((len(current), TABLES[event.table].name))
        elif event.kind == "P":
            prepared[event.xid] = current
        elif event.kind in "CK":
            rows = current if event.kind == "C" else prepared[event.xid]
            if rows:
                result.append((int(TransactionKind.COMMIT), event.end_lsn, rows))
    return result


def expected(events: list[Event], durable_lsn: int) -> list[tuple[int, int, list[tuple[int, str]]]]:
    """(kind, end LSN, [(place, table)]) of every transaction with changes that is not durable already."""
    result: list[tuple[int, int, list[tuple[int, str]]]] = []
    current: list[tuple[int, str]] = []
    for event in events:
        if event.kind == "B":
            current = []
        elif event.kind == "I":
            current.append((len(current), TABLES[event.table].name))
        elif event.kind == "C" and current and event.end_lsn > durable_lsn:
            result.append((int(TransactionKind.COMMIT), event.end_lsn, current))
        elif event.kind == "M" and event.lsn > durable_lsn:
            result.append((int(TransactionKind.MESSAGE), event.lsn, [(0, "messages")]))
    return result


def assembled(pieces: list[Committed]) -> list[tuple[int, int, list[tuple[int, str]]]]:
    """The same from pieces, putting transactions together that were cut."""
    result: list[Any] = []
    open_changes: list[tuple[int, str]] = []
    for piece in pieces:
        of: dict[int, list[tuple[int, str]]] = {n: [] for n in range(piece.transactions.num_rows)}
        for table in piece.tables:
            for place, number in zip(table.rows["_place"].to_pylist(), table.rows["_txn"].to_pylist(), strict=True):
                of[number].append((place, table.shape.name))
        for number, entry in enumerate(piece.transactions.to_pylist()):
            assert entry["changes"] == len(of[number])
            open_changes += sorted(of[number])
            if entry["ends"]:
                result.append((entry["kind"], entry["end_lsn"], open_changes))
                open_changes = []
    assert not open_changes, "a transaction was begun and not ended"
    return result


@given(
    transactions=st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8),
    extras=st.lists(st.sampled_from(["", "k", "M", "kM", "Mk"]), max_size=8),
    cuts=st.sets(st.integers(0, 80)),
    held_bytes=st.sampled_from([0, 300, 1 << 20]),
    durable=st.integers(0, 200),
)
def test_any_cut_of_the_stream_gives_the_same_transactions(
    transactions: list[list[int]], extras: list[str], cuts: set[int], held_bytes: int, durable: int
) -> None:
    events = stream(transactions, extras)
    ends = sorted({event.end_lsn for event in events if event.end_lsn})
    durable_lsn = ends[durable % len(ends)] if ends and durable else 0
    assembler, pieces, change = WholeTransactions(durable_lsn, held_bytes), [], 0
    bounds = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    for low, high in itertools.pairwise(bounds):
        feed = decoded(events[low:high], change)
        change += feed.changes
        for item in assembler.feed(feed):
            if isinstance(item, Committed):
                pieces.append(item)
            else:
                known = [end_lsn for _, end_lsn, _ in expected(events[:high], durable_lsn)]
                done = [end_lsn for _, end_lsn, _ in assembled(pieces)]
                assert done == known, "an idle position overtook a transaction"
    assert assembled(pieces) == expected(events, durable_lsn)


def test_a_keepalive_inside_a_transaction_is_no_idle_position() -> None:
    assembler = WholeTransactions(0)
    begin, change = Event("B", lsn=100, xid=1), Event("I")
    assert assembler.feed(decoded([begin, change, Event("k", end_lsn=500)], 0)) == []
    work = assembler.feed(decoded([Event("C", lsn=100, end_lsn=110), Event("k", end_lsn=600)], 1))
    assert isinstance(work[-1], Idle)
    assert work[-1].lsn == 600


@given(
    transactions=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.sampled_from(["C", "K", "K", "r"])), max_size=8
    ),
    cuts=st.sets(st.integers(0, 60)),
)
def test_any_cut_of_a_stream_with_prepared_transactions_gives_the_same_transactions(
    transactions: list[tuple[list[int], str]], cuts: set[int]
) -> None:
    events = two_phase_stream(transactions)
    with tempfile.TemporaryDirectory() as folder:
        assembler = Assembler(0, TransactionBuffer(Spool(Path(folder))))
        pieces, change, idle_lsn = [], 0, 0
        bounds = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
        for low, high in itertools.pairwise(bounds):
            feed = decoded(events[low:high], change)
            change += feed.changes
            for item in assembler.feed(feed):
                if isinstance(item, Committed):
                    pieces.append(item)
                elif isinstance(item, Idle):
                    idle_lsn = item.lsn
        assert assembled(pieces) == expected_of_two_phase(events)
        assert idle_lsn <= max((event.end_lsn for event in events), default=0)


def test_a_commit_of_a_prepared_transaction_that_the_log_has_is_skipped(tmp_path: Path) -> None:
    commit = Event("K", lsn=1000, end_lsn=1010, xid=1, gid="g1")
    assembler = Assembler(commit.end_lsn, TransactionBuffer(Spool(tmp_path)))
    assert assembler.feed(decoded([commit], 0)) == []


def interleaved(first_change: int, xids: list[int], rows: int) -> Decoded:
    """A feed with one change each of transactions in progress, the rest of it one that comes whole; 1 kB a row."""
    controls = []
    for number, xid in enumerate(xids):
        controls += [(ord("S"), first_change + number, xid), (ord("E"), first_change + number + 1, 0)]
    controls += [(ord("B"), first_change + len(xids), 1), (ord("C"), first_change + rows, 0)]
    columns = {
        "_op": pa.array([1] * rows, pa.uint8()),
        "_change": pa.array(range(first_change, first_change + rows), pa.int64()),
        "_subxid": pa.array([*xids, *[0] * (rows - len(xids))], pa.uint32()),
        "c1": pa.array(range(rows), pa.int64()),
        "c2": pa.array([f"{row:1000}" for row in range(rows)]),
    }
    framed = np.array([(*control, 0, 1000, 1010, 0, 0) for control in controls], CONTROL)
    return Decoded(first_change, rows, (ShapedRows(TABLES[0], pa.RecordBatch.from_pydict(columns)),), framed, {}, {}, 0)


def test_small_transactions_in_progress_keep_no_more_in_memory_than_they_are(tmp_path: Path) -> None:
    """Each feed of a megabyte has a few rows that stay for long; those must not keep the whole feed alive."""
    buffer = TransactionBuffer(Spool(tmp_path / "spool"))
    assembler = Assembler(0, buffer)
    before = pa.total_allocated_bytes()
    for number in range(100):
        assembler.feed(interleaved(1000 * number, [10 * number + 2, 10 * number + 3], 1000))
    kept = pa.total_allocated_bytes() - before
    assert buffer.open_transactions == 200
    assert kept < 2 << 20, "200 rows of a kilobyte, not 100 feeds of a megabyte"
    assert buffer.memory_bytes > kept / 2, "what is kept is counted"


def test_one_transaction_in_progress_is_not_copied(tmp_path: Path) -> None:
    buffer = TransactionBuffer(Spool(tmp_path / "spool"))
    feed = interleaved(0, [7] * 990, 1000)
    joined = Decoded(0, 990, feed.tables, np.array([(ord("S"), 0, 7, 0, 0, 0, 0, 0)], CONTROL), {}, {}, 0)
    before = pa.total_allocated_bytes()
    Assembler(0, buffer).feed(joined)
    assert pa.total_allocated_bytes() - before < 100_000, "nearly all of the feed is kept: a copy would only cost"
    assert buffer.memory_bytes > 900_000

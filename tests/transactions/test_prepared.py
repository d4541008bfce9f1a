"""Prepared transactions: kept from prepare to end whatever dies in between, and in the log once.

The source is played by `Source`, which sends again after a crash exactly what a server would: everything that ends past
what is durable, but of a transaction that was prepared before only its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtide import failpoints
from pgtide.change import Committed, LargeTransaction
from pgtide.errors import LogError, PgtideError
from pgtide.log.files import replace_durably
from pgtide.log.writer import LogWriter
from pgtide.transactions.buffer import Commit, Prepare, TransactionBuffer
from pgtide.transactions.prepared import Forget, Keep, NoteCommit, SpoolStep
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log
from tests.transactions.mortal import MortalProcess, unused_large_files
from tests.transactions.rows import inserts, quick_disk, write

ENDS = ("commit", "rollback", "prepare")

# Where the consumer may die while it takes an event of each kind.
WRITING = ["log.block.written", "log.block.fsynced", "log.large.adopted", "log.large.written"]
FORGETTING = ["spool.prepared.ended", "spool.prepared.forgotten", "log.marker.idle"]
POINTS = {
    "commit": WRITING,
    "prepare": ["spool.prepared.synced", "spool.prepared.kept", "log.marker.idle"],
    "commit prepared": ["spool.commit.noted", *WRITING, *FORGETTING],
    "rollback prepared": FORGETTING,
}
POSSIBLE = {
    "idle": ["append", "append", "append", "prepare"],  # without changes: a server sends that prepare all the same
    "open": ["append", "append", "abort", "prepare", "prepare", "prepare", "commit", "rollback"],
    "prepared": ["commit prepared", "commit prepared", "commit prepared", "rollback prepared"],
}


@dataclass(frozen=True)
class Event:
    kind: str  # append, abort, commit, rollback, prepare, commit prepared, rollback prepared
    lsn: int
    xid: int
    gid: str = ""
    changes: tuple[tuple[int, int, int], ...] = ()  # (subtransaction, key, table)
    subxid: int = 0

    @property
    def end_lsn(self) -> int:
        return self.lsn + 5


@dataclass
class Source:
    """Writes a history as sessions would in SQL, one step after the other."""

    wal: list[Event] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)  # session → xid
    prepared: dict[int, int] = field(default_factory=dict)
    _key: int = 0

    def step(self, session: int, choice: int, parts: list[tuple[int, int]]) -> Event:
        """One of the things that the session can do now."""
        state = "open" if session in self.open else "prepared" if session in self.prepared else "idle"
        kind = POSSIBLE[state][choice % len(POSSIBLE[state])]
        lsn = 1000 + 10 * len(self.wal)
        if kind == "append":
            xid = self.open.setdefault(session, lsn)
            changes = tuple((xid + sub, self._key + at, table) for at, (sub, table) in enumerate(parts))
            self._key += len(parts)
            return self._write(Event(kind, lsn, xid, changes=changes))
        if kind == "abort":
            return self._write(Event(kind, lsn, self.open[session], subxid=self.open[session] + 1))
        if kind == "prepare":
            self.prepared[session] = self.open.pop(session, lsn)
            return self._write(Event(kind, lsn, self.prepared[session], f"g{session}"))
        if kind in ("commit", "rollback"):
            return self._write(Event(kind, lsn, self.open.pop(session)))
        return self._write(Event(kind, lsn, self.prepared.pop(session), f"g{session}"))

    def _write(self, event: Event) -> Event:
        self.wal.append(event)
        return event

    def from_lsn(self, durable_lsn: int) -> list[Event]:
        """What is sent to a consumer that has everything up to there."""
        ends = {event.xid: event.lsn for event in self.wal if event.kind in ENDS}
        return [
            event
            for event in self.wal
            if (ends.get(event.xid, durable_lsn) if event.kind in (*ENDS, "append", "abort") else event.lsn)
            >= durable_lsn
        ]

    def committed(self) -> list[int]:
        """The keys that belong in the log, by the plainest reckoning."""
        rows: dict[int, list[tuple[int, int]]] = {}
        result: list[int] = []
        for event in self.wal:
            mine = rows.setdefault(event.xid, [])
            mine += [(sub, key) for sub, key, _ in event.changes]
            if event.kind == "abort":
                rows[event.xid] = [(sub, key) for sub, key in mine if sub != event.subxid]
            elif event.kind in ("commit", "commit prepared"):
                result += [key for _, key in rows.pop(event.xid)]
        return result


class Consumer(MortalProcess):
    """The capture without Postgres."""

    def open_buffer(self, spool: Spool) -> None:
        self.buffer = TransactionBuffer(spool, self._memory_bytes, self._piece_bytes, self.durable_lsn)

    def take(self, event: Event) -> None:
        buffer, xid = self.buffer, event.xid
        commit = Commit(event.lsn, event.end_lsn, event.lsn)
        if event.kind == "append":
            buffer.begin(xid)
            rows = inserts(buffer.next_place(xid), [(key, table) for _, key, table in event.changes])
            buffer.append(xid, np.array([sub for sub, _, _ in event.changes], np.uint32), rows)
        elif event.kind == "abort":
            buffer.abort(xid, event.subxid)
        elif event.kind == "rollback":
            buffer.abort(xid, xid)
        elif event.kind == "commit":
            out = buffer.commit(xid, commit)
            write(self.writer, [out] if isinstance(out, LargeTransaction) else out)
        elif event.kind == "prepare":
            write(self.writer, buffer.prepare(xid, Prepare(event.gid, event.end_lsn)))
            self.writer.advance(event.end_lsn)
        elif event.kind == "commit prepared":
            *work, forget = buffer.commit_prepared(event.gid, xid, commit)
            write(self.writer, work)
            self.writer.advance(event.end_lsn)
            write(self.writer, [forget])
        else:
            write(self.writer, buffer.rollback_prepared(event.gid, xid))
            self.writer.advance(event.end_lsn)
        assert buffer.memory_bytes <= self._memory_bytes


steps = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(0, 7),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=4),
        st.integers(0, 15),
    ),
    min_size=25,
    max_size=40,
)


def taken(consumer: Consumer, event: Event, choice: int) -> bool:
    """Whether the consumer has survived the event; it dies now and then at one of the points on the way."""
    points = POINTS.get(event.kind, [])
    failpoints.arm(f"{points[choice]}=raise" if choice < len(points) else "")
    try:
        consumer.take(event)
        return choice != 15  # sometimes between two events
    except failpoints.FailpointReached:
        return False
    finally:
        failpoints.arm("")


@settings(max_examples=40)
@given(steps=steps, memory_bytes=st.sampled_from([1, 400, 1 << 20]), piece_bytes=st.sampled_from([1, 500, 1 << 20]))
def test_histories_with_prepared_transactions_and_crashes_equal_the_model(
    steps: list[tuple[int, int, list[tuple[int, int]], int]], memory_bytes: int, piece_bytes: int
) -> None:
    source = Source()
    with quick_disk() as folder:
        consumer = Consumer(new_log(folder / "log"), memory_bytes, piece_bytes)
        for session, choice, parts, death in steps:
            if not taken(consumer, source.step(session, choice, parts), death):
                consumer.start()
                for again in source.from_lsn(consumer.durable_lsn):
                    consumer.take(again)
                assert consumer.buffer.prepared_transactions == len(source.prepared)
        for session in list(source.prepared):
            consumer.take(source.step(session, 0, []))
        consumer.start()
        assert [key for _, key, _ in contents(consumer.path)] == source.committed()
        assert list((consumer.path / "spool").iterdir()) == [], "nothing is prepared any more"
        assert unused_large_files(consumer.path) == set()


def prepared(path: Path, rows: int = 3, piece_bytes: int = 1 << 20) -> tuple[TransactionBuffer, list[SpoolStep]]:
    buffer = TransactionBuffer(Spool(path), memory_bytes=1 << 20, piece_bytes=piece_bytes)
    buffer.begin(7)
    buffer.append(7, np.full(rows, 7, np.uint32), inserts(0, [(key, key % 2) for key in range(rows)]))
    return buffer, buffer.prepare(7, Prepare("order 1", 500, origin="elsewhere"))


def keys_of(work: list[SpoolStep | Committed | LargeTransaction]) -> list[int]:
    pieces = [item for item in work if isinstance(item, Committed)]
    return sorted(key for piece in pieces for table in piece.tables for key in table.rows["c1"].to_pylist())


def test_a_prepared_transaction_survives_the_process_with_rows_shapes_and_origin(tmp_path: Path) -> None:
    _, steps = prepared(tmp_path)
    for step in steps:
        step.run()
    again = TransactionBuffer(Spool(tmp_path), durable_lsn=600)
    assert again.prepared_transactions == 1
    noted, *work, forget = again.commit_prepared("order 1", 7, Commit(700, 710, 1))
    assert isinstance(noted, NoteCommit)
    assert isinstance(forget, Forget)
    assert keys_of(list(work)) == [0, 1, 2]
    (last,) = [item.transactions for item in work if isinstance(item, Committed)]
    assert last["origin"].to_pylist() == ["elsewhere"]
    forget.run()
    assert list(tmp_path.iterdir()) == []


def test_one_whose_keeping_was_not_finished_is_not_there(tmp_path: Path) -> None:
    prepared(tmp_path)
    again = TransactionBuffer(Spool(tmp_path))
    assert again.prepared_transactions == 0
    assert list(tmp_path.iterdir()) == [], "what it had written is removed: the source sends it again"


def test_a_commit_without_contents_is_an_error_that_names_the_transaction(tmp_path: Path) -> None:
    buffer = TransactionBuffer(Spool(tmp_path / "spool"))
    with pytest.raises(LogError, match=r"'order 1' \(xid 7\).*0/2BC") as told:
        buffer.commit_prepared("order 1", 7, Commit(700, 710, 1))
    assert "capture.spool_path" in told.value.remedy


def test_rows_that_somebody_removed_from_the_spool_are_an_error(tmp_path: Path) -> None:
    buffer, steps = prepared(tmp_path)
    for step in steps:
        step.run()
    (rows,) = tmp_path.glob("*.spool")
    rows.unlink()
    with pytest.raises(LogError, match="not in the spool"):
        buffer.commit_prepared("order 1", 7, Commit(700, 710, 1))


def test_rolling_back_what_is_not_known_is_nothing(tmp_path: Path) -> None:
    assert TransactionBuffer(Spool(tmp_path)).rollback_prepared("order 1", 7) == []


def test_a_prepare_that_comes_again_keeps_one_copy(tmp_path: Path) -> None:
    _, steps = prepared(tmp_path)
    for step in steps:
        step.run()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again, steps = prepared(tmp_path)
    assert steps == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert again.prepared_transactions == 1


def test_an_identifier_and_xid_that_are_used_again_replace_what_was_kept(tmp_path: Path) -> None:
    buffer, steps = prepared(tmp_path)
    for step in steps:
        step.run()
    buffer.begin(7)
    buffer.append(7, np.full(1, 7, np.uint32), inserts(0, [(99, 0)]))
    keep, forget = buffer.prepare(7, Prepare("order 1", 900))
    keep.run()
    forget.run()
    again = TransactionBuffer(Spool(tmp_path), durable_lsn=900)
    assert keys_of(again.commit_prepared("order 1", 7, Commit(1000, 1010, 1))) == [99]


def test_a_large_prepared_transaction_enters_the_log_by_reference_and_is_kept_until_it_is_there(tmp_path: Path) -> None:
    path = new_log(tmp_path / "log")
    writer = LogWriter(path)
    buffer, steps = prepared(path / "spool", rows=1000, piece_bytes=1000)
    write(writer, steps)
    (rows,) = (path / "spool").glob("*.spool")
    *work, forget = buffer.commit_prepared("order 1", 7, Commit(700, 710, 1))
    assert any(isinstance(item, LargeTransaction) for item in work)
    write(writer, work)
    (large,) = (path / "large").iterdir()
    assert large.samefile(rows), "no row is copied"
    write(writer, [forget])
    assert [key for _, key, _ in contents(path)] == list(range(1000))
    assert list((path / "spool").iterdir()) == []


def test_a_spool_on_another_file_system_is_copied_into_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    path = new_log(tmp_path / "log")
    writer = LogWriter(path)
    buffer, steps = prepared(tmp_path / "elsewhere", rows=1000, piece_bytes=1000)
    write(writer, steps)
    monkeypatch.setattr("pgtide.log.large.os.link", refuse)
    write(writer, buffer.commit_prepared("order 1", 7, Commit(700, 710, 1)))
    assert [key for _, key, _ in contents(path)] == list(range(1000))


def test_prepared_transactions_count_against_the_spools_limit_after_a_restart(tmp_path: Path) -> None:
    _, steps = prepared(tmp_path)
    for step in steps:
        step.run()
    used = Spool(tmp_path)
    TransactionBuffer(used)
    spool = Spool(tmp_path, max_bytes=used.used_bytes + 10)
    buffer = TransactionBuffer(spool, memory_bytes=1)
    buffer.begin(8)
    with pytest.raises(PgtideError, match="spool_max_bytes"):
        buffer.append(8, np.full(1, 8, np.uint32), inserts(0, [(1, 0)]))


def test_files_of_others_in_the_spools_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "2024010112-0001.csv").write_text("mine")
    (tmp_path / "notes").mkdir()
    TransactionBuffer(Spool(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2024010112-0001.csv", "notes"]


def test_a_note_that_was_being_written_when_the_process_died_goes_with_the_rest(tmp_path: Path) -> None:
    def cut_short(*_: object) -> None:
        raise OSError("died")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", cut_short)
        patch.setattr("pathlib.Path.unlink", lambda *_args, **_options: None)  # a process that dies cleans nothing up
        with pytest.raises(OSError, match="died"):
            replace_durably(tmp_path / "0000000001.prepared", b"{}")
    assert list(tmp_path.iterdir()) != []
    TransactionBuffer(Spool(tmp_path)).forget_all()
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "0000000001.prepared").write_text("{")
    with pytest.raises(LogError, match=r"0000000001\.prepared"):
        TransactionBuffer(Spool(tmp_path))


def test_rows_are_durable_before_the_note_and_the_note_before_the_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps = prepared(tmp_path)
    (keep,) = steps
    assert isinstance(keep, Keep)
    order: list[str] = []
    monkeypatch.setattr(
        "pgtide.transactions.prepared.fsync_files", lambda paths, _: order.extend(p.name for p in paths)
    )
    monkeypatch.setattr("pgtide.transactions.prepared.replace_durably", lambda path, _: order.append(path.name))
    keep.run()
    assert order == ["0000000001-0000.spool", "0000000001.prepared"]


def test_a_note_that_is_found_is_durable_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps = prepared(tmp_path)
    for step in steps:
        step.run()
    synced: list[Path] = []
    monkeypatch.setattr("pgtide.transactions.prepared.fsync_path", synced.append)
    assert TransactionBuffer(Spool(tmp_path)).prepared_transactions == 1
    assert synced == [tmp_path]

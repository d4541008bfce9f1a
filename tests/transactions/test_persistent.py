"""The buffer of sources that cannot send again: killed anywhere, it goes on from its position, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtide import failpoints
from pgtide.change import LargeTransaction
from pgtide.errors import LogError, PgtideError
from pgtide.transactions.buffer import Commit, Prepare
from pgtide.transactions.persistent import PersistentBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log
from tests.transactions.mortal import MortalProcess, unused_large_files
from tests.transactions.rows import TABLES, close_files_below, inserts, quick_disk, write

POSSIBLE = {
    "idle": ["append"],
    "open": ["append", "append", "append", "abort", "undo", "prepare", "commit", "commit", "rollback"],
    "prepared": ["commit prepared", "commit prepared", "rollback prepared"],
}
POINTS = [
    "position.synced", "position.moved", "log.block.written", "log.block.fsynced", "log.large.adopted",
    "log.large.written",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    kind: str
    number: int  # place in the source's log
    xid: int
    gid: str = ""
    changes: tuple[tuple[int, int], ...] = ()  # (subtransaction, key)
    count: int = 0  # how many are undone

    @property
    def lsn(self) -> int:
        return 1000 + 10 * self.number


@dataclass
class Source:
    """A log that is read once; and the model: what sessions have open or prepared, and what was committed."""

    events: list[Event] = field(default_factory=list)
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # xid → (subtransaction, key)
    open: dict[int, int] = field(default_factory=dict)  # session → xid
    prepared: dict[int, int] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    _key: int = 0

    def step(self, session: int, choice: int, size: int) -> Event:
        state = "open" if session in self.open else "prepared" if session in self.prepared else "idle"
        kind, number = POSSIBLE[state][choice % len(POSSIBLE[state])], len(self.events)
        xid = self.open.get(session) or self.prepared.get(session) or 100 * (number + 1)
        rows = self.rows.setdefault(xid, [])
        changes: tuple[tuple[int, int], ...] = ()
        count = min(size, len(rows)) if kind == "undo" else 0
        if kind == "append":
            self.open[session] = xid
            changes = tuple((xid + at % 2, self._key + at) for at in range(size))
            self._key += size
            rows += changes
        elif kind == "abort":
            self.rows[xid] = [(sub, key) for sub, key in rows if sub != xid + 1]
        elif kind == "undo":
            del rows[len(rows) - count :]
        elif kind == "prepare":
            self.prepared[session] = self.open.pop(session)
        else:
            (self.prepared if kind.endswith("prepared") else self.open).pop(session)
            self.committed += [key for _, key in rows] if kind.startswith("commit") else []
        self.events.append(Event(kind, number, xid, f"g{session}", changes, count))
        return self.events[-1]


class Consumer(MortalProcess):
    """Reads what its source does not send again."""

    def open_buffer(self, spool: Spool) -> None:
        self.buffer = PersistentBuffer(spool, self._memory_bytes, self._piece_bytes)
        self.next_event = 0 if self.buffer.position is None else int(self.buffer.position["event"])

    def checkpoint(self) -> None:
        self.buffer.checkpoint({"event": self.next_event}, self.writer.durable_lsn)

    def take(self, event: Event) -> None:
        assert event.number == self.next_event
        buffer, xid = self.buffer, event.xid
        if event.kind == "append":
            buffer.begin(xid)
            rows = inserts(buffer.next_place(xid), [(key, key % 2) for _, key in event.changes])
            ids = [b"%d" % key for _, key in event.changes]
            buffer.append(xid, np.array([sub for sub, _ in event.changes], np.uint32), rows, ids)
        elif event.kind == "abort":
            buffer.abort(xid, xid + 1)
        elif event.kind == "undo":
            buffer.undo(xid, event.count)
        elif event.kind == "prepare":
            assert buffer.prepare(xid, Prepare(event.gid, event.lsn + 5)) == []
        elif event.kind == "rollback":
            buffer.forget(xid)
        elif event.kind == "rollback prepared":
            assert buffer.rollback_prepared(event.gid, xid) == []
        elif event.lsn + 5 <= self.durable_lsn:
            buffer.forget(xid)
            buffer.rollback_prepared(event.gid, xid)
        elif event.kind == "commit":
            out = buffer.commit(xid, Commit(event.lsn, event.lsn + 5, 1))
            write(self.writer, [out] if isinstance(out, LargeTransaction) else out)
            self.writer.advance(event.lsn + 5)
        else:
            write(self.writer, buffer.commit_prepared(event.gid, xid, Commit(event.lsn, event.lsn + 5, 1)))
            self.writer.advance(event.lsn + 5)
        self.next_event += 1
        assert buffer.memory_bytes <= self._memory_bytes


steps = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 8), st.integers(1, 6), st.integers(0, 3), st.integers(0, 11)),
    min_size=25,
    max_size=40,
)


def survives(consumer: Consumer, event: Event, checkpoint: bool, death: int) -> bool:
    failpoints.arm(f"{POINTS[death]}=raise" if death < len(POINTS) else "")
    try:
        consumer.take(event)
        if checkpoint:
            consumer.checkpoint()
        return death != len(POINTS)  # or between two events
    except failpoints.FailpointReached:
        return False
    finally:
        failpoints.arm("")


@settings(max_examples=35)
@given(steps=steps, memory_bytes=st.sampled_from([1, 600, 1 << 20]), piece_bytes=st.sampled_from([1, 600, 1 << 20]))
def test_histories_with_checkpoints_and_crashes_equal_the_model(
    steps: list[tuple[int, int, int, int, int]], memory_bytes: int, piece_bytes: int
) -> None:
    source = Source()
    with quick_disk() as folder:
        consumer = Consumer(new_log(folder / "log"), memory_bytes, piece_bytes)
        passed = 0
        for session, choice, size, checkpoint, death in steps:
            event = source.step(session, choice, size)
            if not survives(consumer, event, checkpoint == 0, death):
                consumer.start()
                assert consumer.next_event >= passed, "the source has removed what came before"
                for again in source.events[consumer.next_event :]:
                    consumer.take(again)
            if checkpoint == 0:
                consumer.checkpoint()
                passed = consumer.next_event
        assert [key for _, key, _ in contents(consumer.path)] == source.committed
        assert consumer.buffer.open_transactions == len(source.open)
        assert consumer.buffer.prepared_transactions == len(source.prepared)
        for session in [*source.open, *source.prepared]:
            consumer.take(source.step(session, -1, 0))  # rolls back
        consumer.checkpoint()
        assert {file.name for file in (consumer.path / "spool").iterdir()} == {"lock", "position.json"}
        assert unused_large_files(consumer.path) == set()


def opened(path: Path, **options: int) -> PersistentBuffer:
    buffer = PersistentBuffer(Spool(path), **options)
    buffer.begin(7)
    buffer.append(7, np.full(3, 7, np.uint32), inserts(0, [(key, 0) for key in range(3)]))
    return buffer


def restarted(path: Path) -> PersistentBuffer:
    """Another process goes on, after the one before has died."""
    close_files_below(path)
    return PersistentBuffer(Spool(path))


def test_what_is_open_survives_with_the_position(tmp_path: Path) -> None:
    opened(tmp_path).checkpoint({"file": 3, "byte": 17}, 0)
    again = restarted(tmp_path)
    assert again.position == {"file": 3, "byte": 17}
    assert again.next_place(7) == 3
    again.append(7, np.full(1, 7, np.uint32), inserts(3, [(3, 1)]))
    out = again.commit(7, Commit(10, 20, 1))
    assert isinstance(out, list), "small: read back and written as rows"
    found = sorted(key for piece in out for table in piece.tables for key in table.rows["c1"].to_pylist())
    assert found == [0, 1, 2, 3]


def test_what_came_after_the_position_is_gone_with_the_process(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.checkpoint({"at": 1}, 0)
    buffer.append(7, np.full(1, 7, np.uint32), inserts(3, [(3, 1)]))
    buffer.begin(8)
    again = restarted(tmp_path)
    assert again.open_transactions == 1
    assert again.next_place(7) == 3


def test_the_position_does_not_pass_what_the_log_does_not_have(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.commit(7, Commit(10, 20, 1))
    with pytest.raises(PgtideError, match=r"ends at 0/14 .* durable up to 0/13"):
        buffer.checkpoint({"at": 2}, 0x13)
    assert not (tmp_path / "position.json").exists()
    buffer.checkpoint({"at": 2}, 0x14)


def test_a_file_that_the_position_names_outlives_its_transaction_until_the_next_position(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.checkpoint({"at": 1}, 0)
    (file,) = tmp_path.glob("*.spool")
    buffer.abort(7, 7)
    assert file.exists(), "a restart would need it"
    copy = tmp_path.with_name("copy")
    shutil.copytree(tmp_path, copy)
    assert restarted(copy).next_place(7) == 3
    buffer.checkpoint({"at": 2}, 0)
    assert not file.exists()


def test_rows_are_durable_before_the_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    module = "pgtide.transactions.persistent"
    monkeypatch.setattr(f"{module}.fsync_files", lambda paths, _: order.extend(path.name for path in paths))
    monkeypatch.setattr(f"{module}.replace_durably", lambda path, _: order.append(path.name))
    opened(tmp_path).checkpoint({"at": 1}, 0)
    assert order == ["0000000001-0000.spool", "position.json"]


def test_only_what_changed_is_made_durable_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = opened(tmp_path)
    buffer.checkpoint({"at": 1}, 0)
    synced: list[Path] = []
    monkeypatch.setattr("pgtide.transactions.persistent.fsync_files", lambda paths, _: synced.extend(paths))
    buffer.begin(8)
    buffer.append(8, np.full(1, 8, np.uint32), inserts(0, [(9, 1)]))
    buffer.checkpoint({"at": 2}, 0)
    assert [path.name for path in synced] == ["0000000002-0000.spool"]


def test_shapes_are_described_once_for_all_transactions(tmp_path: Path) -> None:
    buffer = PersistentBuffer(Spool(tmp_path))
    for xid in range(1, 50):
        buffer.begin(xid)
        buffer.append(xid, np.full(1, xid, np.uint32), inserts(0, [(xid, xid % 2)]))
    buffer.checkpoint({"at": 1}, 0)
    content = json.loads((tmp_path / "position.json").read_bytes())
    assert set(content["shapes"]) == {shape.fingerprint for shape in TABLES}
    assert restarted(tmp_path).open_transactions == 49


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"position": {}}'])
def test_a_position_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "position.json").write_bytes(content)
    with pytest.raises(LogError, match=r"position\.json: not a read position"):
        restarted(tmp_path)


def test_rows_that_are_lost_are_told_at_the_start(tmp_path: Path) -> None:
    opened(tmp_path).checkpoint({"at": 1}, 0)
    (file,) = tmp_path.glob("*.spool")
    file.unlink()
    with pytest.raises(LogError, match="lost rows of transaction 7"):
        restarted(tmp_path)


def test_a_spool_has_one_buffer_at_a_time(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    with pytest.raises(PgtideError, match="in use by another reader"):
        PersistentBuffer(Spool(tmp_path))
    buffer.checkpoint({"at": 1}, 0)
    buffer.close()
    assert PersistentBuffer(Spool(tmp_path)).position == {"at": 1}

"""Several captures on one object store, each killed, held up or forgotten at any request: equal to a list.

The source commits a fixed sequence of transactions.  A writer starts behind what it finds durable, as a capture does,
and goes on with what comes next; one that was thought dead goes on too, with what it had received.  Beside them
objects are merged and removed, by clients that can be held up just as well.  At every moment readers must see
exactly the first changes of that sequence, up to the end of a transaction, and never less than was acknowledged to
anybody.  The same run finds what goes wrong without each of the precautions: it can fail.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtide.change import LargeTransaction
from pgtide.errors import FencedError, LogError, LogRangeError, LogUnreachableError, TransientError
from pgtide.log.check import check_log
from pgtide.log.objects import layout as layout_module
from pgtide.log.objects import merge as merging
from pgtide.log.objects import writer as writing
from pgtide.log.objects.layout import GRACE_S
from pgtide.log.objects.marker import MarkerObject
from pgtide.log.objects.orphans import OrphanSweep
from pgtide.log.objects.writer import ObjectLogWriter
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import new_log, shape, transaction
from tests.log.object_store import Client, Connection, Fate, MemoryStore

ORDERS, ITEMS = shape(), shape(16400, "items")
CLIENTS_MAX = 4
REQUESTS_MAX = 2000  # many times what the longest sequence takes

WORK = ["capture", "merge", "tidy"]
# A transaction: how many changes, and how it comes: whole, cut into pieces, or spooled.
TRANSACTIONS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from("wwwcs")), min_size=4, max_size=14)
FATES = st.sampled_from([Fate.FINE] * 6 + list(Fate))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, CLIENTS_MAX - 1), FATES),
        st.tuples(st.just("run"), st.integers(0, CLIENTS_MAX - 1), st.integers(5, 40)),
        st.tuples(st.just("kill"), st.integers(0, CLIENTS_MAX - 1), st.none()),
        st.tuples(st.sampled_from([*WORK, "arrive", "look", "wait"]), st.integers(0, 3), st.none()),
    ),
    max_size=60,
)


class Log:
    """The source's transactions and what became of them."""

    def __init__(self, sequence: list[tuple[int, str]], folder: Path) -> None:
        self.store = MemoryStore()
        new_log(self.store)
        self._folder = folder
        self.transactions = []
        keys = itertools.count()
        for number, (changes, how) in enumerate(sequence):
            rows = [((ORDERS, ITEMS)[key % 2], key, f"t{number}") for key in itertools.islice(keys, changes)]
            self.transactions.append((200 + 10 * number, how, rows))
        self.model = [(n, key, note) for n, (_, key, note) in enumerate(r for t in self.transactions for r in t[2])]
        self.boundaries = {0, *itertools.accumulate(len(rows) for _, _, rows in self.transactions)}
        self.acknowledged_lsn = 0
        self.late: list[Callable[[], object]] = []
        self.clients: list[Client] = []
        self.reader = LogReader(self.store)
        self._number = itertools.count()

    def begin(self, work: str) -> None:
        """A client starts; others may still be there, held up somewhere."""
        if len(self.clients) == CLIENTS_MAX:
            self.clients.pop(0).kill()
        number, now_s = next(self._number), self.store.clock_s
        works: dict[str, Callable[[Connection], object]] = {
            "capture": lambda connection: self._capture(connection, number),
            "merge": lambda connection: merging.merge(connection, now_s),
            "tidy": lambda connection: self._tidy(connection, now_s),
        }
        self.clients.append(Client(self.store, self.late, works[work]))

    def _capture(self, connection: Connection, number: int) -> None:
        """As capture and appender work: after trouble look what there is, and have the rest sent again."""
        while True:
            try:
                writer = ObjectLogWriter(connection)
                while self._write_next(writer, batch=1 + number % 3):
                    pass
                return
            except (OSError, TransientError):
                continue

    def _write_next(self, writer: ObjectLogWriter, batch: int) -> bool:
        position = sum(1 for end_lsn, _, _ in self.transactions if end_lsn <= writer.durable_lsn)
        if position == len(self.transactions):
            writer.advance(self.transactions[-1][0] + 1)
            return False
        try:
            self._write(writer, position, batch)
            self.acknowledged_lsn = max(self.acknowledged_lsn, writer.durable_lsn)
        except OSError:
            writer.restart()
        return True

    def _write(self, writer: ObjectLogWriter, position: int, batch: int) -> None:
        end_lsn, how, rows = self.transactions[position]
        if how == "s":
            writer.write_large(self._spooled(end_lsn, rows))
        elif how == "c" and len(rows) > 1:
            writer.write([transaction(end_lsn, rows[:1], ends=False)])
            writer.write([transaction(end_lsn, rows[1:], first_place=1)])
        else:
            run = itertools.takewhile(lambda t: t[1] != "s", self.transactions[position : position + batch])
            writer.write([transaction(end_lsn, rows) for end_lsn, _, rows in run])

    def _spooled(self, end_lsn: int, rows: list[Any]) -> LargeTransaction:
        buffer = TransactionBuffer(Spool(Path(tempfile.mkdtemp(dir=self._folder))), memory_bytes=1)
        buffer.begin(7)
        buffer.append(7, np.full(len(rows), 7, np.uint32), transaction(end_lsn, rows).tables)
        large = buffer.commit(7, Commit(end_lsn - 8, end_lsn, 1))
        assert isinstance(large, LargeTransaction)
        return large

    def _tidy(self, connection: Connection, now_s: float) -> None:
        """Retention as it runs beside the capture, with a reader that still needs the second half."""
        end_offset = LogReader(connection).end().end_offset
        connection.write("readers/test.json", b'{"offset": %d}' % (end_offset // 2))
        remove(connection, plan_removal(connection, retention_s=600, max_bytes=0, now_s=now_s))
        OrphanSweep(connection).sweep()

    def look(self) -> None:
        """Compares what a reader that lives on, and a new one, see with the model."""
        fresh = LogReader(self.store)
        first, end = fresh.first_offset(), fresh.end()
        assert end.end_offset in self.boundaries, "half a transaction is seen"
        assert end.durable_lsn >= self.acknowledged_lsn, "something acknowledged is not durable"
        durable = sum(len(rows) for end_lsn, _, rows in self.transactions if end_lsn <= end.durable_lsn)
        assert durable == end.end_offset, "durable, but not there"
        for reader in (self.reader, fresh):
            assert rows_of(reader, first, end.end_offset) == self.model[first : end.end_offset]
        if first:
            with pytest.raises(LogRangeError, match="retention removed"):
                fresh.plan(0, end.end_offset)

    def end(self) -> None:
        """Nobody is held up any more, and whatever was under way arrives: then a capture that is left alone."""
        for client in self.clients:
            for _ in range(300):
                client.step()
            allowed = FencedError | LogUnreachableError | LogRangeError
            assert client.failure is None or isinstance(client.failure, allowed), client.failure
            client.kill()
        for request in self.late:
            request()
        self.begin("capture")
        for _ in range(REQUESTS_MAX):
            self.clients[-1].step()
        assert self.clients[-1].over, "a capture that is left alone does not come to an end"
        assert self.clients[-1].failure is None
        self.look()
        assert self.reader.end().end_offset == len(self.model)
        assert check_log(self.store).problems == []


def rows_of(reader: LogReader, first: int, end: int) -> list[tuple[int, int, str]]:
    rows: list[tuple[int, int, str]] = []
    for piece in reader.plan(first, end):
        batch = reader.read(piece).rows
        rows += zip(*(batch[name].to_pylist() for name in ("_offset", "c1", "c2")), strict=True)
    return sorted(rows)


@contextmanager
def small_runs() -> Iterator[None]:
    before, merging.RUN = merging.RUN, 3
    try:
        yield
    finally:
        merging.RUN = before


def play(sequence: list[tuple[int, str]], steps: list[tuple[str, int, Any]]) -> Log:
    """Looks at the log now and then, and at the end; returns it as it is then."""
    with tempfile.TemporaryDirectory() as folder, small_runs():
        log = Log(sequence, Path(folder))
        log.begin("capture")
        try:
            for action, number, argument in steps:
                client = log.clients[number % len(log.clients)]
                if action == "step":
                    client.step(argument)
                elif action == "run":
                    for _ in range(argument):
                        client.step()
                elif action == "kill":
                    client.kill()
                elif action in WORK:
                    log.begin(action)
                elif action == "arrive" and log.late:
                    log.late.pop(number % len(log.late))()
                elif action == "wait":
                    log.store.clock_s += (60.0, GRACE_S + 1)[number % 2]
                else:
                    log.look()
            log.look()
            log.end()
        finally:
            for client in log.clients:
                client.kill()
    return log


def random_history(seed: int) -> tuple[list[tuple[int, str]], list[tuple[str, int, Any]]]:
    """Longer than what Hypothesis makes, for histories in which something must go wrong."""
    generator = random.Random(seed)
    sequence = [(generator.randint(1, 3), generator.choice("wwwcs")) for _ in range(generator.randint(4, 14))]
    kinds = ["step", "run", "kill", "arrive", "look", "wait", *WORK]
    steps: list[tuple[str, int, Any]] = []
    for kind in generator.choices(kinds, [30, 14, 1, 5, 4, 4, 5, 8, 5], k=generator.randint(10, 120)):
        fate = generator.choice([Fate.FINE] * 6 + list(Fate))
        argument = {"step": fate, "run": generator.randint(5, 40)}.get(kind)
        steps.append((kind, generator.randrange(CLIENTS_MAX), argument))
    return sequence, steps


def without_conditional_creation(patch: pytest.MonkeyPatch) -> None:
    def create(store: MemoryStore, name: str, data: bytes) -> str | None:
        return None if name in store.objects and not name.startswith("segments/") else store._put(name, data)

    patch.setattr(MemoryStore, "create", create)


def without_conditional_replacing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "replace", lambda store, name, data, version: store._put(name, data))
    patch.setattr(MarkerObject, "is_protected", lambda marker: True)


def without_going_by_what_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writing, "read_object", lambda storage, name: None)


def with_names_of_large_objects_used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ObjectLogWriter, "_new_large_name", lambda writer: f"{writer.end_offset:020d}-{1:010d}-{1:04d}.seg")


def with_originals_removed_before_they_are_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layout_module._Ranges, "contain", lambda ranges, name: True)


@pytest.mark.parametrize(
    "mistake",
    [
        without_conditional_creation,
        without_conditional_replacing,
        without_going_by_what_is_there,
        with_names_of_large_objects_used_again,
        with_originals_removed_before_they_are_merged,
    ],
)
def test_the_same_run_finds_a_log(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    for seed in range(300):
        try:
            play(*random_history(seed))
        except (AssertionError, LogError):
            return
    raise AssertionError("300 histories, and nothing went wrong")


@given(TRANSACTIONS, STEPS)
def test_whatever_happens_readers_see_what_the_source_committed(
    sequence: list[tuple[int, str]], steps: list[tuple[str, int, Any]]
) -> None:
    log = play(sequence, steps)
    first, end = log.reader.first_offset(), log.reader.end().end_offset
    assert rows_of(log.reader, first, end) == log.model[first:]

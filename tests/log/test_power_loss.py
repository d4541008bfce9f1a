"""A random writer on real files, with kills, power losses and failing fsyncs, beside readers that live long.

The disk is simulated by remembering what each file had at its last fsync: a power loss takes the rest away, wholly, in
part, or leaves garbage in its place.  What must hold: nothing acknowledged is gone, an offset that was read once never
has other rows, and no reader sees half a transaction.  The same run finds violations when the writer does not fsync,
and when readers go beyond the marker: it can fail.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pgtide import failpoints
from pgtide.change import LargeTransaction
from pgtide.errors import LogError
from pgtide.log import layout as layout_module
from pgtide.log import marker as marker_module
from pgtide.log.marker import Marker, read_marker
from pgtide.log.reader import LogReader
from pgtide.log.recovery import _valid_blocks
from pgtide.log.writer import LogWriter
from pgtide.schema import TableShape
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import new_log, shape, transaction

ORDERS, ITEMS = shape(), shape(16400, "items")
STEPS = 50


class Disk:
    """What is on the disk, as opposed to in the page cache: every file as of its last fsync."""

    def __init__(self, generator: random.Random) -> None:
        self._random = generator
        self._durable: dict[int, bytes] = {}
        self.failing = False
        self.honest = True  # otherwise fsync returns at once and does nothing

    def fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.failing and path.parent.name == "segments":
            self.failing = False
            raise OSError(errno.EIO, "the disk does not answer")
        if self.honest and path.is_file():
            self._durable[os.fstat(descriptor).st_ino] = path.read_bytes()

    def lose_power(self, log: Path) -> None:
        for file in (log / "segments").glob("*.seg"):
            now, durable = file.read_bytes(), self._durable.get(file.stat().st_ino, b"")
            if not now.startswith(durable):
                durable = b""  # a removed file had this number before
            kept = self._random.choice([len(durable), self._random.randint(len(durable), len(now)), len(now)])
            garbage = os.urandom(len(now) - kept) if self._random.random() < 0.3 else b""
            file.write_bytes(now[:kept] + garbage)
            self._durable[file.stat().st_ino] = file.read_bytes()
        for file in (log / "control").glob("marker-*"):
            now, durable = file.read_bytes(), self._durable.get(file.stat().st_ino, b"")
            if len(durable) != len(now):
                durable = now
            slots = [self._random.choice([now, durable])[at : at + 4096] for at in (0, 4096)]
            file.write_bytes(b"".join(slots))
            self._durable[file.stat().st_ino] = file.read_bytes()


class Died(Exception):
    """The writer's process is gone."""


class History:
    """A server that can send again, one writer after the other, and readers."""

    def __init__(self, folder: Path, disk: Disk, generator: random.Random) -> None:
        self._folder = folder
        self._disk = disk
        self._random = generator
        self._path = new_log(folder / "log")
        self._sent: list[tuple[int, list[tuple[TableShape, int, str]]]] = []
        self._next = 0  # the transaction that the server sends next
        self._acknowledged_lsn = 0
        self._seen: dict[int, tuple[int, str]] = {}
        self._readers = [LogReader(self._path)]
        self._begin()

    def run(self) -> int:
        """How many transactions the log has in the end."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._write, 8), (self._write_cut, 3), (self._write_large, 3), (self._idle, 2), (self._fail_once, 1),
            (self._die, 3), (self._lose_power, 3), (self._read, 6),
        ]  # fmt: skip
        for _ in range(STEPS):
            while len(self._sent) < self._next + 4:
                self._commit_in_the_source()
            (action,) = self._random.choices([each for each, _ in actions], [weight for _, weight in actions])
            try:
                action()
                self._acknowledged_lsn = max(self._acknowledged_lsn, self._writer.durable_lsn)
            except Died:
                self._begin()
                assert self._writer.durable_lsn >= self._acknowledged_lsn, "an acknowledged transaction is gone"
        return self._checked()

    def _begin(self) -> None:
        self._writer = LogWriter(self._path, segment_bytes=self._random.choice([1, 3000, 1 << 20]))
        self._next = sum(1 for end_lsn, _ in self._sent if end_lsn <= self._writer.durable_lsn)

    def _commit_in_the_source(self) -> None:
        number = len(self._sent)
        changes = [
            (self._random.choice([ORDERS, ITEMS]), 10 * number + n, f"t{number}")
            for n in range(self._random.randint(1, 4))
        ]
        self._sent.append(((self._sent[-1][0] if self._sent else 100) + self._random.randint(10, 50), changes))

    def _write(self) -> None:
        count = self._random.randint(1, 3)
        self._writer.write(
            [transaction(end_lsn, changes) for end_lsn, changes in self._sent[self._next : self._next + count]]
        )
        self._next += count

    def _write_cut(self) -> None:
        end_lsn, changes = self._sent[self._next]
        if len(changes) > 1:
            self._writer.write([transaction(end_lsn, changes[:1], ends=False)])
            if self._random.random() < 0.5:
                self._read()
                raise Died
            self._writer.write([transaction(end_lsn, changes[1:], first_place=1)])
            self._next += 1

    def _write_large(self) -> None:
        end_lsn, changes = self._sent[self._next]
        buffer = TransactionBuffer(Spool(self._folder / "spool"), memory_bytes=1)
        buffer.begin(7)
        buffer.append(7, np.full(len(changes), 7, np.uint32), transaction(end_lsn, changes).tables)
        large = buffer.commit(7, Commit(end_lsn - 8, end_lsn, 1))
        assert isinstance(large, LargeTransaction)
        self._writer.write_large(large)
        self._next += 1

    def _idle(self) -> None:
        self._writer.advance(self._sent[self._next - 1][0] + 1 if self._next else 101)

    def _fail_once(self) -> None:
        self._disk.failing = True
        end_lsn, changes = self._sent[self._next]
        try:
            self._writer.write([transaction(end_lsn, changes)])
        except OSError:
            self._writer.restart()
            self._writer.write([transaction(end_lsn, changes)])
        self._disk.failing = False
        self._next += 1

    def _die(self) -> None:
        points = [
            "log.block.written",
            "log.block.fsynced",
            "log.marker.moved",
            "log.large.adopted",
            "log.large.written",
        ]
        failpoints.arm(self._random.choice(points) + "=raise")
        try:
            self._random.choice([self._write, self._write_large])()
        except failpoints.FailpointReached:
            pass
        finally:
            failpoints.arm("")
        self._read()  # what was written and not marked must not be seen: it may be gone in a moment
        raise Died

    def _lose_power(self) -> None:
        try:
            self._die()
        finally:
            self._disk.lose_power(self._path)

    def _read(self) -> None:
        boundaries = {0, *itertools.accumulate(len(changes) for _, changes in self._sent)}
        for reader in self._readers:
            end = reader.end().end_offset
            assert end in boundaries, "half a transaction is seen"
            for piece in reader.plan(self._random.randint(0, end), end):
                rows = reader.read(piece).rows
                for offset, key, note in zip(
                    *(rows[name].to_pylist() for name in ("_offset", "c1", "c2")), strict=True
                ):
                    assert self._seen.setdefault(offset, (key, note)) == (key, note), f"other rows at offset {offset}"
        if self._random.random() < 0.3:
            self._readers.append(LogReader(self._path))

    def _checked(self) -> int:
        self._read()
        reader = LogReader(self._path)
        found: list[tuple[int, int]] = []
        for piece in reader.plan(0, reader.end().end_offset):
            rows = reader.read(piece).rows
            found += zip(rows["_offset"].to_pylist(), rows["c1"].to_pylist(), strict=True)
        durable = [changes for end_lsn, changes in self._sent if end_lsn <= reader.end().durable_lsn]
        expected = [key for changes in durable for _, key, _ in changes]
        assert [key for _, key in sorted(found)] == expected, "not what the source committed"
        return len(durable)


def run_seed(seed: int, monkeypatch: pytest.MonkeyPatch, *, honest: bool = True) -> int:
    """Plays a history; how many transactions were found as they were sent, which are all that are durable."""
    generator = random.Random(seed)
    disk = Disk(generator)
    disk.honest = honest
    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(os, "fdatasync", disk.fsync)
    with tempfile.TemporaryDirectory() as folder:
        return History(Path(folder), disk, generator).run()


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 60), marks=pytest.mark.heavy)])
def test_nothing_acknowledged_is_lost_and_no_offset_changes(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        try:
            assert run_seed(seed, monkeypatch) > 0
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def violations(monkeypatch: pytest.MonkeyPatch, *, honest: bool = True) -> int:
    found = 0
    for seed in range(8):
        try:
            run_seed(seed, monkeypatch, honest=honest)
        except (AssertionError, LogError):
            found += 1
    return found


def test_the_same_run_finds_a_writer_that_does_not_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    assert violations(monkeypatch, honest=False) > 0


def test_the_same_run_finds_readers_that_go_beyond_the_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_far_as_blocks_go(control: Path) -> tuple[int, Marker]:
        """A naive reader: every valid block counts, marked or not."""
        epoch, marker = read_marker(control)
        end_offset = marker.end_offset
        for header, _ in _valid_blocks(control.parent / "segments", marker, epoch + 1):
            end_offset = header.end_offset
        return epoch, Marker(**{**{name: getattr(marker, name) for name in Marker.__slots__}, "end_offset": end_offset})

    assert marker_module.read_marker is read_marker
    monkeypatch.setattr(layout_module, "read_marker", as_far_as_blocks_go)
    assert violations(monkeypatch) > 0

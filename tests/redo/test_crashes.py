"""Killed anywhere, and after losing power: what was committed is in the log once, although no record is read twice that
the position has passed (the source removes those files at once)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pgtide import failpoints
from pgtide.errors import PgtideError
from pgtide.redo.files import file_of, numbers
from pgtide.redo.reader import RedoReader
from tests.log.test_power_loss import Disk
from tests.redo.recording import TIGHT, expected, found, recorded, remove_passed
from tests.transactions.rows import close_files_below, quick_disk
from tests.waiting import wait_for

OWN = ("position.synced", "position.moved", "redo.written")
LOG = (
    "log.segment.created",
    "log.block.written",
    "log.block.fsynced",
    "log.marker.moved",
    "log.marker.idle",
    "log.large.adopted",
    "log.large.written",
    "log.epoch.taken",
    "log.recovered",
)


def started(folder: Path, points: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.redo.child", str(folder / "redo"), str(folder / "log")],
        env=os.environ | {failpoints.ENVIRONMENT_VARIABLE: points},
    )


def test_killed_at_point_after_point(tmp_path: Path) -> None:
    """One recording; each process dies at its point, and the next one goes on from what that has left."""
    history = recorded(tmp_path / "redo", 11, 1500)
    for number, point in enumerate([*OWN, *LOG]):
        process = started(tmp_path, f"{point}=kill@{1 if point in LOG[-2:] else 1 + number % 3}")
        assert process.wait(60) == -signal.SIGKILL, f"{point} was not reached"
    assert started(tmp_path).wait(60) == 0
    assert found(tmp_path / "log") == expected(history)
    assert {file.name for file in (tmp_path / "log" / "spool").iterdir()} == {"lock", "position.json"}
    assert len(numbers(tmp_path / "redo")) == 1, "all but the last file were removed on the way"


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The moment is when the position is seen to have moved: wherever the process is by then."""
    history = recorded(tmp_path / "redo", 12, 700)
    position = tmp_path / "log" / "spool" / "position.json"
    for _ in range(4):
        before = position.read_bytes() if position.exists() else b""
        process = started(tmp_path)
        wait_for(lambda: position.exists() and position.read_bytes() != before, what="the position to move")  # noqa: B023
        process.kill()
        process.wait()
    assert started(tmp_path).wait(60) == 0
    assert found(tmp_path / "log") == expected(history)


def read_with_deaths(folder: Path, generator: random.Random, disk: SpoolDisk | None = None) -> int:
    """Reads to the end, in process after process; how many died."""
    points = [*OWN, *LOG]
    for deaths in range(1000):
        failpoints.arm(
            f"{generator.choice(points)}=raise@{generator.randint(1, 3)}" if generator.random() < 0.95 else ""
        )
        try:
            reader = RedoReader(
                folder / "redo",
                folder / "log",
                limits=TIGHT,
                on_position=lambda lsn: remove_passed(folder / "redo", lsn),
            )
            reader.read_all()
            return deaths
        except failpoints.FailpointReached:
            pass
        finally:
            failpoints.arm("")
            close_files_below(folder)
        if disk is not None:
            disk.lose_power(folder / "log")
    raise AssertionError("it does not come to an end")


def test_dying_again_and_again_loses_and_repeats_nothing() -> None:
    deaths = 0
    for seed in range(6):
        with quick_disk() as folder:
            history = recorded(folder / "redo", seed, 500, records_per_file=50)
            deaths += read_with_deaths(folder, random.Random(seed))
            assert found(folder / "log") == expected(history), f"seed {seed}"
    assert deaths > 20


class SpoolDisk(Disk):
    """Loses of the spool, too, what was not fsynced."""

    def lose_power(self, log: Path) -> None:
        super().lose_power(log)
        for file in [*(log / "spool").glob("*.spool"), *(log / "spool").glob("*.ids"), *(log / "large").glob("*")]:
            now, durable = file.read_bytes(), self._durable.get(file.stat().st_ino, b"")
            if not now.startswith(durable):
                durable = b""
            kept = self._random.choice([len(durable), self._random.randint(len(durable), len(now)), len(now)])
            file.write_bytes(now[:kept])


def lose_power_again_and_again(seed: int, monkeypatch: pytest.MonkeyPatch, *, honest: bool = True) -> int:
    """Reads a history to its end, and compares; how often power was lost on the way."""
    generator = random.Random(seed)
    disk = SpoolDisk(generator)
    disk.honest = honest
    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(os, "fdatasync", disk.fsync)
    with tempfile.TemporaryDirectory() as folder:
        history = recorded(Path(folder) / "redo", seed, 300, records_per_file=50)
        deaths = read_with_deaths(Path(folder), generator, disk)
        assert found(Path(folder) / "log") == expected(history), f"seed {seed}"
    return deaths


def test_losing_power_again_and_again_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = sum(lose_power_again_and_again(seed, monkeypatch) for seed in range(20, 25))
    assert deaths > 4


def test_the_same_run_finds_a_disk_that_does_not_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    found_out = 0
    for seed in range(20, 24):
        try:
            lose_power_again_and_again(seed, monkeypatch, honest=False)
        except (AssertionError, PgtideError):
            found_out += 1
    assert found_out


def test_a_recording_that_lost_a_file_too_early_does_not_pass_for_read(tmp_path: Path) -> None:
    recorded(tmp_path / "redo", 13, 300, records_per_file=50)
    file_of(tmp_path / "redo", 2).unlink()
    with pytest.raises(PgtideError, match="redo-0000000002"):
        read_with_deaths(tmp_path, random.Random(1))

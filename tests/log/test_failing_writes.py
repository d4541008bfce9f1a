"""Writers whose disk fails them: no space, no file descriptor and no offset is lost by trying again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pgtide.log.writer import LogWriter
from tests.arming import armed
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_log(tmp_path / "log")


def used_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "segments").iterdir())


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_attempts_that_fail_take_no_space_for_long(path: Path, segment_bytes: int) -> None:
    writer = LogWriter(path, segment_bytes=segment_bytes)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    before = used_bytes(path)
    with armed("log.block.written=fail:ENOSPC"):
        for _ in range(5):
            with pytest.raises(OSError, match="No space left"):
                writer.write([transaction(300, [(ORDERS, n, "b" * 100) for n in range(100)])])
            writer.restart()
            assert used_bytes(path) == before
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "b")]


@pytest.mark.parametrize("point", ["log.epoch.taken", "log.recovered", "log.recovery.copied"])
def test_starts_that_fail_leave_no_file_open_and_lose_nothing(path: Path, point: str) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    as_of_then = {file: file.read_bytes() for file in (path / "control").glob("marker-*")}
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    writer.close()
    for file, data in as_of_then.items():
        file.write_bytes(data)
    opened = []
    with armed(f"{point}=fail:ENOSPC"):
        for _ in range(3 if point != "log.recovered" else 1):  # after that one there is nothing to recover any more
            opened.append(len(os.listdir("/proc/self/fd")))
            with pytest.raises(OSError, match="No space left"):
                LogWriter(path)
            opened.append(len(os.listdir("/proc/self/fd")))
    assert len(set(opened)) == 1, opened
    assert LogWriter(path).end_offset == 2
    assert contents(path) == [(0, 1, "a"), (1, 2, "b")]

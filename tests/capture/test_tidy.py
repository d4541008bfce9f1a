"""Retention while the capture runs: who loses something is named, and trouble is said and tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgtide.capture.tidy import INTERVAL_S, Tidier
from pgtide.config import Log
from pgtide.log.writer import LogWriter
from pgtide.metrics import exposition
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five segments with one change each, and a reader that has read nothing."""
    path = new_log(tmp_path / "log")
    writer = LogWriter(path, segment_bytes=1)
    for number in range(5):
        writer.write([transaction(200 + 10 * number, [(ORDERS, number, "a")])])
    (path / "readers").mkdir()
    (path / "readers" / "mirror.json").write_text('{"offset": 0}')
    return path


def tidy(tidier: Tidier, now_s: float) -> None:
    tidier.look(now_s)
    assert tidier._thread is not None
    tidier._thread.join()


def test_a_reader_that_loses_changes_to_the_size_limit_is_named_and_counted(path: Path) -> None:
    said: list[str] = []
    size = sum(file.stat().st_size for file in (path / "segments").iterdir())
    tidy(Tidier(path, Log(max_bytes=size - 1), said.append), 0.0)
    assert said == [
        "the log is larger than log.max_bytes: reader 'mirror', at offset 0, loses changes up to 1",
    ]
    assert b"pgtide_log_readers_losing_changes 1.0" in exposition()
    assert [offset for offset, _, _ in contents(path)] == [1, 2, 3, 4]


def test_a_reader_is_waited_for_however_old_the_changes_are(path: Path) -> None:
    said: list[str] = []
    tidy(Tidier(path, Log(retention_hours=0), said.append), 0.0)
    assert said == []
    assert len(contents(path)) == 5


def test_trouble_is_said_and_the_next_round_works(path: Path) -> None:
    said: list[str] = []
    tidier = Tidier(path, Log(retention_hours=0), said.append)
    reader = path / "readers" / "mirror.json"
    reader.write_text("{")
    tidy(tidier, 0.0)
    assert len(said) == 1
    assert "mirror.json" in said[0]
    reader.write_text('{"offset": 5}')
    tidy(tidier, INTERVAL_S)
    assert [offset for offset, _, _ in contents(path)] == [4]

"""Epochs and their marker files: whose word counts, whatever is removed, paused or fails in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pgtide.errors import FencedError, LogCorruptError
from pgtide.log import files as files_module
from pgtide.log import marker as marker_module
from pgtide.log.marker import Marker, MarkerFile, epochs, read_marker
from pgtide.log.reader import LogReader
from pgtide.log.writer import LogWriter
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_log(tmp_path / "log")


def start(path: Path, times: int) -> LogWriter:
    for _ in range(times):
        writer = LogWriter(path)
        writer.close()
    return writer


def test_of_many_starts_only_the_newest_marker_files_stay(path: Path) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])
    start(path, 20)
    assert epochs(path / "control") == [19, 20, 21]
    assert read_marker(path / "control")[0] == 21
    assert contents(path) == [(0, 1, "a")]


def test_a_reader_whose_marker_file_goes_before_it_is_read_lists_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LogWriter(path).write([transaction(200, [(ORDERS, 1, "a")])])
    real = marker_module.read_epoch

    def paused(control: Path, epoch: int) -> Marker:
        monkeypatch.setattr(marker_module, "read_epoch", real)
        start(path, 5)
        return real(control, epoch)

    monkeypatch.setattr(marker_module, "read_epoch", paused)
    assert LogReader(path).end().end_offset == 1


def test_an_epoch_that_was_taken_and_removed_is_not_taken_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = LogWriter(path)
    real = marker_module.read_marker

    def paused(control: Path) -> tuple[int, Marker]:
        found = real(control)
        monkeypatch.setattr(marker_module, "read_marker", real)
        start(path, 6)
        return found

    monkeypatch.setattr(marker_module, "read_marker", paused)
    taken = MarkerFile.take(path / "control")
    assert taken.epoch == 8, "epoch 2, which was free again, is lower than what others hold"
    assert 2 not in epochs(path / "control")
    with pytest.raises(FencedError):
        first.write([transaction(200, [(ORDERS, 1, "a")])])


@pytest.mark.parametrize("others", [1, 2, 3, 7])
def test_a_writer_is_told_that_it_was_fenced_however_long_ago(path: Path, others: int) -> None:
    paused = LogWriter(path)
    start(path, others).close()
    with pytest.raises(FencedError, match="another capture has taken over"):
        paused.write([transaction(200, [(ORDERS, 1, "a")])])
    with pytest.raises(FencedError, match="another capture has taken over"):
        paused.restart()
    assert contents(path) == []


def test_a_restart_that_is_overtaken_after_its_last_look_gives_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(path)
    real = writer._close_segment

    def overtaken() -> None:
        real()
        LogWriter(path)

    monkeypatch.setattr(writer, "_close_segment", overtaken)
    with pytest.raises(FencedError):
        writer.restart()


@pytest.mark.parametrize("failing", ["directory", "marker"])
def test_an_epoch_that_could_not_be_taken_is_not_mistaken_for_another_writers(
    failing: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, 1, "a")])])

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        if failing == "directory":
            patched.setattr(files_module, "fsync_path", broken)
        else:
            patched.setattr(MarkerFile, "__init__", broken)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                writer.restart()
    writer.restart()
    writer.write([transaction(300, [(ORDERS, 2, "b")])])
    assert contents(path) == [(0, 1, "a"), (1, 2, "b")]


def test_a_writer_whose_marker_was_removed_does_not_go_on(path: Path) -> None:
    start(path, 1)
    writer = LogWriter(path)
    (path / "control" / "marker-0000000002").unlink()
    with pytest.raises(LogCorruptError, match="marker-0000000002: the durable marker was removed"):
        writer.write([transaction(200, [(ORDERS, 1, "a")])])

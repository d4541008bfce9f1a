"""Files that are replaced whole: side by side, and on a disk that is full."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pgtide.log.files import create_durably, remove_leftovers, replace_durably


def test_threads_may_replace_one_file_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def replace(content: bytes) -> None:
        try:
            for _ in range(50):
                replace_durably(tmp_path / "file", content)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    contents = [bytes([65 + number]) * 10_000 for number in range(4)]
    threads = [threading.Thread(target=replace, args=[content]) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (tmp_path / "file").read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("write", [replace_durably, create_durably])
def test_a_full_disk_leaves_everything_as_it_was(
    write: Callable[[Path, bytes], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "old").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / name, b"new")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"old": b"old"}


def test_only_old_leftovers_are_removed(tmp_path: Path) -> None:
    for name in (".removed.json.1.tmp", ".removed.json.2.tmp", "removed.json"):
        (tmp_path / name).touch()
    os.utime(tmp_path / ".removed.json.1.tmp", (0, time.time() - 7200))
    os.utime(tmp_path / "removed.json", (0, 0))
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".removed.json.2.tmp", "removed.json"]

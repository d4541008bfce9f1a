"""`pgtide log`: what people see of the change log."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pgtide.log.writer import LogWriter
from tests.cli.program import run
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()
ITEMS = shape(16400, "items")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration with a log of three segments."""
    (tmp_path / "pgtide.toml").write_text('[source]\ndsn = "dbname=nowhere"\n[log]\npath = "log"\n')
    writer = LogWriter(new_log(tmp_path / "log"), segment_bytes=1)
    for number in range(3):
        writer.write([transaction(200 + number, [(ORDERS, number, "note"), (ITEMS, number, "item")])])
    writer.close()
    return tmp_path


def test_show_tells_how_far_the_log_goes_and_what_is_in_it(folder: Path) -> None:
    found = json.loads(run("log", "show", "--json", folder=folder).stdout)
    assert (found["first_offset"], found["end_offset"], len(found["segments"])) == (0, 6, 3)
    assert found["tables"]["public.orders"] == {"columns": ["id", "note"], "key": ["id"]}
    shown = run("log", "show", folder=folder)
    assert shown.returncode == 0
    assert "0 to 6" in shown.stdout
    assert "public.items" in shown.stdout


def test_tail_shows_the_newest_changes_of_a_table(folder: Path) -> None:
    shown = run("log", "tail", "--table", "public.orders", "--last", "4", "--json", folder=folder)
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(row["offset"], row["change"], row["row"]["id"]) for row in rows] == [(2, "insert", 1), (4, "insert", 2)]
    wrong = run("log", "tail", "--table", "public.nothing", folder=folder)
    assert wrong.returncode == 1
    assert "public.items, public.orders" in wrong.stderr


def test_check_finds_a_flipped_bit(folder: Path) -> None:
    assert run("log", "check", folder=folder).stdout.startswith("fine: 6 changes of 3 transactions")
    segment = min((folder / "log" / "segments").iterdir())
    damaged = bytearray(segment.read_bytes())
    damaged[-1] ^= 1
    segment.write_bytes(damaged)
    found = run("log", "check", folder=folder)
    assert found.returncode == 1
    assert segment.name in found.stderr


def test_prune_shows_first_and_removes_when_told(folder: Path) -> None:
    preview = run("log", "prune", "--hours", "0", folder=folder)
    assert "would remove 2 segments" in preview.stdout
    assert len(contents(folder / "log")) == 6
    killed = run(
        "log", "prune", "--hours", "0", "--yes", folder=folder, PGTIDE_FAILPOINTS="log.retention.recorded=kill"
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(contents(folder / "log")) == 6
    done = run("log", "prune", "--hours", "0", "--yes", folder=folder)
    assert "removing 2 segments" in done.stdout
    assert [offset for offset, _, _ in contents(folder / "log")] == [4, 5]

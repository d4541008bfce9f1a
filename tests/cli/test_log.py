"""`pgtide log`: what people see of the change log."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from pgtide.change import Committed, OldImage, TableRows
from pgtide.log.writer import LogWriter
from pgtide.schema import storage_schema
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
    assert found["bytes"] == sum(segment["bytes"] for segment in found["segments"]) > 0
    assert found["oldest_commit"] < found["newest_commit"]
    assert found["tables"]["public.orders"] == {"columns": ["id", "note"], "key": ["id"]}
    shown = run("log", "show", folder=folder)
    assert shown.returncode == 0
    for words in ("0 to 6", "public.items", "in 3 segments", "72 hours, no limit on size", "none is registered"):
        assert words in shown.stdout


def tail(folder: Path, *options: str) -> list[tuple[int, str, str]]:
    shown = run("log", "tail", "--json", *options, folder=folder)
    assert shown.returncode == 0, shown.stderr
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    return [(row["offset"], row["change"], row["table"]) for row in rows]


def test_tail_shows_the_newest_changes_that_are_asked_for(folder: Path) -> None:
    orders = [(offset, "insert", "public.orders") for offset in (0, 2, 4)]
    items = [(offset, "insert", "public.items") for offset in (1, 3, 5)]
    assert tail(folder, "--table", "public.orders", "--last", "2") == orders[1:]
    assert tail(folder, "--table", "public.*") == sorted(orders + items)
    assert (
        tail(folder, "--table", "public.orders", "--table", "public.items", "--last", "3") == sorted(orders + items)[3:]
    )
    assert tail(folder, "--change", "delete") == []
    assert tail(folder, "--change", "delete", "--change", "insert", "--last", "1") == items[2:]
    assert tail(folder, "--last", "0") == []


def test_tail_looks_back_as_far_as_it_must(folder: Path) -> None:
    writer = LogWriter(folder / "log")
    for number in range(3):
        writer.write([transaction(300 + number, [(ITEMS, n, "item") for n in range(3000)])])
    assert tail(folder, "--table", "public.orders", "--last", "1") == [(4, "insert", "public.orders")]


def test_tail_says_what_there_is_when_it_is_asked_for_something_else(folder: Path) -> None:
    for arguments, code, told in (
        (("--table", "public.nothing"), 1, "It has: public.items, public.orders."),
        (("--change", "inserts"), 2, "There are: insert, update, delete"),
        (("--last", "-1"), 2, "--last"),
    ):
        wrong = run("log", "tail", *arguments, folder=folder)
        assert wrong.returncode == code
        assert told in wrong.stderr


def test_tail_shows_old_values_unchanged_ones_and_nulls_as_what_they_are(folder: Path) -> None:
    note = ORDERS.columns[1]
    schema = storage_schema(ORDERS, unchanged=True, old=ORDERS.columns)
    values = [
        # an update of the key that leaves the note as it is, one with a full old image, a delete with its key
        {"_op": 2, "_unchanged": b"\2", "_old": OldImage.KEY, "c1": 8, "c2": None, "_old.c1": 7, "_old.c2": None},
        {"_op": 2, "_unchanged": b"\0", "_old": OldImage.FULL, "c1": 8, "c2": None, "_old.c1": 8, "_old.c2": "before"},
        {"_op": 3, "_unchanged": b"\0", "_old": OldImage.KEY, "c1": 8, "c2": None, "_old.c1": None, "_old.c2": None},
    ]
    rows = [{"_place": place, "_txn": 0} | value for place, value in enumerate(values)]
    one = transaction(300, [(ORDERS, 0, "")] * 3)
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    LogWriter(folder / "log").write([Committed(one.transactions, (TableRows(ORDERS, batch),))])
    shown = run("log", "tail", "--last", "3", folder=folder).stdout.splitlines()
    assert [line.partition("public.orders ")[2] for line in shown] == [
        f"id=8, {note.name}=(unchanged), was id=7",
        "id=8, note=NULL, was id=8, note='before'",
        "id=8",
    ]


def test_check_tells_file_byte_and_what_to_do(folder: Path) -> None:
    assert run("log", "check", folder=folder).stdout.startswith("fine: 6 changes of 3 transactions")
    first, second, _ = sorted((folder / "log" / "segments").iterdir())
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    second.unlink()
    found = run("log", "check", folder=folder)
    assert found.returncode == 1
    assert found.stdout.startswith("2 problems: 3 changes of 2 transactions")
    assert f"{first} at byte " in found.stderr
    assert "offsets 1 to 2 cannot be read: restore the file from a copy of the log" in found.stderr
    assert "the segment ends here with offset 2, but should go on to 4" in found.stderr
    problems = json.loads(run("log", "check", "--json", folder=folder).stdout)["problems"]
    assert [(problem["first_offset"], problem["end_offset"]) for problem in problems] == [(1, 2), (2, 4)]


def test_prune_shows_first_and_removes_when_told(folder: Path) -> None:
    assert "nothing to remove: the oldest segment that stays was written" in run("log", "prune", folder=folder).stdout
    preview = run("log", "prune", "--hours", "0", folder=folder)
    assert "would remove 2 segments" in preview.stdout
    assert "changes below offset 4 go; the segment that is being written always stays" in preview.stdout
    assert len(contents(folder / "log")) == 6
    killed = run(
        "log", "prune", "--hours", "0", "--yes", folder=folder, PGTIDE_FAILPOINTS="log.retention.recorded=kill"
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(contents(folder / "log")) == 6
    done = run("log", "prune", "--hours", "0", "--yes", folder=folder)
    assert "removing 2 segments" in done.stdout
    assert [offset for offset, _, _ in contents(folder / "log")] == [4, 5]


def test_prune_tells_who_would_lose_something_and_who_keeps_the_rest(folder: Path) -> None:
    (folder / "log" / "readers").mkdir()
    (folder / "log" / "readers" / "mirror.json").write_text('{"offset": 3}')
    by_age = run("log", "prune", "--hours", "0", folder=folder).stdout
    assert "would remove 1 segments" in by_age
    assert "reader mirror, at offset 3, still needs the oldest segment that stays" in by_age
    by_size = run("log", "prune", "--max-bytes", "1", folder=folder).stdout
    assert "reader mirror would lose offsets 3 to 4, which it has not read" in by_size
    planned = json.loads(run("log", "prune", "--max-bytes", "1", "--json", folder=folder).stdout)
    assert (len(planned["segments"]), planned["end_offset"], planned["removed"]) == (2, 4, False)
    assert planned["losers"] == {"mirror": 3}

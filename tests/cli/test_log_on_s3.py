"""What people see of a log on S3, and of a store that cannot be used: exit code 2 and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pgtide.log.objects.writer import ObjectLogWriter
from pgtide.log.storage import storage_at
from tests.cli.program import run
from tests.database import Database
from tests.log.building import new_log, shape, transaction

ORDERS = shape()


def configured(folder: Path, location: str, dsn: str = "dbname=nowhere") -> None:
    (folder / "pgtide.toml").write_text(f'[source]\ndsn = "{dsn}"\n[log]\npath = "{location}"\n')


@pytest.fixture
def folder(tmp_path: Path, bucket: str) -> Path:
    """A configuration with a log of three objects."""
    configured(tmp_path, f"{bucket}/log")
    writer = ObjectLogWriter(new_log(storage_at(f"{bucket}/log")))
    for number in range(3):
        writer.write([transaction(200 + number, [(ORDERS, number, "note")])])
    return tmp_path


def test_show_tail_check_and_prune_work_as_on_a_folder(folder: Path, bucket: str) -> None:
    shown = json.loads(run("log", "show", "--json", folder=folder).stdout)
    assert (shown["path"], shown["end_offset"], len(shown["segments"])) == (f"{bucket}/log", 3, 3)
    rows = [json.loads(line) for line in run("log", "tail", "--last", "2", "--json", folder=folder).stdout.splitlines()]
    assert [(row["offset"], row["row"]["id"]) for row in rows] == [(1, 1), (2, 2)]
    assert run("log", "check", folder=folder).stdout.startswith("fine: 3 changes of 3 transactions")
    assert "removing 2 segments" in run("log", "prune", "--hours", "0", "--yes", folder=folder).stdout
    assert json.loads(run("log", "show", "--json", folder=folder).stdout)["first_offset"] == 2


@pytest.mark.parametrize(
    ("location", "variables", "told"),
    [
        ("s3://there-is-none/log", {}, ["there-is-none", "NoSuchBucket", "create the bucket"]),
        ("", {"AWS_SECRET_ACCESS_KEY": "hunter2"}, ["SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"]),
    ],
    ids=["bucket", "secret"],
)
def test_a_store_that_cannot_be_used_is_told_before_anything_is_touched(
    location: str, variables: dict[str, str], told: list[str], database: Database, tmp_path: Path, bucket: str
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    configured(tmp_path, location or f"{bucket}/log", database.dsn)
    done = run("capture", folder=tmp_path, **variables)
    assert done.returncode == 2, done.stderr
    assert all(text in done.stderr for text in told), done.stderr
    assert "hunter2" not in done.stderr
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert database.rows(slots) == []


def test_a_log_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path, bucket: str) -> None:
    configured(tmp_path, f"{bucket}/other")
    done = run("log", "show", folder=tmp_path)
    assert done.returncode == 1
    assert f"no change log in {bucket}/other" in done.stderr


def test_status_tells_of_a_log_on_s3_and_of_a_store_that_refuses(folder: Path) -> None:
    told = json.loads(run("status", "--json", folder=folder).stdout)
    assert (told["log"]["end_offset"], told["log"]["segments"], told["log"]["error"]) == (3, 3, None)
    refused = json.loads(run("status", "--json", folder=folder, AWS_SECRET_ACCESS_KEY="hunter2").stdout)
    assert "SignatureDoesNotMatch" in refused["log"]["error"]
    assert (refused["readers"], refused["history"]) == ({}, {})

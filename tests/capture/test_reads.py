"""Rows that were there before, as `read` changes in the log: whoever applies the log in order has the source's rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pgtide import local
from pgtide.change import Op, TransactionKind
from pgtide.cli.running import capture_status
from pgtide.config import Config, Log, Snapshot
from pgtide.log.check import check_log
from pgtide.log.reader import LogReader
from pgtide.log.reads import noted_reads
from pgtide.snapshot.copy_range import TableAsOf
from pgtide.snapshot.table_ranges import table_as_of
from tests.arming import armed
from tests.capture.applying import applied, in_source
from tests.capture.running import CaptureProcess, capturing, changes, configuration, wait_until_captured
from tests.capture.test_crashes import READS, traffic
from tests.database import Database, create_database
from tests.locking import locking
from tests.spark.seeded_writes import NAMES, writing
from tests.spark.seeded_writes import TABLES as SEEDED
from tests.standby import standby_of
from tests.waiting import wait_for

ROWS = 600
TABLES = ("a", "b")


@pytest.fixture
def filled(database: Database) -> Database:
    """Two tables of several ranges each."""
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int, note text)",
            f"INSERT INTO {table} SELECT -i, i, repeat('before', 20) FROM generate_series(1, {ROWS}) i",
        )
    return database


def wait_until_read(database: Database, config: Config, tables: int) -> LogReader:
    """Waits until the rows of so many tables are in the log, and everything that has happened meanwhile."""

    def finished() -> bool:
        return [note.finished for note in noted_reads(config.log_location).values()] == [True] * tables

    wait_for(lambda: config.log_path.exists() and finished(), what="all tables to be read")
    return wait_until_captured(database, config)


def check_equal(database: Database, config: Config, reader: LogReader, *tables: str) -> None:
    for table in tables or TABLES:
        columns = ", ".join(column.name for column in reader.shapes()[f"public.{table}"].columns)
        assert applied(reader, f"public.{table}") == in_source(database, f"SELECT {columns} FROM {table}"), table
    assert check_log(config.log_location).problems == []


def ops(reader: LogReader, table: str) -> Counter[Op]:
    return Counter(Op(row["_op"]) for row in changes(reader, f"public.{table}"))


def test_rows_come_before_every_change_of_their_table(filled: Database, tmp_path: Path) -> None:
    config = configuration(filled, tmp_path, reads_in_log=True)
    with capturing(config):
        with traffic(filled):
            wait_until_read(filled, config, 2)
        reader = wait_until_captured(filled, config)
    check_equal(filled, config, reader)
    for table in TABLES:
        found = changes(reader, f"public.{table}")
        reads = ops(reader, table)[Op.READ]
        assert reads >= ROWS
        assert {row["_op"] for row in found[:reads]} == {Op.READ}
        assert {row["_commit_lsn"] for row in found[:reads]} == {reader.identity.start_lsn}
        assert {row["_xid"] for row in found[:reads]} == {0}
        assert not {Op.READ, Op.TRUNCATE} & {Op(row["_op"]) for row in found[reads:]}
    kinds = reader.transactions(0, reader.end().end_offset)["kind"].to_pylist()
    assert kinds.count(TransactionKind.READ) > 2 * len(TABLES), "a range is a transaction"
    for_mirror = LogReader(config.log_location, reads=False)
    assert ops(for_mirror, "a") == ops(reader, "a") - Counter({Op.READ: ops(reader, "a")[Op.READ]})


def test_without_the_option_there_are_no_reads(filled: Database, tmp_path: Path) -> None:
    config = configuration(filled, tmp_path, initial="bulk")
    with capturing(config):
        filled.execute("INSERT INTO a VALUES (1, 1, 'new')")
        reader = wait_until_captured(filled, config)
    assert ops(reader, "a") == {Op.INSERT: 1}
    assert reader.end().end_offset == 1
    assert noted_reads(config.log_location) == {}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(2, 8))])
def test_reads_under_a_seeded_load_over_every_kind_of_change(seed: int, database: Database, tmp_path: Path) -> None:
    """Key changes, unchanged large values, TRUNCATE, a table without key; killed in between, and read again."""
    database.execute(*SEEDED)
    config = configuration(database, tmp_path, reads_in_log=True)
    with writing(database, seed, pause_s=0.001):
        for count in (3, 30):
            CaptureProcess(config, f"capture.reads.range=kill@{count}").wait_for_death()
        with capturing(config):
            wait_until_read(database, config, len(NAMES))
    with capturing(config):
        reader = wait_until_captured(database, config)
    check_equal(database, config, reader, *(name.removeprefix("public.") for name in NAMES))


def test_capture_killed_again_and_again_while_it_reads_tables(filled: Database, tmp_path: Path) -> None:
    config = configuration(filled, tmp_path, reads_in_log=True, initial="bulk")
    with traffic(filled):
        for point in READS:  # the third finds a finished, the fourth b
            CaptureProcess(config, f"{point}=kill").wait_for_death()
        process = CaptureProcess(config)
        wait_until_read(filled, config, 2)
    reader = wait_until_captured(filled, config)
    process.stop()
    check_equal(filled, config, reader)
    assert ops(reader, "b")[Op.TRUNCATE] == 1, "b was read once, under the fourth's snapshot"
    [finished] = {row["_commit_lsn"] for row in changes(reader, "public.b") if row["_op"] == Op.READ}
    assert finished > max(row["_commit_lsn"] for row in changes(reader, "public.a") if row["_op"] == Op.READ)


@pytest.mark.parametrize("lost", ["query LIKE 'COPY%'", "true"], ids=["the reader's", "all"])
def test_connections_are_lost_while_tables_are_read(lost: str, filled: Database, tmp_path: Path) -> None:
    """The snapshot lives on with the connection that keeps it; if that is lost too, another one is taken."""
    more = 10 * ROWS  # more than is read ahead
    filled.execute(f"INSERT INTO a SELECT i, i, repeat('more', 30) FROM generate_series(1, {more}) i")
    config, held = configuration(filled, tmp_path, reads_in_log=True), tmp_path / "go on"
    reading = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'COPY%'"
    end = f"datname = current_database() AND pid <> pg_backend_pid() AND {lost}"
    with armed(f"capture.reads.range=hold:{held}@3"), capturing(config):
        wait_for((tmp_path / "go on.held").exists, what="a part of the rows to be in the log")
        wait_for(lambda: filled.rows(reading), what="the next range to be read")
        filled.execute("UPDATE a SET n = -n", f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {end}")
        held.touch()
        reader = wait_until_read(filled, config, 2)
    check_equal(filled, config, reader)
    lsns = [row["_commit_lsn"] for row in changes(reader, "public.a") if row["_op"] == Op.READ]
    assert len(lsns) > ROWS + more
    assert len(set(lsns)) == (2 if lost == "true" else 1)


@pytest.mark.parametrize("point", ["log.block.written", "log.marker.moved"])
def test_reads_go_on_by_themselves_after_the_disk_was_full(point: str, filled: Database, tmp_path: Path) -> None:
    config = configuration(filled, tmp_path, reads_in_log=True)
    with armed(f"{point}=fail:ENOSPC@2"), capturing(config):
        reader = wait_until_read(filled, config, 2)
    check_equal(filled, config, reader)


def test_table_that_is_truncated_before_it_was_read(filled: Database, tmp_path: Path) -> None:
    config, held = configuration(filled, tmp_path, reads_in_log=True), tmp_path / "go on"
    with armed(f"capture.reads.begun=hold:{held}"), capturing(config) as states:
        wait_for((tmp_path / "go on.held").exists, what="the tables to be read")
        filled.execute("TRUNCATE a", "INSERT INTO a SELECT i, i, 'after' FROM generate_series(1, 10) i")
        held.touch()
        reader = wait_until_read(filled, config, 2)
    check_equal(filled, config, reader)
    assert ops(reader, "a") == {Op.TRUNCATE: 2, Op.INSERT: 10, Op.READ: 10}
    assert ops(reader, "b") == {Op.READ: ROWS}
    assert any("truncated or rewritten" in state.detail for state in states)


def test_tables_that_are_captured_later_are_read_when_they_come(filled: Database, tmp_path: Path) -> None:
    with capturing(configuration(filled, tmp_path, reads_in_log=True, tables=("public.a",))) as _, traffic(filled):
        wait_until_read(filled, configuration(filled, tmp_path), 1)
    config = configuration(filled, tmp_path, reads_in_log=True)
    with traffic(filled), capturing(config):
        wait_until_read(filled, config, 2)
    with capturing(config):
        reader = wait_until_captured(filled, config)
    check_equal(filled, config, reader)
    assert (ops(reader, "a")[Op.TRUNCATE], ops(reader, "b")[Op.TRUNCATE]) == (0, 1)


def test_option_that_is_set_later_brings_the_rows_of_that_time(filled: Database, tmp_path: Path) -> None:
    with capturing(configuration(filled, tmp_path)), traffic(filled):
        wait_until_captured(filled, configuration(filled, tmp_path))
    config = configuration(filled, tmp_path, reads_in_log=True)
    with traffic(filled), capturing(config):
        wait_until_read(filled, config, 2)
    with capturing(config):
        reader = wait_until_captured(filled, config)
    check_equal(filled, config, reader)


def test_open_transaction_does_not_hold_up_the_stream(
    filled: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later snapshot has to wait for it, the others' changes do not."""
    monkeypatch.setattr("pgtide.capture.reads._PAIR_LIMIT_S", 0.5)
    with capturing(configuration(filled, tmp_path, reads_in_log=True, tables=("public.a",))):
        wait_until_read(filled, configuration(filled, tmp_path), 1)
    config = configuration(filled, tmp_path, reads_in_log=True)
    with filled.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO b VALUES (1, 1, 'open')")
        with capturing(config) as states:
            filled.execute("UPDATE a SET n = 0 WHERE id = -1")
            reader = wait_until_captured(filled, config)
            assert ops(reader, "a")[Op.UPDATE] == 1
            told = f"within 0.5 s, because of open transactions: server process {writer.info.backend_pid} "
            assert any(told in state.detail for state in states)
            writer.commit()
            reader = wait_until_read(filled, config, 2)
    check_equal(filled, config, reader)


def test_table_that_others_lock_again_and_again_is_read_in_smaller_parts(
    filled: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it takes longer than anybody waits for its lock; halves may do, or quarters."""
    monkeypatch.setattr("pgtide.snapshot.lock_watch.PATIENCE_S", 0.8)
    monkeypatch.setattr("pgtide.snapshot.lock_watch._POLL_S", 0.05)
    monkeypatch.setattr("pgtide.capture.read_round._RETRY_S", 0.01)

    def slow(*arguments: Any) -> TableAsOf:
        return replace(table_as_of(*arguments), row_filter="pg_sleep(0.002) IS NOT NULL")

    monkeypatch.setattr("pgtide.capture.read_round.table_as_of", slow)
    config = configuration(filled, tmp_path, reads_in_log=True, tables=("public.a",))
    whole = Snapshot(initial="none", reads_in_log=True, range_bytes=1 << 20)
    config = config.model_copy(update={"snapshot": whole}).at(config.file)
    with locking(filled, "a"), capturing(config):
        reader = wait_until_read(filled, config, 1)
    check_equal(filled, config, reader, "a")


def test_snapshot_that_is_too_old_is_left_after_a_table(filled: Database, tmp_path: Path) -> None:
    config = configuration(filled, tmp_path)
    old = Snapshot(initial="none", reads_in_log=True, max_age_minutes=1e-9)
    config = config.model_copy(update={"snapshot": old}).at(config.file)
    with capturing(config):
        with traffic(filled):
            wait_until_read(filled, config, 2)
        reader = wait_until_captured(filled, config)
    check_equal(filled, config, reader)
    lsns = [{row["_commit_lsn"] for row in changes(reader, f"public.{t}") if row["_op"] == Op.READ} for t in TABLES]
    assert lsns[0] == {reader.identity.start_lsn}
    assert len(lsns[1]) == 1
    assert lsns[1] != lsns[0]


def test_parts_of_tables_are_read_as_they_are_published(database: Database, tmp_path: Path) -> None:
    """Partitions through their root, column lists, row filters, large values, an empty table."""
    database.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (1000) TO (2000)",
        "INSERT INTO parted SELECT n, 'v' || n FROM generate_series(1, 1999, 7) n",
        "CREATE TABLE listed (id int PRIMARY KEY, secret text, a int)",
        "INSERT INTO listed SELECT n, 'secret', n FROM generate_series(1, 50) n",
        "CREATE TABLE filtered (id int PRIMARY KEY, a int)",
        "INSERT INTO filtered SELECT n, n % 10 FROM generate_series(1, 100) n",
        "CREATE TABLE toasted (id int PRIMARY KEY, body text, small int)",
        "ALTER TABLE toasted ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO toasted SELECT n, repeat(md5(n::text), 300000), n FROM generate_series(1, 5) n",
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "CREATE PUBLICATION pgtide FOR TABLE parted, listed (id, a), filtered WHERE (id > 20), toasted, empty "
        "WITH (publish_via_partition_root = true)",
    )
    config = configuration(database, tmp_path, reads_in_log=True, publication_mode="existing")
    with capturing(config):
        reader = wait_until_read(database, config, 5)
        database.execute("UPDATE toasted SET small = -small", "UPDATE parted SET id = id + 1 WHERE id = 1")
        reader = wait_until_captured(database, config)
    check_equal(database, config, reader, "parted", "listed", "toasted", "empty")
    assert applied(reader, "public.filtered") == in_source(database, "SELECT * FROM filtered WHERE id > 20")
    assert "secret" not in [column.name for column in reader.shapes()["public.listed"].columns]
    assert len(reader.plan(0, reader.end().end_offset, reader.shapes()["public.toasted"].relation_oid)) > 1


def test_status_tells_what_is_read(filled: Database, tmp_path: Path) -> None:
    config, held = configuration(filled, tmp_path, reads_in_log=True), tmp_path / "go on"
    with armed(f"capture.reads.range=hold:{held}@1"), capturing(config):
        wait_for((tmp_path / "go on.held").exists, what="a part of the rows to be in the log")
        status = capture_status(config)
        held.touch()
        wait_until_read(filled, config, 2)
        wait_for(lambda: capture_status(config).state == "streaming", what="the capture to go on")
    assert (status.state, status.detail) == ("reading", "reading public.a into the log (table 1 of 2)")


def test_reads_into_a_log_on_s3(filled: Database, tmp_path: Path, bucket: str) -> None:
    config = configuration(filled, tmp_path, reads_in_log=True, log=Log(path=f"{bucket}/log", flush_interval_ms=20))
    with traffic(filled):
        CaptureProcess(config, "capture.reads.range=kill@3").wait_for_death()
        with capturing(config):
            wait_for(
                lambda: [note.finished for note in noted_reads(config.log_location).values()] == [True, True],
                what="all tables to be read",
            )
    with capturing(config):
        reader = wait_until_captured(filled, config)
    check_equal(filled, config, reader)


def test_rows_are_read_from_a_standby(tmp_path: Path) -> None:
    with local.postgres() as primary, standby_of(primary) as standby:
        database = create_database(primary)
        database.execute(
            "CREATE TABLE a (id int PRIMARY KEY, n int, note text)", "CREATE TABLE b (LIKE a INCLUDING ALL)"
        )
        database.execute("INSERT INTO a SELECT -i, i, 'before' FROM generate_series(1, 100) i")
        config = configuration(database, tmp_path, reads_in_log=True, read_from=standby.dsn_of(database.name))
        with traffic(database), capturing(config):
            wait_until_read(database, config, 2)
        with capturing(config):
            reader = wait_until_captured(database, config)
        check_equal(database, config, reader)
        lsns = [row["_commit_lsn"] for row in changes(reader, "public.a") if row["_op"] == Op.READ]
        assert len(lsns) >= 100
        assert reader.identity.start_lsn not in lsns, "read under the snapshot that the source's slot has exported"

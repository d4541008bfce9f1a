"""Prepared transactions on real servers: whatever restarts between PREPARE and the end, they are in the log once, at
their commit, or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgtide import local
from pgtide.config import Capture, Config
from pgtide.errors import LogError
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn
from tests.capture.running import (
    CaptureProcess,
    capturing,
    changes,
    configuration,
    replayed,
    source_rows,
    wait_until_captured,
)
from tests.capture.test_crashes import LARGE, PREPARED, slot_is_active
from tests.capture.test_streaming import Session
from tests.database import Database, create_database, drop_database
from tests.waiting import wait_for

AT_PREPARE = ("spool.prepared.synced", "spool.prepared.kept")


@pytest.fixture(scope="module", params=[16, 18])
def both(request: pytest.FixtureRequest) -> Iterator[local.LocalPostgres]:
    with local.postgres(request.param) as running:
        yield running


def with_tables(database: Database) -> Database:
    """A database whose transactions are streamed from 64 kB on."""
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE a (id int PRIMARY KEY, note text)",
        "CREATE TABLE b (id int PRIMARY KEY, note text)",
        "CREATE SCHEMA other CREATE TABLE unseen (id int)",
    )
    return database


@pytest.fixture
def on_both(both: local.LocalPostgres) -> Iterator[Database]:
    created = create_database(both)
    yield with_tables(created)
    drop_database(created)


@pytest.fixture
def source(database: Database) -> Database:
    return with_tables(database)


def two_phase(database: Database, folder: Path, *, wanted: bool = True) -> Config:
    """With so little memory that streamed transactions are spooled."""
    config = configuration(database, folder, two_phase=wanted)
    return config.model_copy(update={"capture": Capture(transaction_memory_bytes=1 << 16)}).at(config.file)


def gid(database: Database, name: str) -> str:
    return f"{database.name} {name}"  # identifiers are shared by all databases of a server


def prepare(database: Database, name: str, *statements: str) -> None:
    with database.connect() as connection:
        connection.execute("BEGIN")
        for statement in statements:
            connection.execute(statement.encode())
        connection.execute(f"PREPARE TRANSACTION '{gid(database, name)}'".encode())


def finish(database: Database, how: str, name: str) -> None:
    database.execute(f"{how} PREPARED '{gid(database, name)}'")


def rows(table: str, first: int, last: int, length: int = 5) -> str:
    return f"INSERT INTO {table} SELECT i, repeat('x', {length}) FROM generate_series({first}, {last}) i"


def wait_until_acknowledged(database: Database, config: Config) -> None:
    """Until the server would not send again what it has sent: from there on only we have it."""
    wait_until_captured(database, config)
    target = parse_lsn(database.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    def confirmed() -> bool:
        slots = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = current_database()"
        return parse_lsn(database.rows(slots)[0][0]) >= target

    wait_for(confirmed, what="the slot to be acknowledged")


def check_equal(database: Database, reader: LogReader) -> None:
    for table in "ab":
        assert replayed(reader, f"public.{table}") == source_rows(database, table)


def started(config: Config, database: Database, failpoints: str = "") -> CaptureProcess:
    process = CaptureProcess(config, failpoints)
    wait_for(lambda: slot_is_active(database) or process.returncode() is not None, what="the capture to stream")
    return process


def run_until_it_fails(config: Config) -> None:
    with capturing(config) as states:
        wait_for(lambda: states[-1].phase == "stopped", what="the capture to stop")


def test_a_prepared_transaction_is_in_the_log_at_its_commit(on_both: Database, tmp_path: Path) -> None:
    config = two_phase(on_both, tmp_path)
    with capturing(config):
        prepare(on_both, "late", rows("a", 1, 3))
        on_both.execute(rows("a", 10, 12))
        reader = wait_until_captured(on_both, config)
        assert [row["id"] for row in changes(reader, "public.a")] == [10, 11, 12]
        finish(on_both, "COMMIT", "late")
        prepare(on_both, "never", rows("a", 20, 22))
        finish(on_both, "ROLLBACK", "never")
        reader = wait_until_captured(on_both, config)
        wait_until_swept(config)
    assert [row["id"] for row in changes(reader, "public.a")] == [10, 11, 12, 1, 2, 3]
    found = reader.transactions(0, 6)
    assert found["commit_lsn"].to_pylist() == sorted(found["commit_lsn"].to_pylist())
    assert on_both.rows("SELECT two_phase FROM pg_replication_slots WHERE database = current_database()") == [(True,)]
    assert list(config.spool_path.iterdir()) == []


@pytest.mark.parametrize(
    ("then", "attnum"),
    [
        ("SELECT 1", 3),
        ("ALTER TABLE a RENAME COLUMN added TO renamed", -2),  # it cannot be told any more, and is not guessed
    ],
)
def test_what_a_prepared_transaction_has_altered_is_known_after_its_end(
    then: str, attnum: int, on_both: Database, tmp_path: Path
) -> None:
    config = two_phase(on_both, tmp_path)
    with capturing(config) as states:
        on_both.execute(rows("a", 1, 1))
        wait_until_captured(on_both, config)
        alteration = ("ALTER TABLE a DROP COLUMN note", "ALTER TABLE a ADD COLUMN added text")
        prepare(on_both, "altered", *alteration, rows("a", 2, 2))
        wait_for(lambda: "altered public.a" in states[-1].detail, what="the capture to wait for its end")
        with on_both.connect() as connection:
            connection.execute(f"COMMIT PREPARED '{gid(on_both, 'altered')}'".encode())
            connection.execute(then.encode())
        reader = wait_until_captured(on_both, config)
    oid = on_both.rows("SELECT 'a'::regclass::oid::int8")[0][0]
    found = [reader.read(piece) for piece in reader.plan(0, reader.end().end_offset, oid)]
    shapes = [[(column.attnum, column.name) for column in piece.shape.columns] for piece in found]
    assert shapes == [[(1, "id"), (2, "note")], [(1, "id"), (attnum, "added")]]


def test_a_capture_that_restarts_between_prepare_and_end_loses_nothing(on_both: Database, tmp_path: Path) -> None:
    config = two_phase(on_both, tmp_path)
    with capturing(config):
        prepare(on_both, "one", rows("a", 1, 3), rows("b", 1, 3))
        prepare(on_both, "empty", "INSERT INTO other.unseen VALUES (1)")
        prepare(on_both, "rolled back", rows("a", 11, 13))
        wait_until_acknowledged(on_both, config)
    process = started(config, on_both)
    prepare(on_both, "two", rows("b", 21, 23), "UPDATE b SET note = 'two' WHERE id = 22")
    wait_until_acknowledged(on_both, config)
    process.kill()
    finish(on_both, "COMMIT", "two")
    finish(on_both, "ROLLBACK", "rolled back")
    process = started(config, on_both)
    wait_until_acknowledged(on_both, config)
    process.stop()
    finish(on_both, "COMMIT", "one")
    finish(on_both, "COMMIT", "empty")
    with capturing(config):
        reader = wait_until_captured(on_both, config)
        wait_until_swept(config)
    check_equal(on_both, reader)
    assert list(config.spool_path.iterdir()) == []


def test_a_server_that_restarts_between_prepare_and_end_changes_nothing(tmp_path: Path) -> None:
    with local.postgres() as server:
        database = with_tables(create_database(server))
        config = two_phase(database, tmp_path)
        with capturing(config):
            prepare(database, "small", rows("a", 1, 3))
            prepare(database, "large", rows("b", 1, 2000, 100))
            wait_until_captured(database, config)
            server.stop("immediate")
            server.start()
            finish(database, "COMMIT", "large")
            wait_until_captured(database, config)
            server.stop("fast")
            server.start()
            finish(database, "COMMIT", "small")
            check_equal(database, wait_until_captured(database, config))


def test_a_streamed_prepared_transaction_with_savepoints_survives_a_restart(on_both: Database, tmp_path: Path) -> None:
    config = two_phase(on_both, tmp_path)
    script = [
        rows("a", 1, 2000, 400), "SAVEPOINT s", rows("a", 3001, 5000, 400), "ROLLBACK TO s", rows("b", 1, 2000, 400),
        "SAVEPOINT s", "DELETE FROM a WHERE id % 2 = 0", "RELEASE s", "UPDATE b SET note = 'new' WHERE id < 500",
    ]  # fmt: skip
    with capturing(config):
        prepare(on_both, "streamed", *script)
        prepare(on_both, "rolled back", rows("a", 6001, 8000, 400))
        wait_until_acknowledged(on_both, config)
    stats = on_both.rows(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{on_both.name}'")
    assert stats[0][0] > 0, "the server should have streamed"
    assert len(list(config.spool_path.glob("*.prepared"))) == 2
    with capturing(config):
        on_both.execute(rows("a", 9001, 9003))
        finish(on_both, "COMMIT", "streamed")
        finish(on_both, "ROLLBACK", "rolled back")
        reader = wait_until_captured(on_both, config)
        wait_until_swept(config)
    check_equal(on_both, reader)
    assert list(config.spool_path.iterdir()) == []


def test_a_large_prepared_transaction_is_not_copied(source: Database, tmp_path: Path) -> None:
    config = two_phase(source, tmp_path)
    with capturing(config):
        prepare(source, "large", rows("a", 1, 30_000, 400))
        wait_until_acknowledged(source, config)
        spooled = {file.stat().st_ino for file in config.spool_path.glob("*.spool")}
        finish(source, "COMMIT", "large")
        check_equal(source, wait_until_captured(source, config))
        wait_until_swept(config)
    assert {file.stat().st_ino for file in (config.log_path / "large").iterdir()} == spooled
    assert list(config.spool_path.iterdir()) == []


def test_a_slot_that_is_two_phase_is_served_without_being_asked(on_both: Database, tmp_path: Path) -> None:
    config = two_phase(on_both, tmp_path)
    with capturing(config):
        prepare(on_both, "one", rows("a", 1, 3))
        wait_until_acknowledged(on_both, config)
    config = two_phase(on_both, tmp_path, wanted=False)
    with capturing(config):
        prepare(on_both, "two", rows("a", 11, 13))
        wait_until_acknowledged(on_both, config)
        finish(on_both, "COMMIT", "one")
        finish(on_both, "COMMIT", "two")
        reader = wait_until_captured(on_both, config)
    check_equal(on_both, reader)


def test_a_transaction_that_was_prepared_before_two_phase_was_switched_on_comes_whole(
    on_both: Database, tmp_path: Path
) -> None:
    config = two_phase(on_both, tmp_path, wanted=False)
    with capturing(config):
        prepare(on_both, "before", rows("a", 1, 3))
        prepare(on_both, "at once", rows("a", 11, 13))
        finish(on_both, "COMMIT", "at once")
        reader = wait_until_captured(on_both, config)
        assert [row["id"] for row in changes(reader, "public.a")] == [11, 12, 13]
        wait_until_acknowledged(on_both, config)
    config = two_phase(on_both, tmp_path)
    with capturing(config):
        finish(on_both, "COMMIT", "before")
        reader = wait_until_captured(on_both, config)
        wait_until_swept(config)
    check_equal(on_both, reader)
    assert list(config.spool_path.iterdir()) == []


def test_a_connection_lost_between_prepare_and_end_leaves_no_trace(source: Database, tmp_path: Path) -> None:
    config = two_phase(source, tmp_path)
    with capturing(config) as states:
        prepare(source, "one", rows("a", 1, 2000, 400))
        wait_until_captured(source, config)
        source.rows(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name='{source.name}'"
        )
        wait_for(lambda: any(state.phase == "waiting" for state in states), what="the loss to be noticed")
        finish(source, "COMMIT", "one")
        check_equal(source, wait_until_captured(source, config))


def test_a_commit_whose_rows_were_lost_stops_the_capture_and_is_no_empty_transaction(
    source: Database, tmp_path: Path
) -> None:
    config = two_phase(source, tmp_path)
    with capturing(config):
        prepare(source, "lost", rows("a", 1, 3))
        wait_until_acknowledged(source, config)
    for file in config.spool_path.iterdir():
        file.unlink()
    finish(source, "COMMIT", "lost")
    with pytest.raises(LogError, match=r"lost.*not in the spool"):
        run_until_it_fails(config)
    reader = LogReader(config.log_path)
    assert reader.end().end_offset == 0
    (commit_lsn,) = source.rows("SELECT pg_current_wal_insert_lsn()::text")
    assert reader.end().durable_lsn < parse_lsn(commit_lsn[0]), "nothing past it may be acknowledged"


@pytest.mark.parametrize("point", [*PREPARED, *LARGE])
def test_killed_between_prepare_and_end_at(point: str, source: Database, tmp_path: Path) -> None:
    config = two_phase(source, tmp_path)
    with capturing(config):
        pass
    process = started(config, source, f"{point}=kill")
    prepare(source, "one", rows("a", 1, 30_000, 400) if point in LARGE else rows("a", 1, 3))
    prepare(source, "two", rows("b", 1, 3))
    if point not in AT_PREPARE:
        wait_until_acknowledged(source, config)
    finish(source, "COMMIT", "one")
    finish(source, "ROLLBACK", "two")
    source.execute(rows("b", 10, 12))
    process.wait_for_death()
    process = started(config, source)
    reader = wait_until_captured(source, config)
    wait_until_swept(config)
    process.stop()
    check_equal(source, reader)
    assert list(config.spool_path.iterdir()) == []
    reachable = {piece.segment for piece in reader.plan(0, reader.end().end_offset)}
    large = {f"large/{path.name}" for path in (config.log_path / "large").glob("*")}
    assert large <= reachable, "an orphan was left behind"


def wait_until_swept(config: Config) -> None:
    """What the log holds goes from the spool a moment later."""
    wait_for(lambda: not list(config.spool_path.iterdir()), what="an empty spool")


class PreparingSession(Session):
    """A session that also prepares; what it has prepared is ended later, by whoever comes."""

    def __init__(self, database: Database, number: int, generator: random.Random) -> None:
        super().__init__(database, number, generator)
        self._database, self._number, self._prepared = database, number, 0
        self.waiting: list[str] = []

    def step(self) -> None:
        if self._random.random() > 0.2:
            super().step()
        elif self.waiting and self._random.random() < 0.6:
            name = self.waiting.pop(self._random.randrange(len(self.waiting)))
            finish(self._database, self._random.choice(["COMMIT", "COMMIT", "ROLLBACK"]), name)
        elif len(self.waiting) < 3:
            self._prepared += 1
            self.waiting.append(f"{self._number}-{self._prepared}")
            self._connection.execute(f"PREPARE TRANSACTION '{gid(self._database, self.waiting[-1])}'".encode())
            self._savepoints.clear()


def test_random_sessions_that_prepare_equal_the_source_over_restarts(source: Database, tmp_path: Path) -> None:
    config = two_phase(source, tmp_path)
    generator = random.Random(7)
    sessions = [PreparingSession(source, number, generator) for number in range(1, 4)]
    with capturing(config):
        pass
    for _ in range(3):
        process = started(config, source)
        for _ in range(50):
            generator.choice(sessions).step()
        process.kill()
    assert any(session.waiting for session in sessions), "something should wait over the last restart"
    for session in sessions:
        session.commit()
        for name in session.waiting:
            finish(source, "COMMIT", name)
    with capturing(config):
        check_equal(source, wait_until_captured(source, config))
        wait_until_swept(config)
    assert list(config.spool_path.iterdir()) == []

"""The server stops, dies or hangs up inside a streamed transaction: what was not committed leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psycopg
import pytest

from pgtide import local
from pgtide.config import Capture, Config
from pgtide.local import LocalPostgres
from tests.capture.running import capturing, changes, configuration, replayed, source_rows, wait_until_captured
from tests.database import Database, create_database
from tests.waiting import wait_for

BULK = "INSERT INTO t SELECT i, repeat('x', 400) FROM generate_series({}, {}) i"


@pytest.fixture(scope="module")
def own_server() -> Iterator[LocalPostgres]:
    with local.postgres(logical_decoding_work_mem="64kB") as server:
        yield server


@pytest.fixture
def own(own_server: LocalPostgres) -> Database:
    """A database on a server that may be stopped; it goes with the server."""
    own_server.start()
    database = create_database(own_server)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    return database


def spooling(config: Config) -> Config:
    return config.model_copy(update={"capture": Capture(transaction_memory_bytes=1 << 16)}).at(config.file)


def stop_fast(database: Database) -> None:
    database.server.stop("fast")


def stop_immediately(database: Database) -> None:
    database.server.stop("immediate")


def kill(database: Database) -> None:
    database.server.kill()


@pytest.mark.parametrize("end", [stop_fast, stop_immediately, kill])
def test_a_server_that_ends_inside_a_streamed_transaction_takes_it_along(
    end: Callable[[Database], None], own: Database, tmp_path: Path
) -> None:
    config = spooling(configuration(own, tmp_path))
    with capturing(config) as states:
        own.execute(BULK.format(1, 10))
        writer = own.connect(autocommit=False)
        writer.execute(BULK.format(1001, 4000).encode())
        wait_for(lambda: list(config.spool_path.iterdir()), what="the open transaction to be spooled")
        own.execute(BULK.format(11, 20))
        wait_until_captured(own, config)
        end(own)
        with pytest.raises(psycopg.OperationalError):
            writer.commit()
        wait_for(lambda: any(state.phase == "waiting" for state in states), what="the loss to be noticed")
        own.server.start()
        own.execute(BULK.format(21, 30))
        wait_for(lambda: states[-1].phase == "streaming", what="the capture to stream again")
        reader = wait_until_captured(own, config)
        assert list(config.spool_path.iterdir()) == [], "nothing of the lost transaction is kept"
    assert [row["id"] for row in changes(reader, "public.t")] == list(range(1, 31))
    assert replayed(reader, "public.t") == source_rows(own, "t")


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_walsender_that_is_terminated_inside_a_transaction_sends_it_again(
    outcome: Literal["commit", "rollback"], own: Database, tmp_path: Path
) -> None:
    config = spooling(configuration(own, tmp_path))
    terminate = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{own.name}'"
    with capturing(config) as states, own.connect(autocommit=False) as writer:
        writer.execute(BULK.format(1001, 4000).encode())
        wait_for(lambda: list(config.spool_path.iterdir()), what="the open transaction to be spooled")
        own.execute(BULK.format(1, 10))
        wait_until_captured(own, config)
        for times in (1, 2):
            own.rows(terminate)
            wait_for(lambda: [s.phase for s in states].count("waiting") >= times, what="the loss to be noticed")  # noqa: B023
            wait_for(lambda: states[-1].phase == "streaming", what="the capture to stream again")
        writer.execute("SAVEPOINT s")
        writer.execute(BULK.format(5001, 6000).encode())
        writer.execute("ROLLBACK TO s")
        writer.commit() if outcome == "commit" else writer.rollback()
        own.execute(BULK.format(11, 20))
        reader = wait_until_captured(own, config)
    expected = [*range(1, 11), *(range(1001, 4001) if outcome == "commit" else ()), *range(11, 21)]
    assert [row["id"] for row in changes(reader, "public.t")] == expected
    assert replayed(reader, "public.t") == source_rows(own, "t")


def test_a_transaction_that_was_prepared_survives_a_server_restart(own: Database, tmp_path: Path) -> None:
    config = spooling(configuration(own, tmp_path))
    with capturing(config) as states:
        own.execute(f"BEGIN; {BULK.format(1, 3000)}; PREPARE TRANSACTION '{own.name}'")
        own.server.stop("fast")
        wait_for(lambda: any(state.phase == "waiting" for state in states), what="the loss to be noticed")
        own.server.start()
        own.execute(f"COMMIT PREPARED '{own.name}'")
        reader = wait_until_captured(own, config)
    assert [row["id"] for row in changes(reader, "public.t")] == list(range(1, 3001))


def test_a_table_that_is_locked_for_long_does_not_hold_up_the_others(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE locked (id int PRIMARY KEY)", "CREATE TABLE t (id int PRIMARY KEY, note text)")
    config = configuration(database, tmp_path)
    with capturing(config), database.connect(autocommit=False) as other:
        other.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
        walsender = (
            "SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL AND database = current_database()"
        )
        [(first,)] = database.rows(walsender)
        database.rows(f"SELECT pg_terminate_backend({first})")
        wait_for(lambda: database.rows(walsender) not in ([], [(first,)]), what="another connection")
        database.execute("INSERT INTO t VALUES (1, 'meanwhile')")
        reader = wait_until_captured(database, config)
        assert replayed(reader, "public.t") == source_rows(database, "t")


def test_a_server_with_little_patience_is_answered_in_time(database: Database, tmp_path: Path) -> None:
    database.execute(
        f"ALTER DATABASE {database.name} SET wal_sender_timeout = '800ms'",
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
    )
    answered = (
        "SELECT pid FROM pg_stat_replication JOIN pg_replication_slots ON active_pid = pid "
        "WHERE database = current_database() AND reply_time > backend_start + interval '3 s'"
    )
    with capturing(configuration(database, tmp_path)):
        wait_for(lambda: database.rows(answered), what="a connection that outlives the server's patience")

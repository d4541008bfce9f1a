"""Transactions that are streamed while in progress: what commits is in the log whole, what rolls back is not there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgtide.config import Capture, Config
from tests.capture.running import (
    CaptureProcess,
    capturing,
    changes,
    configuration,
    replayed,
    source_rows,
    wait_until_captured,
)
from tests.capture.test_crashes import LARGE, slot_is_active
from tests.database import Database
from tests.waiting import wait_for

ROW_BYTES = 400


@pytest.fixture
def streamed(database: Database) -> Database:
    """A database whose transactions are streamed from 64 kB on."""
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE a (id int PRIMARY KEY, note text)",
        "CREATE TABLE b (id int PRIMARY KEY, note text)",
    )
    return database


def small_memory(config: Config) -> Config:
    return config.model_copy(update={"capture": Capture(transaction_memory_bytes=1 << 16)}).at(config.file)


class Session:
    """One connection with an open transaction and savepoints, driven by a random generator."""

    def __init__(self, database: Database, number: int, generator: random.Random) -> None:
        self._connection: psycopg.Connection[Any] = database.connect(autocommit=False)
        self._random = generator
        self._key = number * 1_000_000
        self._savepoints: list[str] = []

    def step(self) -> None:
        action = self._random.choices(
            ["insert", "update", "delete", "savepoint", "rollback to", "release", "commit", "rollback"],
            [10, 4, 2, 5, 4, 1, 2, 1],
        )[0]
        table = self._random.choice("ab")
        if action == "insert":
            count = self._random.randint(1, 400)
            self._connection.execute(
                f"INSERT INTO {table} SELECT i, repeat(%s, %s) FROM generate_series(%s::int, %s::int) i".encode(),
                [chr(self._random.randint(97, 122)), ROW_BYTES, self._key, self._key + count - 1],
            )
            self._key += count
        elif action == "update":
            low = self._key - self._random.randint(1, 300)
            self._connection.execute(
                f"UPDATE {table} SET note = 'new' || note WHERE id BETWEEN %s AND %s".encode(), [low, self._key]
            )
        elif action == "delete":
            low = self._key - self._random.randint(1, 100)
            self._connection.execute(f"DELETE FROM {table} WHERE id BETWEEN %s AND %s".encode(), [low, low + 30])
        elif action == "savepoint":
            self._savepoints.append(f"s{len(self._savepoints)}")
            self._connection.execute(f"SAVEPOINT {self._savepoints[-1]}".encode())
        elif action == "rollback to" and self._savepoints:
            kept = self._random.randrange(len(self._savepoints))
            self._connection.execute(f"ROLLBACK TO SAVEPOINT {self._savepoints[kept]}".encode())
            del self._savepoints[kept + 1 :]
        elif action == "release" and self._savepoints:
            self._connection.execute(f"RELEASE SAVEPOINT {self._savepoints.pop()}".encode())
        elif action in ("commit", "rollback"):
            self._savepoints.clear()
            self._connection.commit() if action == "commit" else self._connection.rollback()

    def commit(self) -> None:
        self._connection.commit()
        self._connection.close()


def random_history(database: Database, seed: int, steps: int) -> None:
    generator = random.Random(seed)
    sessions = [Session(database, number, generator) for number in range(1, 4)]
    for _ in range(steps):
        generator.choice(sessions).step()
    for session in sessions:
        session.commit()


@pytest.mark.parametrize("seed", [1, 2])
def test_interleaved_streams_with_savepoints_equal_the_source(seed: int, streamed: Database, tmp_path: Path) -> None:
    config = small_memory(configuration(streamed, tmp_path))
    with capturing(config):
        random_history(streamed, seed, 150)
        reader = wait_until_captured(streamed, config)
    for table in "ab":
        assert replayed(reader, f"public.{table}") == source_rows(streamed, table), f"seed {seed}"
    assert list((config.log_path / "large").iterdir()), "some transaction should have been spooled"
    assert not list(config.spool_path.iterdir()), "nothing is open any more"
    stats = streamed.rows(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{streamed.name}'")
    assert stats[0][0] > 0, "the server should have streamed"


@pytest.mark.parametrize("point", LARGE)
def test_killed_around_the_commit_of_a_spooled_transaction(point: str, streamed: Database, tmp_path: Path) -> None:
    config = small_memory(configuration(streamed, tmp_path))
    with capturing(config):
        pass
    process = CaptureProcess(config, f"{point}=kill")
    random_history(streamed, 3, 100)
    streamed.execute("INSERT INTO a SELECT i, repeat('x', 400) FROM generate_series(1, 5000) i")
    process.wait_for_death()
    process = CaptureProcess(config)
    wait_for(lambda: slot_is_active(streamed), what="the capture to stream")
    reader = wait_until_captured(streamed, config)
    process.stop()
    for table in "ab":
        assert replayed(reader, f"public.{table}") == source_rows(streamed, table)
    reachable = {piece.segment for piece in reader.plan(0, reader.end().end_offset)}
    assert {f"large/{path.name}" for path in (config.log_path / "large").iterdir()} <= reachable, (
        "an orphan was left behind"
    )


def test_a_connection_lost_inside_a_streamed_transaction_leaves_no_trace(streamed: Database, tmp_path: Path) -> None:
    config = small_memory(configuration(streamed, tmp_path))
    with capturing(config) as states, streamed.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO a SELECT i, repeat('x', 400) FROM generate_series(1, 3000) i")
        wait_for(lambda: list(config.spool_path.iterdir()), what="the transaction to be spooled")
        streamed.rows(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{streamed.name}'"
        )
        wait_for(lambda: any(state.phase == "waiting" for state in states), what="the loss to be noticed")
        writer.execute("INSERT INTO b VALUES (1, 'last')")
        writer.commit()
        reader = wait_until_captured(streamed, config)
    for table in "ab":
        assert replayed(reader, f"public.{table}") == source_rows(streamed, table)


def test_a_transaction_knows_its_origin(streamed: Database, tmp_path: Path) -> None:
    config = configuration(streamed, tmp_path)
    origin = f"elsewhere_{streamed.name}"
    with capturing(config), streamed.connect(autocommit=False) as connection:
        connection.execute("SELECT pg_replication_origin_create(%s)", [origin])
        connection.execute("SELECT pg_replication_origin_session_setup(%s)", [origin])
        connection.commit()
        connection.execute("SELECT pg_replication_origin_xact_setup('0/1234', now())")
        connection.execute("INSERT INTO a VALUES (1, 'replicated')")
        connection.commit()
        connection.execute("SELECT pg_replication_origin_xact_setup('0/5678', now())")
        connection.execute("INSERT INTO a SELECT i, repeat('x', 400) FROM generate_series(2, 2000) i")
        connection.commit()
        connection.execute("SELECT pg_replication_origin_session_reset()")
        connection.commit()
        streamed.execute("INSERT INTO b VALUES (1, 'our own')")
        reader = wait_until_captured(streamed, config)
        connection.execute("SELECT pg_replication_origin_drop(%s)", [origin])
        connection.commit()
    found = reader.transactions(0, reader.end().end_offset)
    assert found["origin"].to_pylist() == [origin, origin, None]


def streamed_so_far(database: Database) -> int:
    rows = database.rows(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{database.name}'")
    return int(rows[0][0])


def test_a_message_of_a_rolled_back_savepoint_leaves_nothing_and_streaming_goes_on_afterwards(
    streamed: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.capture.pipeline._WHOLE_FIRST_S", 0.0)
    config = configuration(streamed, tmp_path)
    with capturing(config) as states, streamed.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO a SELECT i, repeat('x', 400) FROM generate_series(1, 1000) i")
        connection.execute("SAVEPOINT s")
        connection.execute("SELECT pg_logical_emit_message(true, 'p', 'rolled back')")
        connection.execute("INSERT INTO a SELECT i, repeat('x', 400) FROM generate_series(1001, 2000) i")
        connection.execute("ROLLBACK TO s")
        connection.execute("SELECT pg_logical_emit_message(true, 'p', 'kept')")
        connection.execute("INSERT INTO a SELECT i, repeat('x', 400) FROM generate_series(2001, 3000) i")
        connection.commit()
        reader = wait_until_captured(streamed, config)
        assert any("asking for whole transactions" in state.detail for state in states)
        wait_for(lambda: any("connecting again" in state.detail for state in states), what="the way back")
        wait_for(lambda: states[-1].phase == "streaming", what="the new connection")
        before = streamed_so_far(streamed)
        streamed.execute("INSERT INTO a SELECT i, repeat('y', 400) FROM generate_series(3001, 6000) i")
        reader = wait_until_captured(streamed, config)
        wait_for(lambda: streamed_so_far(streamed) > before, what="another streamed transaction")
    assert [row["content"] for row in changes(reader, "pgtide.messages")] == [b"kept"]
    assert replayed(reader, "public.a") == source_rows(streamed, "a")

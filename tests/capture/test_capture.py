"""The capture on a real server: what was committed is in the log, in order, once; what was not is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgtide.change import Op
from pgtide.errors import LogError, SlotError
from pgtide.log.control import offered_snapshot, request_snapshot, requested_snapshot, withdraw_snapshot
from pgtide.lsn import parse_lsn
from pgtide.replication.channels import LibpqChannel, SocketChannel
from tests.capture.running import (
    capturing,
    changes,
    configuration,
    replayed,
    source_rows,
    wait_until_captured,
    wait_until_let_go,
)
from tests.database import Database, create_database, drop_database
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY, note text, amount numeric(12,2), at timestamptz DEFAULT now())"


def test_inserts_updates_and_deletes_arrive_in_order_with_their_transactions(
    database: Database, tmp_path: Path
) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute(
            "INSERT INTO t SELECT i, 'note ' || i, i FROM generate_series(1, 3) i",
            "UPDATE t SET note = NULL WHERE id = 2",
            "UPDATE t SET id = 30 WHERE id = 3",
            "DELETE FROM t WHERE id = 1",
        )
        reader = wait_until_captured(database, config)
    rows = changes(reader, "public.t")
    assert [(row["_offset"], Op(row["_op"]).name, row["id"]) for row in rows] == [
        (0, "INSERT", 1),
        (1, "INSERT", 2),
        (2, "INSERT", 3),
        (3, "UPDATE", 2),
        (4, "UPDATE", 30),
        (5, "DELETE", 1),
    ]
    assert len({row["_commit_lsn"] for row in rows[:3]}) == 1
    assert [row["_commit_lsn"] for row in rows[2:]] == sorted({row["_commit_lsn"] for row in rows[2:]})
    assert replayed(reader, "public.t") == source_rows(database, "t")


def test_rolled_back_changes_leave_nothing(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config), database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t (id) VALUES (1)")
        connection.rollback()
        connection.execute("INSERT INTO t (id) VALUES (2)")
        connection.execute("SAVEPOINT s")
        connection.execute("INSERT INTO t (id) VALUES (3)")
        connection.execute("ROLLBACK TO s")
        connection.commit()
        reader = wait_until_captured(database, config)
        assert [row["id"] for row in changes(reader, "public.t")] == [2]


def test_truncates_and_messages_have_their_place_in_the_order(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE, "CREATE TABLE u (id int PRIMARY KEY)")
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute(
            "INSERT INTO t (id) VALUES (1)",
            "TRUNCATE t, u",
            "INSERT INTO t (id) VALUES (2)",
            "SELECT pg_logical_emit_message(true, 'outbox', 'hello')",
            "SELECT pg_logical_emit_message(false, 'note', 'aside')",
            "INSERT INTO u (id) VALUES (7)",
        )
        reader = wait_until_captured(database, config)
    ops = {table: [Op(row["_op"]).name for row in changes(reader, table)] for table in ("public.t", "public.u")}
    assert ops == {"public.t": ["INSERT", "TRUNCATE", "INSERT"], "public.u": ["TRUNCATE", "INSERT"]}
    messages = changes(reader, "pgtide.messages")
    assert [(row["prefix"], row["content"], row["transactional"]) for row in messages] == [
        ("outbox", b"hello", True),
        ("note", b"aside", False),
    ]
    offsets = [
        row["_offset"] for table in ("public.t", "public.u", "pgtide.messages") for row in changes(reader, table)
    ]
    assert sorted(offsets) == list(range(7))


def test_a_restart_appends_nothing_twice(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    for start in range(3):
        with capturing(config):
            database.execute(f"INSERT INTO t (id) VALUES ({start})")
            reader = wait_until_captured(database, config)
    assert [(row["_offset"], row["id"]) for row in changes(reader, "public.t")] == [(0, 0), (1, 1), (2, 2)]


def test_a_terminated_connection_is_opened_again(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config) as states:
        database.execute("INSERT INTO t (id) VALUES (1)")
        database.rows(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{database.name}'"
        )
        database.execute("INSERT INTO t (id) VALUES (2)")
        reader = wait_until_captured(database, config)
    assert [row["id"] for row in changes(reader, "public.t")] == [1, 2]
    assert "waiting" in [state.phase for state in states]


def test_a_large_transaction_is_seen_whole_or_not_at_all(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.capture.pipeline.HELD_BYTES", 10_000)
    monkeypatch.setattr("pgtide.replication.channels._RECEIVE_BYTES", 200_000)  # many feeds, however fast it comes
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 30000) i")
        database.execute("INSERT INTO t (id) VALUES (0)")
        reader = wait_until_captured(database, config)
    ends = reader.transactions(0, reader.end().end_offset)["end_offset"].to_pylist()
    assert ends == [30000, 30001]
    assert [row["id"] for row in changes(reader, "public.t")] == [*range(1, 30001), 0]
    assert len(reader.plan(0, 30001)) > 1, "the transaction should have spanned blocks"


def test_wal_is_released_while_only_another_database_is_busy(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    other = create_database(database.server)
    config = configuration(database, tmp_path)
    try:
        with capturing(config):
            other.execute(TABLE, "INSERT INTO t SELECT i FROM generate_series(1, 10000) i")
            busy_lsn = parse_lsn(other.rows("SELECT pg_current_wal_lsn()::text")[0][0])
            query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{database.name}'"
            wait_for(lambda: parse_lsn(database.rows(query)[0][0]) >= busy_lsn, what="the slot to be acknowledged")
    finally:
        drop_database(other)


def test_an_existing_slot_of_somebody_else_is_left_alone(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    database.rows(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
    with pytest.raises(SlotError, match="exists already"), capturing(configuration(database, tmp_path)):
        pass
    assert database.rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(1,)]


def test_a_slot_that_is_gone_stops_the_capture(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config):
        pass
    wait_until_let_go(database)
    database.rows(f"SELECT pg_drop_replication_slot('{database.name}')")
    with pytest.raises(SlotError, match="does not exist"), capturing(config):
        pass


def test_a_slot_that_somebody_else_moved_stops_the_capture(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path)
    with capturing(config):
        pass
    database.execute("INSERT INTO t (id) VALUES (1)")
    wait_until_let_go(database)
    database.rows(f"SELECT pg_replication_slot_advance('{database.name}', pg_current_wal_lsn())")
    with pytest.raises(SlotError, match="acknowledged up to"), capturing(config):
        pass


def test_a_log_of_another_database_is_refused(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    with capturing(configuration(database, tmp_path)):
        pass
    other = create_database(database.server)
    other.execute(TABLE)
    try:
        with pytest.raises(LogError, match="belongs to database"), capturing(configuration(other, tmp_path)):
            pass
    finally:
        drop_database(other)


def test_a_second_capture_of_the_same_slot_is_told_who_holds_it(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path, connect_timeout_seconds=1)
    with (
        capturing(config),
        pytest.raises(SlotError, match=r"another capture uses slot.*server process"),
        capturing(config),
    ):
        raise AssertionError("the second capture streams")


def test_a_snapshot_that_is_asked_for_is_offered_and_let_go(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE, "INSERT INTO t (id) VALUES (1)")
    config = configuration(database, tmp_path, initial="bulk")
    with capturing(config):
        first = offered_snapshot(config.log_path)
        assert first is not None
        database.execute("INSERT INTO t (id) VALUES (2)")
        request_snapshot(config.log_path, ("public.t",))
        wait_for(lambda: requested_snapshot(config.log_path) is None, what="the request to be served")
        second = offered_snapshot(config.log_path)
        assert second is not None
        assert second.lsn > first.lsn
        with database.connect(autocommit=False) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{second.name}'".encode())
            database.execute("INSERT INTO t (id) VALUES (3)")
            assert connection.execute("SELECT array_agg(id ORDER BY id) FROM t").fetchall() == [([1, 2],)]
        withdraw_snapshot(config.log_path)
        holders = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xmin IS NOT NULL"
        )
        wait_for(lambda: database.rows(f"{holders} AND pid <> pg_backend_pid()") == [(0,)], what="the snapshot to go")


def test_a_type_without_binary_form_inside_an_array_is_read_as_text(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, rights aclitem[], note text)")
    config = configuration(database, tmp_path)
    with capturing(config) as states:
        database.execute("INSERT INTO t VALUES (1, '{postgres=r/postgres}', 'as text')")
        reader = wait_until_captured(database, config)
    (row,) = changes(reader, "public.t")
    assert (row["id"], row["rights"], row["note"]) == (1, ["postgres=r/postgres"], "as text")
    assert any("going on with values as text" in state.detail for state in states)


def test_a_publication_that_is_dropped_stops_the_capture(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.capture.watch.INTERVAL_S", 0.1)
    database.execute(TABLE)

    def drop_it() -> None:
        with capturing(configuration(database, tmp_path)) as states:
            database.execute("DROP PUBLICATION pgtide")
            wait_for(lambda: states[-1].phase == "stopped", what="the capture to stop")

    with pytest.raises(SlotError, match="publication pgtide was dropped"):
        drop_it()


def test_libpq_and_the_socket_itself_give_the_same_log(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(TABLE)
    seen = {}
    for channel in (LibpqChannel, SocketChannel):
        folder = tmp_path / channel.__name__
        folder.mkdir()
        config = configuration(database, folder, slot_suffix=channel.__name__.lower())
        monkeypatch.setattr("pgtide.replication.stream.open_channel", channel)
        with capturing(config):
            pass
        seen[channel] = config
    database.execute(
        "INSERT INTO t SELECT i, repeat('é', i) FROM generate_series(1, 3000) i", "DELETE FROM t WHERE id = 7"
    )
    logs = []
    for channel, config in seen.items():
        monkeypatch.setattr("pgtide.replication.stream.open_channel", channel)
        with capturing(config):
            database.execute("SELECT 1")
            logs.append(changes(wait_until_captured(database, config), "public.t"))
    assert logs[0] == logs[1]
    assert len(logs[0]) == 3001

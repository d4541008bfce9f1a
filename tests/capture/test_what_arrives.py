"""Messages, truncates, transactions without changes, many tables, partitions, generated columns, tables made anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pgtide.capture.attend import CaptureState
from pgtide.change import Op
from pgtide.local import VERSIONS, LocalPostgres
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn
from tests.capture.running import capturing, changes, configuration, replayed, source_rows, wait_until_captured
from tests.database import Database, create_database, drop_database
from tests.waiting import wait_for


def ops(reader: LogReader, table: str) -> list[str]:
    return [Op(row["_op"]).name for row in changes(reader, table)]


def test_a_truncate_of_several_tables_is_one_transaction_with_a_change_of_each(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a)",
        "CREATE TABLE c (id serial PRIMARY KEY)",
        "CREATE TABLE untouched (id int PRIMARY KEY)",
        "INSERT INTO untouched VALUES (1)",
    )
    config = configuration(database, tmp_path)
    with capturing(config), database.connect() as connection:
        database.execute(
            "INSERT INTO a VALUES (1)",
            "INSERT INTO b VALUES (1, 1)",
            "TRUNCATE a, c RESTART IDENTITY CASCADE",  # b by its reference
            "BEGIN; INSERT INTO a VALUES (2); TRUNCATE a CASCADE; INSERT INTO a VALUES (3); COMMIT",
            "BEGIN; TRUNCATE a CASCADE; ROLLBACK",
        )
        connection.execute("SELECT 1")
        reader = wait_until_captured(database, config)
    assert ops(reader, "public.a") == ["INSERT", "TRUNCATE", "INSERT", "TRUNCATE", "INSERT"]
    assert ops(reader, "public.b") == ["INSERT", "TRUNCATE", "TRUNCATE"]
    assert ops(reader, "public.c") == ["TRUNCATE"]
    assert changes(reader, "public.untouched") == []
    first = {
        table: next(row for row in changes(reader, f"public.{table}") if row["_op"] == Op.TRUNCATE) for table in "abc"
    }
    assert len({row["_commit_lsn"] for row in first.values()}) == 1
    assert len({row["_offset"] for row in first.values()}) == 3
    assert replayed(reader, "public.a") == source_rows(database, "a") == {3: {"id": 3}}


def test_messages_follow_their_transaction_or_none(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = configuration(database, tmp_path)
    with capturing(config), database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("SELECT pg_logical_emit_message(true, 'inside', 'committed')")
        connection.execute("SELECT pg_logical_emit_message(false, 'outside', 'of a committed one')")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("SELECT pg_logical_emit_message(true, 'inside', 'rolled back')")
        connection.execute("SELECT pg_logical_emit_message(false, 'outside', 'of one that was rolled back')")
        connection.rollback()
        connection.execute("SAVEPOINT s")
        connection.execute("SELECT pg_logical_emit_message(true, 'inside', 'of a rolled-back savepoint')")
        connection.execute("ROLLBACK TO s")
        connection.execute("SELECT pg_logical_emit_message(true, 'alone', %s::bytea)", [b"\0\xff"])
        connection.commit()
        reader = wait_until_captured(database, config)
    messages = changes(reader, "pgtide.messages")
    assert [(row["prefix"], row["content"], row["transactional"]) for row in messages] == [
        ("outside", b"of a committed one", False),  # written before its transaction's commit
        ("inside", b"committed", True),
        ("outside", b"of one that was rolled back", False),
        ("alone", b"\0\xff", True),
    ]
    (row,) = changes(reader, "public.t")
    assert row["_commit_lsn"] == messages[1]["_commit_lsn"]
    assert row["_offset"] < messages[1]["_offset"]
    lsns = [message["_commit_lsn"] for message in messages]
    assert lsns == sorted(lsns)


def test_transactions_without_published_changes_leave_nothing_and_hold_nothing_back(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE private (id int PRIMARY KEY)")
    config = configuration(database, tmp_path, tables=("public.t",))
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1)")
        for number in range(20):
            database.execute(
                "SELECT txid_current()", f"INSERT INTO private VALUES ({number})", "UPDATE t SET id = 2 WHERE false"
            )
        database.execute("CREATE TABLE later (id int)", "DROP TABLE later", "INSERT INTO t VALUES (2)")
        reader = wait_until_captured(database, config)
        end_lsn = reader.end().durable_lsn
        query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{database.name}'"
        wait_for(lambda: parse_lsn(database.rows(query)[0][0]) >= end_lsn, what="the slot to be acknowledged")
    assert [row["id"] for row in changes(reader, "public.t")] == [1, 2]
    assert reader.transactions(0, reader.end().end_offset).num_rows == 2
    assert "public.private" not in reader.shapes()


def test_a_quiet_database_beside_a_busy_one_lets_wal_go(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (0)")
    busy = create_database(database.server)
    config = configuration(database, tmp_path)
    slot = f"FROM pg_replication_slots WHERE slot_name = '{database.name}'"

    def positions() -> tuple[int, int]:
        ((confirmed, restart),) = database.rows(f"SELECT confirmed_flush_lsn::text, restart_lsn::text {slot}")
        return parse_lsn(confirmed), parse_lsn(restart)

    try:
        busy.execute("CREATE TABLE t (id int, note text)")
        with capturing(config):
            first_confirmed, first_restart = positions()

            def released() -> bool:
                # The restart position moves when the server logs its running transactions, as a checkpoint does.
                busy.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 2000) i", "CHECKPOINT")
                confirmed, restart = positions()
                return confirmed > first_confirmed + 1_000_000 and restart > first_restart + 1_000_000

            wait_for(released, what="the slot to move while its own database is quiet")
            reader = LogReader(config.log_path)
        assert reader.end().end_offset == 0, "nothing happened in the captured database"
    finally:
        drop_database(busy)


def test_ten_busy_tables_among_a_thousand(database: Database, tmp_path: Path) -> None:
    database.execute(
        "DO $$ BEGIN FOR i IN 1..1000 LOOP EXECUTE format("
        "'CREATE TABLE t%s (id int PRIMARY KEY, note text)', i); END LOOP; END $$",
    )
    busy = range(100, 1001, 100)
    inserts = [
        f"INSERT INTO t{number} SELECT i, 'x' FROM generate_series({start}, {start + 49}) i"
        for start in range(0, 250, 50)
        for number in busy
    ]
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute(*inserts, *(f"DELETE FROM t{number} WHERE id % 7 = 0" for number in busy))
        reader = wait_until_captured(database, config)
    shapes = reader.shapes()
    assert len(shapes) == 1000
    for number in busy:
        assert replayed(reader, f"public.t{number}") == source_rows(database, f"t{number}")
    with_changes = {piece.relation_oid for piece in reader.plan(0, reader.end().end_offset)}
    assert with_changes == {shapes[f"public.t{number}"].relation_oid for number in busy}


PARTITIONED = (
    "CREATE TABLE events (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF events FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE high (v text, id int NOT NULL PRIMARY KEY)",  # with its columns in another order
    "ALTER TABLE events ATTACH PARTITION high FOR VALUES FROM (100) TO (200)",
)
ON_PARTITIONS = (
    "INSERT INTO events VALUES (1, 'a'), (101, 'b')",
    "UPDATE events SET id = 102 WHERE id = 1",  # into the other partition
    "UPDATE events SET v = 'c' WHERE id = 101",
    "DELETE FROM events WHERE id = 102",
    "INSERT INTO events VALUES (2, 'd')",
)


def test_a_partitioned_table_arrives_under_its_root(database: Database, tmp_path: Path) -> None:
    database.execute(*PARTITIONED)
    config = configuration(database, tmp_path)
    with capturing(config):
        database.execute(*ON_PARTITIONS)
        reader = wait_until_captured(database, config)
        assert replayed(reader, "public.events") == source_rows(database, "events")
        rows = changes(reader, "public.events")
        assert [(Op(row["_op"]).name, row["id"]) for row in rows] == [
            ("INSERT", 1), ("INSERT", 101), ("DELETE", 1), ("INSERT", 102), ("UPDATE", 101), ("DELETE", 102),
            ("INSERT", 2),
        ]  # fmt: skip
        database.execute("CREATE TABLE top PARTITION OF events FOR VALUES FROM (200) TO (300)")
        database.execute("INSERT INTO events VALUES (250, 'in a partition made later')", "TRUNCATE events")
        database.execute("INSERT INTO events VALUES (3, 'e')")
        reader = wait_until_captured(database, config)
    assert set(reader.shapes()) == {"public.events"}
    assert replayed(reader, "public.events") == source_rows(database, "events") == {3: {"id": 3, "v": "e"}}


def test_partitions_published_one_by_one_arrive_as_tables_of_their_own(database: Database, tmp_path: Path) -> None:
    database.execute(
        *PARTITIONED, "CREATE PUBLICATION pgtide FOR TABLE events WITH (publish_via_partition_root = false)"
    )
    config = configuration(database, tmp_path, publication_mode="existing", tables=("public.low", "public.high"))
    with capturing(config):
        database.execute(*ON_PARTITIONS, "TRUNCATE low")
        reader = wait_until_captured(database, config)
    assert set(reader.shapes()) == {"public.low", "public.high"}
    for table in ("low", "high"):
        assert replayed(reader, f"public.{table}") == source_rows(database, table)
    moved = [(Op(row["_op"]).name, row["id"], row["_commit_lsn"]) for row in changes(reader, "public.low")][1]
    arrived = next(row for row in changes(reader, "public.high") if row["id"] == 102)
    assert moved == ("DELETE", 1, arrived["_commit_lsn"])
    assert ops(reader, "public.low") == ["INSERT", "DELETE", "INSERT", "TRUNCATE"]


@pytest.mark.parametrize("version", VERSIONS)
def test_generated_columns_arrive_where_the_server_sends_them(
    version: int, server_of: Callable[[int], LocalPostgres], tmp_path: Path
) -> None:
    database = create_database(server_of(version))
    try:
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED, v text)",
            "CREATE TABLE listed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text)",
        )
        config = configuration(database, tmp_path, tables=("public.t",))
        with capturing(config):
            database.execute("INSERT INTO t VALUES (1, 10)", "UPDATE t SET n = 11", "DELETE FROM t")
            reader = wait_until_captured(database, config)
        names = [column.name for column in reader.shapes()["public.t"].columns]
        assert names == (["id", "n", "twice", "v"] if version >= 18 else ["id", "n", "v"])
        found = [(Op(row["_op"]).name, row["n"], row.get("twice")) for row in changes(reader, "public.t")]
        inserted, updated = (20, 22) if version >= 18 else (None, None)
        assert found == [("INSERT", 10, inserted), ("UPDATE", 11, updated), ("DELETE", None, None)]
    finally:
        drop_database(database)


def test_a_column_list_may_name_a_generated_column_on_18(
    server_of: Callable[[int], LocalPostgres], tmp_path: Path
) -> None:
    database = create_database(server_of(18))
    try:
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text)",
            "CREATE PUBLICATION pgtide FOR TABLE t (id, twice)",
        )
        config = configuration(database, tmp_path, publication_mode="existing")
        with capturing(config):
            database.execute("INSERT INTO t VALUES (4, DEFAULT, 'not published')")
            reader = wait_until_captured(database, config)
        assert [(row["id"], row["twice"], "v" in row) for row in changes(reader, "public.t")] == [(4, 8, False)]
    finally:
        drop_database(database)


@pytest.mark.parametrize("same_shape", [True, False])
def test_a_table_made_anew_under_its_old_name_is_another_table(
    same_shape: bool, database: Database, tmp_path: Path
) -> None:
    old = "CREATE TABLE t (id int PRIMARY KEY, v text)"
    new = old if same_shape else "CREATE TABLE t (v numeric(8, 2), extra text[], id bigint PRIMARY KEY)"
    value, shown = ("'new'", "new") if same_shape else ("1.50", "1.50")
    database.execute(old, "CREATE PUBLICATION pgtide FOR ALL TABLES")
    config = configuration(database, tmp_path, publication_mode="existing")
    with capturing(config):
        database.execute("INSERT INTO t VALUES (1, 'old')")
        first = wait_until_captured(database, config).shapes()["public.t"]
        database.execute("DROP TABLE t", new, f"INSERT INTO t (id, v) VALUES (1, {value})")
        database.execute(f"BEGIN; DROP TABLE t; {new}; INSERT INTO t (id, v) VALUES (2, {value}); COMMIT")
        reader = wait_until_captured(database, config)
    last = reader.shapes()["public.t"]
    (oid,) = database.rows("SELECT 't'::regclass::oid::int8")[0]
    assert last.relation_oid == oid != first.relation_oid
    assert [(row["id"], str(row["v"])) for row in changes(reader, "public.t")] == [(2, shown)]
    pieces = reader.plan(0, reader.end().end_offset)
    by_relation = {piece.relation_oid: reader.read(piece) for piece in pieces}
    assert len(by_relation) == 3, "each of the three tables has its own changes"
    assert {rows.shape.qualified_name for rows in by_relation.values()} == {"public.t"}
    assert by_relation[first.relation_oid].rows["c2"].to_pylist() == ["old"]


@pytest.mark.parametrize("mode", ["managed", "existing"])
def test_a_dropped_table_does_not_keep_the_others_from_being_captured_after_a_reconnect(
    mode: str, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE gone (id int PRIMARY KEY)")
    if mode == "existing":
        database.execute("CREATE PUBLICATION pgtide FOR ALL TABLES")
    config = configuration(database, tmp_path, publication_mode=mode)
    with capturing(config) as states:
        database.execute("INSERT INTO t VALUES (1)", "INSERT INTO gone VALUES (1)", "DROP TABLE gone")
        wait_until_captured(database, config)
        reconnect(database, states)
        database.execute("INSERT INTO t VALUES (2)")
        reader = wait_until_captured(database, config)
    assert [row["id"] for row in changes(reader, "public.t")] == [1, 2]
    assert [row["id"] for row in changes(reader, "public.gone")] == [1]


def test_a_table_made_anew_is_published_again_at_the_next_reconnect(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = configuration(database, tmp_path)
    with capturing(config) as states:
        database.execute("INSERT INTO t VALUES (1)", "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)")
        reconnect(database, states)
        database.execute("INSERT INTO t VALUES (2)")
        reader = wait_until_captured(database, config)
    (oid,) = database.rows("SELECT 't'::regclass::oid::int8")[0]
    assert reader.shapes()["public.t"].relation_oid == oid
    assert [row["id"] for row in changes(reader, "public.t")] == [2]


def test_a_renamed_table_stays_published_over_a_reconnect(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = configuration(database, tmp_path)
    with capturing(config) as states:
        database.execute("INSERT INTO t VALUES (1)", "ALTER TABLE t RENAME TO renamed")
        reconnect(database, states)
        database.execute("INSERT INTO renamed VALUES (2)")
        reader = wait_until_captured(database, config)
    assert [row["id"] for row in changes(reader, "public.renamed")] == [1, 2]


def reconnect(database: Database, states: list[CaptureState]) -> None:
    """Ends the capture's stream, and waits until it has begun another."""
    seen = len(states)
    database.rows(
        f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{database.name}'"
    )
    wait_for(
        lambda: any(state.phase == "waiting" for state in states[seen:]) and states[-1].phase != "waiting",
        what="the capture to reconnect",
    )

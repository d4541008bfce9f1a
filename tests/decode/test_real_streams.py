"""What servers send in the cases that are easy to get wrong: TOAST, replica identities, streaming, two-phase, DDL."""

from __future__ import annotations

from typing import Any

from pgtide.change import OldImage, Op
from pgtide.decode import Decoded
from tests.database import Database
from tests.decode.real_stream import create_slot, decode, read_slot

BIG = "SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) i"  # too large for a page, even compressed


def changes(database: Database, *statements: str, setup: tuple[str, ...] = (), **options: str) -> Decoded:
    """What a slot says about the statements, each a transaction of its own."""
    two_phase = options.get("two_phase") == "on"
    options = {key: value for key, value in options.items() if key != "two_phase"}
    with database.connect() as connection:
        for statement in setup:
            connection.execute(statement.encode())
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        create_slot(connection, f"{database.name}_s", two_phase=two_phase)
        for statement in statements:
            connection.execute(statement.encode())
        if not two_phase:
            connection.execute("SET logical_decoding_work_mem = '64kB'")
        messages = read_slot(connection, f"{database.name}_s", "p", binary="true", **options)
        return decode(connection, messages)


def rows_of(decoded: Decoded, table: str) -> list[dict[str, Any]]:
    return [row for found in decoded.tables if found.shape.name == table for row in found.rows.to_pylist()]


def kinds(decoded: Decoded) -> str:
    return "".join(chr(kind) for kind in decoded.controls["kind"])


def test_unchanged_toast_is_marked_and_is_neither_null_nor_text(database: Database) -> None:
    setup = ("CREATE TABLE t (id int PRIMARY KEY, a int, big text)", f"INSERT INTO t SELECT 1, 1, ({BIG})")
    (row,) = rows_of(changes(database, "UPDATE t SET a = 2", setup=setup), "t")
    assert (row["_op"], row["c2"], row["c3"], row["_unchanged"]) == (Op.UPDATE, 2, None, bytes([0b100]))
    assert "_old" not in row


def test_unchanged_toast_under_full_identity_comes_from_the_old_row(database: Database) -> None:
    setup = (
        "CREATE TABLE t (id int PRIMARY KEY, a int, big text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"INSERT INTO t SELECT 1, 1, ({BIG})",
    )
    (row,) = rows_of(changes(database, "UPDATE t SET a = 2", setup=setup), "t")
    assert len(row["c3"]) == 12_800
    assert row["c3"] == row["_old.c3"]
    assert (row["_old"], row["_old.c2"], row["c2"]) == (OldImage.FULL, 1, 2)
    assert "_unchanged" not in row


def test_unchanged_toasted_key_comes_from_the_old_key(database: Database) -> None:
    setup = (
        "CREATE TABLE t (k text NOT NULL, a int)",
        "ALTER TABLE t ALTER k SET STORAGE EXTERNAL",
        "CREATE UNIQUE INDEX ti ON t (k)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX ti",
        "INSERT INTO t SELECT repeat('k', 2500), 1",
    )
    (row,) = rows_of(changes(database, "UPDATE t SET a = 2", setup=setup), "t")
    assert row["c1"] == "k" * 2500
    assert row["c2"] == 2
    assert "_unchanged" not in row
    assert row["_old.c1"] == row["c1"]


def test_row_filter_turns_an_update_into_an_insert_with_unchanged_values(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, a int, big text)")
        connection.execute(f"INSERT INTO t SELECT 1, 1, ({BIG})".encode())
        connection.execute("CREATE PUBLICATION f FOR TABLE t WHERE (id > 5)")
        create_slot(connection, f"{database.name}_f")
        connection.execute("UPDATE t SET id = 9")
        decoded = decode(connection, read_slot(connection, f"{database.name}_f", "f", binary="true"))
    (row,) = rows_of(decoded, "t")
    assert (row["_op"], row["c1"], row["c2"]) == (Op.INSERT, 9, 1)
    assert (row["c3"], row["_unchanged"]) == (None, bytes([0b100]))


def test_key_update_and_deletes_carry_what_the_replica_identity_gives(database: Database) -> None:
    setup = (
        "CREATE TABLE by_key (id int PRIMARY KEY, v text)",
        "CREATE TABLE by_row (id int PRIMARY KEY, v text)",
        "ALTER TABLE by_row REPLICA IDENTITY FULL",
        "INSERT INTO by_key VALUES (1, 'a'); INSERT INTO by_row VALUES (1, 'a')",
    )
    statements = [f"UPDATE {t} SET id = 2; DELETE FROM {t}" for t in ("by_key", "by_row")]
    decoded = changes(database, *statements, setup=setup)
    key_update, key_delete = rows_of(decoded, "by_key")
    assert (key_update["_old"], key_update["_old.c1"], key_update["c1"]) == (OldImage.KEY, 1, 2)
    assert "_old.c2" not in key_update
    assert (key_delete["_old"], key_delete["c1"], key_delete["c2"]) == (OldImage.KEY, 2, None)
    row_update, row_delete = rows_of(decoded, "by_row")
    assert (row_update["_old"], row_update["_old.c2"], row_update["c2"]) == (OldImage.FULL, "a", "a")
    assert (row_delete["_old"], row_delete["c1"], row_delete["c2"]) == (OldImage.FULL, 2, "a")


def test_truncate_of_several_tables_is_a_change_of_each_at_its_place(database: Database) -> None:
    setup = ("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    decoded = changes(database, "INSERT INTO a VALUES (1)", "TRUNCATE a, b", "INSERT INTO a VALUES (2)", setup=setup)
    assert [(row["_op"], row["c1"]) for row in rows_of(decoded, "a")] == [
        (Op.INSERT, 1), (Op.TRUNCATE, None), (Op.INSERT, 2),
    ]  # fmt: skip
    assert [row["_op"] for row in rows_of(decoded, "b")] == [Op.TRUNCATE]
    assert decoded.changes == 4


def test_altered_table_splits_into_batches_by_shape_also_inside_a_transaction(database: Database) -> None:
    decoded = changes(
        database,
        "BEGIN; INSERT INTO t VALUES (1, 10); ALTER TABLE t ADD b text; INSERT INTO t VALUES (2, 20, 'x'); COMMIT",
        "ALTER TABLE t DROP a",
        "INSERT INTO t VALUES (3, 'y')",
        setup=("CREATE TABLE t (id int PRIMARY KEY, a int)",),
    )
    assert [[column.name for column in found.shape.columns] for found in decoded.tables] == [
        ["id", "a"], ["id", "a", "b"], ["id", "b"],
    ]  # fmt: skip
    assert [found.rows.column("_change").to_pylist() for found in decoded.tables] == [[0], [1], [2]]


def test_messages_are_changes_with_prefix_content_and_lsn(database: Database) -> None:
    decoded = changes(
        database,
        "SELECT pg_logical_emit_message(false, 'outside', 'one')",
        "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'inside', E'\\\\x0001'::bytea); COMMIT",
        setup=("CREATE TABLE t (id int PRIMARY KEY)",),
    )
    rows = rows_of(decoded, "messages")
    assert [(row["c1"], row["c2"], row["c3"]) for row in rows] == [
        ("outside", b"one", False), ("inside", b"\0\1", True),
    ]  # fmt: skip
    assert rows[0]["c4"] < rows[1]["c4"]
    assert [row["_change"] for row in rows] == [0, 2]
    assert kinds(decoded) == "BC"


def test_streamed_transactions_carry_subtransactions_and_aborts(database: Database) -> None:
    fill = "INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series({}, {}) i"
    decoded = changes(
        database,
        f"BEGIN; {fill.format(1, 600)}; SAVEPOINT s; {fill.format(601, 1200)}; ROLLBACK TO s;"
        f"{fill.format(2001, 2600)}; COMMIT",
        setup=("CREATE TABLE t (id int PRIMARY KEY, v text)",),
        streaming="on",
    )
    letters = kinds(decoded)
    assert letters.startswith("S")
    assert letters.endswith("c")
    assert set(letters) >= set("SEc")
    xids = {int(xid) for kind, xid in zip(letters, decoded.controls["xid"], strict=True) if kind in "Sc"}
    assert len(xids) == 1
    aborted = {int(row["subxid"]) for row in decoded.controls[decoded.controls["kind"] == ord("A")]}
    assert aborted, "nothing was streamed before its savepoint was rolled back"
    assert any(row["_subxid"] in aborted for row in rows_of(decoded, "t"))
    kept = [row["c1"] for row in rows_of(decoded, "t") if row["_subxid"] not in aborted]
    assert kept == [*range(1, 601), *range(2001, 2601)]
    assert all(row["_subxid"] for row in rows_of(decoded, "t"))


def test_two_phase_transactions_carry_their_identifiers(database: Database) -> None:
    gid, other = f"{database.name}-1", f"{database.name}-2"
    decoded = changes(
        database,
        f"BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION '{gid}'",
        f"COMMIT PREPARED '{gid}'",
        f"BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION '{other}'",
        f"ROLLBACK PREPARED '{other}'",
        setup=("CREATE TABLE t (id int PRIMARY KEY)",),
        two_phase="on",
    )
    assert kinds(decoded) == "bPKbPr"
    assert list(decoded.gids.values()) == [gid, gid, gid, other, other, other]
    assert decoded.controls["change"].tolist() == [0, 1, 1, 1, 2, 2]


def test_origin_of_a_replicated_transaction_is_named(database: Database) -> None:
    name = f"elsewhere_{database.name}"
    decoded = changes(
        database,
        f"SELECT pg_replication_origin_create('{name}')",
        f"SELECT pg_replication_origin_session_setup('{name}')",
        "BEGIN; SELECT pg_replication_origin_xact_setup('0/ABC', now()); INSERT INTO t VALUES (1); COMMIT",
        f"SELECT pg_replication_origin_session_reset(); SELECT pg_replication_origin_drop('{name}')",
        setup=("CREATE TABLE t (id int PRIMARY KEY)",),
    )
    assert kinds(decoded) == "BOC"
    assert decoded.origins == {1: name}
    assert decoded.controls["commit_lsn"][1] == 0xABC


def test_a_thousand_tables_in_one_feed(database: Database) -> None:
    creates = "; ".join(f"CREATE TABLE t{number} (id int PRIMARY KEY, v text)" for number in range(1000))
    inserts = "; ".join(f"INSERT INTO t{number} VALUES ({number}, 'x')" for number in range(1000))
    decoded = changes(database, f"BEGIN; {inserts}; COMMIT", setup=(creates,))
    assert {table.shape.name: table.rows.column("c1").to_pylist() for table in decoded.tables} == {
        f"t{number}": [number] for number in range(1000)
    }

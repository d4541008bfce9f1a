"""What a change says of the row that it changed: by replica identity, large values, row filters and column lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pgtide.change import OldImage, Op
from pgtide.config import Config
from pgtide.log.reader import LogReader
from tests.capture.running import capturing, changes, configuration, replayed, source_rows, wait_until_captured
from tests.database import Database

BIG = "(SELECT string_agg(md5(i::text || {}), '') FROM generate_series(1, 400) i)"  # too large for a page


def captured(database: Database, tmp_path: Path, *statements: str, **source: Any) -> LogReader:
    """The log after these statements, each a transaction of its own."""
    config: Config = configuration(database, tmp_path, **source)
    with capturing(config):
        database.execute(*statements)
        return wait_until_captured(database, config)


def told(reader: LogReader, table: str, *names: str) -> list[tuple[Any, ...]]:
    rows = changes(reader, f"public.{table}")
    return [(Op(row["_op"]).name, OldImage(row["_old"]).name, *(row.get(name) for name in names)) for row in rows]


def test_every_replica_identity_gives_what_it_promises(database: Database, tmp_path: Path) -> None:
    tables = ("by_default", "by_index", "by_row", "by_nothing")
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, u int NOT NULL UNIQUE, v text)")
    database.execute(
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_u_key",
        "ALTER TABLE by_row REPLICA IDENTITY FULL",
        "ALTER TABLE by_nothing REPLICA IDENTITY NOTHING",
    )
    statements = [
        statement.format(table)
        for table in tables
        for statement in (
            "INSERT INTO {} VALUES (1, 10, 'a')",
            "UPDATE {} SET v = 'b'",
            "UPDATE {} SET id = 2",
            "UPDATE {} SET u = 20",
            "DELETE FROM {}",
        )
    ]
    reader = captured(database, tmp_path, *statements)
    names = ("id", "u", "v", "_old.c1", "_old.c2", "_old.c3")
    assert told(reader, "by_default", *names) == [
        ("INSERT", "NONE", 1, 10, "a", None, None, None),
        ("UPDATE", "NONE", 1, 10, "b", None, None, None),
        ("UPDATE", "KEY", 2, 10, "b", 1, None, None),
        ("UPDATE", "NONE", 2, 20, "b", None, None, None),
        ("DELETE", "KEY", 2, None, None, None, None, None),
    ]
    assert told(reader, "by_index", *names) == [
        ("INSERT", "NONE", 1, 10, "a", None, None, None),
        ("UPDATE", "NONE", 1, 10, "b", None, None, None),
        ("UPDATE", "NONE", 2, 10, "b", None, None, None),
        ("UPDATE", "KEY", 2, 20, "b", None, 10, None),
        ("DELETE", "KEY", None, 20, None, None, None, None),
    ]
    assert told(reader, "by_row", *names) == [
        ("INSERT", "NONE", 1, 10, "a", None, None, None),
        ("UPDATE", "FULL", 1, 10, "b", 1, 10, "a"),
        ("UPDATE", "FULL", 2, 10, "b", 1, 10, "b"),
        ("UPDATE", "FULL", 2, 20, "b", 2, 10, "b"),
        ("DELETE", "FULL", 2, 20, "b", None, None, None),
    ]
    # Published in full, its updates would fail in the application; so only its inserts are.
    assert told(reader, "by_nothing", "id", "u", "v") == [("INSERT", "NONE", 1, 10, "a")]
    shapes = reader.shapes()
    assert {table: [column.name for column in shapes[f"public.{table}"].key_columns] for table in tables} == {
        "by_default": ["id"],
        "by_index": ["u"],
        "by_row": ["id"],
        "by_nothing": [],
    }


def test_a_table_without_any_key_is_known_by_its_whole_rows(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    twice = "INSERT INTO t VALUES (1, 'x'), (1, 'x')"
    reader = captured(database, tmp_path, twice, "DELETE FROM t WHERE ctid = '(0,1)'", "UPDATE t SET b = NULL")
    assert reader.shapes()["public.t"].key_columns == ()
    assert told(reader, "t", "a", "b", "_old.c1", "_old.c2") == [
        ("INSERT", "NONE", 1, "x", None, None),
        ("INSERT", "NONE", 1, "x", None, None),
        ("DELETE", "FULL", 1, "x", None, None),
        ("UPDATE", "FULL", 1, None, 1, "x"),
    ]


def test_an_unchanged_large_value_is_neither_null_nor_sent(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        f"INSERT INTO t SELECT 1, 1, {BIG.format(1)}",
        f"INSERT INTO t SELECT 2, 1, {BIG.format(2)}",
        "CREATE TABLE f (LIKE t INCLUDING ALL)",
        "ALTER TABLE f REPLICA IDENTITY FULL",
        "INSERT INTO f SELECT * FROM t",
    )
    updates = (
        "UPDATE {} SET n = 2 WHERE id = 1",
        "UPDATE {} SET big = NULL WHERE id = 2",
        "UPDATE {} SET id = id + 10",
    )
    statements = [update.format(table) for table in "tf" for update in updates]
    before = {key: row["big"] for key, row in source_rows(database, "t").items()}
    reader = captured(database, tmp_path, *statements)
    by_key = [(row["id"], row["big"], row.get("_unchanged") or b"\0") for row in changes(reader, "public.t")]
    assert by_key == [(1, None, b"\4"), (2, None, b"\0"), (11, None, b"\4"), (12, None, b"\0")]
    # With the whole old row, the server sends the value there.
    by_row = [(row["id"], row["big"], row["_old.c3"]) for row in changes(reader, "public.f")]
    assert by_row == [(1, before[1], before[1]), (2, None, before[2]), (11, before[1], before[1]), (12, None, None)]
    assert all("_unchanged" not in row or row["_unchanged"] == b"\0" for row in changes(reader, "public.f"))


def test_a_large_key_is_always_there(database: Database, tmp_path: Path) -> None:
    """Stored apart from its row, an unchanged key comes as such in the new row, and with its value in the old key."""
    database.execute(
        "CREATE TABLE t (k text PRIMARY KEY, n int, big text)",
        "ALTER TABLE t ALTER k SET STORAGE EXTERNAL",
        f"INSERT INTO t SELECT repeat('k', 2500), 1, {BIG.format(1)}",
    )
    reader = captured(
        database,
        tmp_path,
        "UPDATE t SET n = 2",
        "UPDATE t SET k = repeat('l', 2500)",
        "UPDATE t SET k = 'short', n = 3",
        "DELETE FROM t",
    )
    rows = changes(reader, "public.t")
    assert [row["k"] for row in rows] == ["k" * 2500, "l" * 2500, "short", "short"]
    assert [row["n"] for row in rows] == [2, 2, 3, None]
    assert [row.get("_old.c1") for row in rows] == ["k" * 2500, "k" * 2500, "l" * 2500, None]
    # An old key does not mean that the key changed.
    assert [OldImage(row["_old"]) for row in rows] == [OldImage.KEY] * 4
    unchanged = [int.from_bytes(row.get("_unchanged") or b"\0", "little") for row in rows]
    assert unchanged == [0b100, 0b100, 0b100, 0], "the key is never among them"


def test_a_row_filter_turns_updates_into_inserts_and_deletes(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int, big text)",
        f"INSERT INTO t SELECT i, i, {BIG.format('i')} FROM generate_series(1, 2) i",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "CREATE TABLE k (id int PRIMARY KEY, big text)",
        f"INSERT INTO k SELECT 1, {BIG.format(1)}",
        "CREATE PUBLICATION pgtide FOR TABLE t WHERE (n > 5), k WHERE (id > 5)",
    )
    big = {key: row["big"] for key, row in source_rows(database, "t").items()}
    reader = captured(
        database,
        tmp_path,
        "UPDATE t SET n = 3 WHERE id = 1",  # outside before and after
        "UPDATE t SET n = 6 WHERE id = 1",  # enters
        "UPDATE t SET n = 7 WHERE id = 1",  # stays
        "UPDATE t SET n = 1 WHERE id = 1",  # leaves
        "UPDATE k SET id = 9",
        publication_mode="existing",
    )
    rows = changes(reader, "public.t")
    assert [(Op(row["_op"]).name, row["id"], row["n"], row["big"]) for row in rows] == [
        ("INSERT", 1, 6, big[1]),
        ("UPDATE", 1, 7, big[1]),
        ("DELETE", 1, 7, big[1]),
    ]
    # With the key alone as old image, the value of the row that entered is not known.
    (entered,) = changes(reader, "public.k")
    assert (Op(entered["_op"]).name, entered["id"], entered["big"], entered["_unchanged"]) == ("INSERT", 9, None, b"\2")


def test_a_column_list_shapes_rows_and_what_is_recorded_of_the_table(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (secret text, id int PRIMARY KEY, n int, also_secret text)",
        "CREATE PUBLICATION pgtide FOR TABLE t (id, n)",
    )
    reader = captured(
        database,
        tmp_path,
        "INSERT INTO t VALUES ('s', 1, 10, 'x')",
        "UPDATE t SET secret = 'other'",
        "UPDATE t SET n = 11, id = 2",
        "DELETE FROM t",
        publication_mode="existing",
    )
    assert [(column.attnum, column.name) for column in reader.shapes()["public.t"].columns] == [(2, "id"), (3, "n")]
    assert told(reader, "t", "id", "n", "_old.c2") == [
        ("INSERT", "NONE", 1, 10, None),
        ("UPDATE", "NONE", 1, 10, None),
        ("UPDATE", "KEY", 2, 11, 1),
        ("DELETE", "KEY", 2, None, None),
    ]
    assert b"other" not in b"".join(path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file())


def test_keys_are_those_of_the_relation_where_the_catalog_has_moved_on(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL UNIQUE)",
        "CREATE TABLE f (a int PRIMARY KEY, b int NOT NULL UNIQUE)",
        "ALTER TABLE f REPLICA IDENTITY FULL",
    )
    config = configuration(database, tmp_path)
    with capturing(config):
        pass
    database.execute(
        "INSERT INTO t VALUES (1, 10)",
        "INSERT INTO f VALUES (1, 10)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_b_key",
        "UPDATE t SET b = 11",
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "ALTER TABLE f DROP CONSTRAINT f_pkey",
        "ALTER TABLE f ADD PRIMARY KEY (b)",
    )
    with capturing(config):
        reader = wait_until_captured(database, config)
    keys = {table: keys_told(reader, table) for table in "tf"}
    # The messages of t carry flags: they decide.  Under FULL all columns are flagged, and the catalog has only the key
    # of now, which these rows need not have had: whole as they are, they are known without one.
    assert keys == {"t": [["a"], ["b"]], "f": [[]]}
    assert replayed(reader, "public.t", "a") == source_rows(database, "t", "a")


def keys_told(reader: LogReader, table: str) -> list[list[str]]:
    """The key that the changes of each block have."""
    oid = reader.shapes()[f"public.{table}"].relation_oid
    pieces = reader.plan(0, reader.end().end_offset, oid)
    return [[column.name for column in reader.read(piece).shape.key_columns] for piece in pieces]


def test_under_full_a_key_counts_from_where_it_is_certain_to_have_been_there(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE late (id int, v int)",
        "ALTER TABLE late REPLICA IDENTITY FULL",
        "INSERT INTO late VALUES (1, 1), (1, 2)",
        "CREATE TABLE early (id int PRIMARY KEY)",
        "ALTER TABLE early REPLICA IDENTITY FULL",
    )
    config = configuration(database, tmp_path)
    with capturing(config):
        wait_until_captured(database, config)
        # The relation message in front of the delete is most often read when the catalog has the key already; the
        # transaction may also be sent a moment before others see it.
        with database.connect() as connection, connection.transaction():
            connection.execute("DELETE FROM late WHERE v = 2")
            connection.execute("ALTER TABLE late ADD PRIMARY KEY (id)")
        wait_until_captured(database, config)
        database.execute("INSERT INTO early VALUES (1)", "INSERT INTO late VALUES (2, 1)")
        wait_until_captured(database, config)  # at the latest with the second message the key was seen
        wait_until_captured(database, config)  # and the stream has passed the LSN at which it was
        # The next message comes while the slot is still behind the key.  That does not make it uncertain again.
        database.execute("ALTER TABLE late ALTER v SET STATISTICS 10", "INSERT INTO late VALUES (3, 1)")
        reader = wait_until_captured(database, config)
    assert keys_told(reader, "early") == [["id"]], "it had its key before the slot was made"
    assert (keys_told(reader, "late")[0], keys_told(reader, "late")[-1]) == ([], ["id"])
    assert told(reader, "late", "id", "v")[0] == ("DELETE", "FULL", 1, 2)

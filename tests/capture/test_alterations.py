"""What the stream does not say of tables is noted from the catalog: other shapes, and rows that were rewritten."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from pgtide.capture.alterations import ALTERATION_NOTED, AlterationWatch
from pgtide.log.control import Alteration, alterations, record_alterations
from pgtide.lsn import parse_lsn
from pgtide.replication.catalog import Catalog
from pgtide.replication.rewrites import bring_rows, new_branches, table_states
from tests.capture.running import CaptureProcess, configuration
from tests.database import Database
from tests.standby import standby_of
from tests.waiting import wait_for


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int, small smallint, ratio real, price numeric(6, 2), v varchar(9), "
        "at timestamp(6), net cidr, loose numeric)",
        "INSERT INTO t SELECT i, i, i, i, i, i FROM generate_series(1, 50) i",
        "CREATE TABLE parted (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "INSERT INTO parted SELECT i, i FROM generate_series(1, 50) i",
        "CREATE TABLE apart (id int PRIMARY KEY, n int)",
        "INSERT INTO apart VALUES (200, 1)",
        "CREATE TABLE allset (id int DEFAULT 1, n int DEFAULT 2) PARTITION BY RANGE (id)",
        "CREATE DOMAIN seven AS int DEFAULT (random() * 7)::int",
        "CREATE PUBLICATION p FOR TABLE t, parted, allset WITH (publish_via_partition_root)",
    )
    return database


def looked(shop: Database, folder: Path, *statements: str, table: str = "t") -> Alteration:
    """What is noted after the statements, each seen by a look of its own, and one more look."""
    now_s = itertools.count(1, 100)
    with shop.connect() as connection:
        connection.autocommit = True
        row = connection.execute("SELECT %s::regclass::oid::int8", [table]).fetchone()
        assert row is not None
        watch = AlterationWatch(str(folder / table), ["p"], [row[0]])
        watch.look(connection, next(now_s))
        for statement in statements:
            connection.execute(statement.encode())
            watch.look(connection, next(now_s))
        watch.look(connection, next(now_s))
    return alterations(str(folder / table))[row[0]]


KEEP_VALUES = [
    "VACUUM FULL t",
    "TRUNCATE t",
    "INSERT INTO t SELECT i, i, i, i, i, i FROM generate_series(1, 50) i",
    "CLUSTER t USING t_pkey",
    "ALTER TABLE t ALTER n TYPE bigint, ALTER small TYPE int, ALTER ratio TYPE float8, ALTER v SET NOT NULL",
    "ALTER TABLE t ALTER price TYPE numeric(9, 2), ALTER v TYPE text, ALTER n SET NOT NULL",
    "ALTER TABLE t RENAME n TO m",
    "ALTER TABLE t ADD nothing text, ALTER price TYPE numeric(12, 2)",
    "ALTER TABLE t ADD five int DEFAULT 5",
    "ALTER TABLE t ALTER price TYPE numeric",
]
REWRITE = [
    ("t", "ALTER TABLE t ALTER n TYPE int USING n + 1"),
    ("t", "ALTER TABLE t ALTER v TYPE text USING upper(v)"),
    ("t", "ALTER TABLE t ALTER small TYPE text"),
    ("t", "ALTER TABLE t ALTER loose TYPE numeric(6, 2)"),
    ("t", "ALTER TABLE t ALTER price TYPE numeric(6, 1)"),
    ("t", "ALTER TABLE t ALTER price TYPE numeric(12, 1), ALTER id TYPE bigint"),
    ("t", "ALTER TABLE t ALTER price TYPE numeric(9, 2) USING price + 1"),
    ("t", "ALTER TABLE t ALTER at TYPE timestamp(3)"),
    ("t", "ALTER TABLE t ALTER net TYPE inet"),
    ("t", "ALTER TABLE t ADD made timestamptz DEFAULT clock_timestamp()"),
    ("t", "ALTER TABLE t ADD number int GENERATED ALWAYS AS IDENTITY"),
    ("t", "ALTER TABLE t ADD counted serial"),
    ("t", "ALTER TABLE t ADD lucky seven"),
    ("parted", "ALTER TABLE parted ALTER n TYPE int USING n + 1"),
]


def test_what_leaves_values_as_they_are_is_no_rewrite(shop: Database, tmp_path: Path) -> None:
    for statement in KEEP_VALUES:
        assert looked(shop, tmp_path, statement).rewritten_lsn == 0, statement


def test_rows_that_got_other_values_are_noted(shop: Database, tmp_path: Path) -> None:
    for table, statement in REWRITE:
        before = looked(shop, tmp_path, table=table).rewritten_lsn
        end_lsn = parse_lsn(shop.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        found = looked(shop, tmp_path, statement, table=table)
        assert before < end_lsn < found.rewritten_lsn == found.seen_lsn, statement
        assert looked(shop, tmp_path, "TRUNCATE t", table=table).rewritten_lsn == found.rewritten_lsn, "it stays noted"
        shop.execute("INSERT INTO t (id) VALUES (1)")


# Each string is a transaction.
SAME_ROWS = [
    ("parted", "CREATE TABLE next PARTITION OF parted FOR VALUES FROM (200) TO (300)"),
    (
        "parted",
        "CREATE TABLE filled PARTITION OF parted FOR VALUES FROM (300) TO (400); INSERT INTO parted VALUES (300)",
    ),
    ("allset", "CREATE TABLE set PARTITION OF allset FOR VALUES FROM (0) TO (9); INSERT INTO allset VALUES (3)"),
    ("parted", "INSERT INTO parted VALUES (60), (201)"),
    (
        "parted",
        (
            "CREATE TABLE split PARTITION OF parted FOR VALUES FROM (400) TO (500) PARTITION BY RANGE (id); "
            "CREATE TABLE split_1 PARTITION OF split FOR VALUES FROM (400) TO (450); INSERT INTO parted VALUES (401)"
        ),
    ),
    ("parted", "CREATE TABLE split_2 PARTITION OF split DEFAULT; INSERT INTO parted VALUES (451)"),
    ("parted", "CREATE TABLE empty (LIKE parted INCLUDING ALL)"),
    ("parted", "ALTER TABLE parted ATTACH PARTITION empty FOR VALUES FROM (500) TO (600)"),
    (
        "parted",
        "CREATE TABLE hollow (LIKE parted); ALTER TABLE parted ATTACH PARTITION hollow FOR VALUES FROM (600) TO (700)",
    ),
    ("parted", "INSERT INTO parted VALUES (501), (601)"),
    ("parted", "ALTER TABLE parted ADD late int DEFAULT 5; ALTER TABLE parted ALTER n SET DEFAULT 3; ANALYZE parted"),
    ("parted", "DROP TABLE apart"),
]
ATTACH_TREE = "ALTER TABLE parted ATTACH PARTITION tree FOR VALUES FROM (400) TO (500)"
OTHER_ROWS = [
    ["ALTER TABLE parted ATTACH PARTITION apart FOR VALUES FROM (200) TO (300)"],
    [
        (
            "CREATE TABLE quick AS SELECT 300 AS id, 1 AS n; ALTER TABLE quick ALTER id SET NOT NULL; "
            "ALTER TABLE parted ATTACH PARTITION quick FOR VALUES FROM (300) TO (400)"
        )
    ],
    [
        "CREATE TABLE tree (LIKE parted) PARTITION BY RANGE (id)",
        "CREATE TABLE tree_1 PARTITION OF tree DEFAULT; INSERT INTO tree VALUES (400)",
        ATTACH_TREE,
    ],
    ["ALTER TABLE parted DETACH PARTITION tree", "DELETE FROM tree", ATTACH_TREE],
    ["TRUNCATE tree_1"],
    ["DROP TABLE tree"],
    ["ALTER TABLE parted DETACH PARTITION apart"],
    ["ALTER TABLE parted DETACH PARTITION quick CONCURRENTLY"],
    [
        "CREATE TABLE brief PARTITION OF parted FOR VALUES FROM (500) TO (600); INSERT INTO parted VALUES (500)",
        "TRUNCATE brief",
    ],
    ["VACUUM FULL leaf"],  # looks like TRUNCATE, after which others were inserted
    ["TRUNCATE parted"],  # is sent, but looks like TRUNCATE of each partition
    ["DROP TABLE leaf, brief"],
]


def test_partitions_that_are_created_have_no_rows_that_were_not_sent(shop: Database, tmp_path: Path) -> None:
    looked(shop, tmp_path, table="allset")
    for table, statement in SAME_ROWS:
        assert looked(shop, tmp_path, statement, table=table).rewritten_lsn == 0, statement


def test_rows_that_come_or_go_with_partitions_are_noted(shop: Database, tmp_path: Path) -> None:
    looked(shop, tmp_path, table="parted")
    for statements in OTHER_ROWS:
        end_lsn = parse_lsn(shop.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        shop.execute(*statements)  # while no capture runs: the next look is another one's
        found = looked(shop, tmp_path, table="parted")
        assert found.rewritten_lsn > end_lsn, statements
        assert looked(shop, tmp_path, table="parted").rewritten_lsn == found.rewritten_lsn, "once"


def test_a_locked_partition_that_was_attached_is_not_waited_for(shop: Database, tmp_path: Path) -> None:
    looked(shop, tmp_path, table="parted")
    shop.execute("ALTER TABLE parted ATTACH PARTITION apart FOR VALUES FROM (200) TO (300)")
    with shop.connect() as other, other.transaction():
        other.execute("LOCK TABLE apart IN ACCESS EXCLUSIVE MODE")
        assert looked(shop, tmp_path, table="parted").rewritten_lsn > 0


def test_on_a_standby_created_partitions_that_have_rows_count_as_attached(shop: Database) -> None:
    oid = shop.rows("SELECT 'parted'::regclass::oid::int8")[0][0]
    with standby_of(shop.server) as standby, standby.connect(shop.name) as connection:

        def bring(statement: str) -> bool:
            before = table_states(connection, [oid])[0][oid]
            shop.execute(statement)
            wait_for(
                lambda: new_branches(before, table_states(connection, [oid])[0][oid]), what="the standby to follow"
            )
            return bring_rows(connection, new_branches(before, table_states(connection, [oid])[0][oid]))

        assert not bring("CREATE TABLE next PARTITION OF parted FOR VALUES FROM (200) TO (300)")
        filled = "CREATE TABLE filled PARTITION OF parted FOR VALUES FROM (300) TO (400)"
        assert bring(f"{filled}; INSERT INTO parted VALUES (300)")


def test_renamed_labels_of_enums_are_noted_and_added_ones_are_not(shop: Database, tmp_path: Path) -> None:
    shop.execute(
        *(f"CREATE TYPE {name} AS ENUM ('a', 'b')" for name in ("plain", "listed", "limited", "within", "spanned")),
        "CREATE TYPE unused AS ENUM ('a', 'b')",
        "CREATE DOMAIN named AS limited CHECK (value IS NOT NULL)",
        "CREATE TYPE pair AS (first within[], second int)",
        "CREATE TYPE span AS RANGE (subtype = spanned)",
        "CREATE TABLE moods (id int PRIMARY KEY, p plain, l listed[], n named, c pair, s span)",
    )
    noted = 0
    for name in ("plain", "listed", "limited", "within", "spanned"):
        assert (
            looked(shop, tmp_path, f"ALTER TYPE {name} ADD VALUE 'c' BEFORE 'a'", table="moods").rewritten_lsn == noted
        )
        found = looked(shop, tmp_path, f"ALTER TYPE {name} RENAME VALUE 'b' TO 'd'", table="moods")
        assert found.rewritten_lsn > noted, name
        noted = found.rewritten_lsn
    assert looked(shop, tmp_path, "ALTER TYPE unused RENAME VALUE 'b' TO 'd'", table="moods").rewritten_lsn == noted


def test_what_an_older_version_has_noted_is_no_reason_to_load_anew(shop: Database, tmp_path: Path) -> None:
    shop.execute("CREATE TYPE mood AS ENUM ('a')", "ALTER TABLE t ADD mood mood")

    def as_noted_before(table: str) -> dict[str, Any]:
        """Makes the note one of an older version, which knew of neither partitions nor labels."""
        state = looked(shop, tmp_path, table=table).state
        older = {key: value for key, value in state.items() if key not in ("branches", "labels")}
        older["files"] = older["files"] or None
        oid = shop.rows(f"SELECT '{table}'::regclass::oid::int8")[0][0]
        record_alterations(str(tmp_path / table), {oid: Alteration(older)})
        return state

    for table in ("t", "parted", "allset"):
        state = as_noted_before(table)
        found = looked(shop, tmp_path, table=table)
        assert (found.state, found.rewritten_lsn) == (state, 0)
        as_noted_before(table)
        change = "TRUNCATE t" if table == "t" else f"CREATE TABLE {table}_new PARTITION OF {table} DEFAULT"
        assert looked(shop, tmp_path, change, table=table).rewritten_lsn == 0
    for change in ("ALTER TABLE parted ATTACH PARTITION apart FOR VALUES FROM (200) TO (300)", "DROP TABLE leaf"):
        as_noted_before("parted")
        assert looked(shop, tmp_path, change, table="parted").rewritten_lsn > 0, change


def test_shape_is_noted_once_it_is_sure_from_where_on_it_holds(shop: Database, tmp_path: Path) -> None:
    assert looked(shop, tmp_path).shape is None
    found = looked(shop, tmp_path, "ALTER TABLE t ADD five int DEFAULT 5")
    assert found.shape is not None
    with shop.connect() as connection:
        assert found.shape == Catalog(connection).shape(found.shape.relation_oid, ["p"])
    assert [column.missing for column in found.shape.columns if column.name == "five"] == ["5"]
    end = shop.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0]
    assert 0 < found.seen_lsn <= parse_lsn(end)
    shop.execute("ALTER TABLE t ADD six int")
    oid = found.shape.relation_oid
    with shop.connect() as connection:
        connection.autocommit = True
        AlterationWatch(str(tmp_path / "t"), ["p"], [oid]).look(connection, 1)
    assert alterations(str(tmp_path / "t"))[oid].shape is None, "another process has seen it once, and not twice"


def test_killed_after_a_note_it_goes_on_from_there(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path)
    oid = shop.rows("SELECT 't'::regclass::oid::int8")[0][0]
    CaptureProcess(config, f"{ALTERATION_NOTED}=kill").wait_for_death()
    first = alterations(config.log_location)[oid]
    assert (first.seen_lsn, first.shape) == (0, None)
    shop.execute("ALTER TABLE t ADD five int DEFAULT 5")
    CaptureProcess(config, f"{ALTERATION_NOTED}=kill").wait_for_death()
    assert alterations(config.log_location)[oid].seen_lsn > 0
    process = CaptureProcess(config)
    try:
        wait_for(lambda: alterations(config.log_location)[oid].shape, what="the shape to be noted")
    finally:
        process.stop()

"""Publications: brought to what is wanted, idempotent, harmless to the application, and never somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pgtide import local
from pgtide.config import Source
from pgtide.errors import SourceNotReadyError
from pgtide.replication.catalog import Catalog
from pgtide.replication.connect import Connection, connect
from pgtide.replication.publication import (
    ensure_publication,
    plan_publication,
    publication_names,
    read_publications,
)
from pgtide.replication.published import published_tables
from tests.database import Database, create_database

MANAGED = Source(dsn="")
EXISTING = Source(dsn="", publication_mode="existing")


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with connect(database.dsn, timeout_s=10) as opened:
        yield opened


def ensure(connection: Connection, source: Source = MANAGED, *patterns: str) -> tuple[str, ...]:
    return ensure_publication(connection, source, Catalog(connection).tables(patterns or ("public.*",)))


def members(database: Database) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for publication, table in database.rows(
        "SELECT p.pubname, t.tablename FROM pg_publication p LEFT JOIN pg_publication_tables t USING (pubname)"
    ):
        found.setdefault(publication, set()).update({table} if table else set())
    return found


def test_both_publications_are_made_even_when_one_is_empty(database: Database, connection: Connection) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    assert ensure(connection) == ("pgtide", "pgtide_insert_only")
    assert members(database) == {"pgtide": {"orders"}, "pgtide_insert_only": set()}


def test_updates_of_every_table_still_work_after_it_was_published(database: Database, connection: Connection) -> None:
    database.execute(
        "CREATE TABLE keyed (a int PRIMARY KEY)",
        "CREATE TABLE bare (a int)",
        "CREATE TABLE later (a int PRIMARY KEY DEFERRABLE)",
        "CREATE TABLE parts (a int) PARTITION BY LIST (a)",
        "CREATE TABLE parts_1 PARTITION OF parts DEFAULT",
        "ALTER TABLE parts REPLICA IDENTITY FULL",
    )
    ensure(connection)
    assert members(database) == {"pgtide": {"keyed"}, "pgtide_insert_only": {"bare", "later", "parts"}}
    for table in ("keyed", "bare", "later", "parts"):
        database.execute(f"INSERT INTO {table} VALUES (1)", f"UPDATE {table} SET a = 2", f"DELETE FROM {table}")


def test_generated_columns_under_full_identity_do_no_harm_on_18() -> None:
    with local.postgres(18) as server:
        database = create_database(server)
        database.execute(
            "CREATE TABLE stored (a int, g int GENERATED ALWAYS AS (a * 2) STORED)",
            "CREATE TABLE virtual (a int, g int GENERATED ALWAYS AS (a * 2) VIRTUAL)",
            "ALTER TABLE stored REPLICA IDENTITY FULL",
            "ALTER TABLE virtual REPLICA IDENTITY FULL",
        )
        with connect(database.dsn, timeout_s=10) as connection:
            ensure(connection)
            plan = plan_publication(
                MANAGED,
                read_publications(connection, publication_names(MANAGED)),
                Catalog(connection).tables(["public.*"]),
                connection.info.server_version,
            )
            assert plan.statements == ()
        assert members(database) == {"pgtide": {"stored"}, "pgtide_insert_only": {"virtual"}}
        for table in ("stored", "virtual"):
            database.execute(f"INSERT INTO {table} VALUES (1)", f"UPDATE {table} SET a = 2", f"DELETE FROM {table}")


def test_a_second_time_changes_nothing(database: Database, connection: Connection) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE bare (a int)")
    ensure(connection)
    before = database.rows("SELECT xmin::text, * FROM pg_publication ORDER BY pubname")
    ensure(connection)
    assert database.rows("SELECT xmin::text, * FROM pg_publication ORDER BY pubname") == before


def test_the_publication_follows_configuration_and_identities(database: Database, connection: Connection) -> None:
    database.execute("CREATE TABLE a (id int)", "CREATE TABLE b (id int PRIMARY KEY)", "CREATE TABLE c (id int)")
    ensure(connection)
    assert members(database) == {"pgtide": {"b"}, "pgtide_insert_only": {"a", "c"}}
    database.execute(
        "ALTER TABLE a ADD PRIMARY KEY (id)",
        "ALTER TABLE b DROP CONSTRAINT b_pkey",
        'CREATE TABLE "D""x" (id int PRIMARY KEY)',
        "ALTER PUBLICATION pgtide SET (publish = 'insert', publish_via_partition_root = false)",
    )
    ensure(connection, MANAGED, "public.*", "!public.c")
    assert members(database) == {"pgtide": {"a", 'D"x'}, "pgtide_insert_only": {"b"}}
    assert database.rows("SELECT pubupdate, pubdelete, pubviaroot FROM pg_publication WHERE pubname = 'pgtide'") == [
        (True, True, True)
    ]


def test_partitioned_tables_are_published_as_their_root(database: Database, connection: Connection) -> None:
    database.execute(
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE TABLE events_1 PARTITION OF events DEFAULT",
    )
    ensure(connection)
    assert members(database)["pgtide"] == {"events"}


@pytest.mark.parametrize("of", ["FOR TABLE orders", "FOR ALL TABLES", "FOR TABLES IN SCHEMA public"])
def test_a_publication_of_somebody_else_is_refused_and_stays(
    database: Database, connection: Connection, of: str
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE new (id int PRIMARY KEY)")
    database.execute(f"CREATE PUBLICATION pgtide {of}")
    before = members(database)
    with pytest.raises(SourceNotReadyError, match=r'(?s)not made by pgtide.*publication_mode = "existing"'):
        ensure(connection)
    assert members(database) == before


def test_a_half_done_plan_leaves_nothing(database: Database, connection: Connection) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE bare (id int)")
    tables = Catalog(connection).tables(["public.*"])
    missing = [replace(table, name="vanished") if table.name == "bare" else table for table in tables]
    with pytest.raises(Exception, match="vanished"):
        ensure_publication(connection, MANAGED, missing)
    assert members(database) == {}


def test_existing_mode_takes_what_is_enough_and_alters_nothing(database: Database, connection: Connection) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE TABLE events_1 PARTITION OF events DEFAULT",
        "CREATE PUBLICATION pgtide FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )
    before = database.rows("SELECT xmin::text, * FROM pg_publication")
    assert ensure(connection, EXISTING) == ("pgtide",)
    assert database.rows("SELECT xmin::text, * FROM pg_publication") == before


@pytest.mark.parametrize(
    ("publication", "what", "remedy"),
    [
        ("", "there is no publication", 'CREATE PUBLICATION "pgtide" FOR TABLE "public"."events", "public"."orders"'),
        ("CREATE PUBLICATION pgtide FOR TABLE events WITH (publish_via_partition_root)",
         'does not publish "public"."orders"',
         'ALTER PUBLICATION "pgtide" ADD TABLE "public"."orders"'),
        ("CREATE PUBLICATION pgtide FOR ALL TABLES", "partitions one by one", "publish_via_partition_root = true"),
        ("CREATE PUBLICATION pgtide FOR ALL TABLES WITH (publish = 'insert', publish_via_partition_root)",
         "publishes only insert", "publish = 'insert, update, delete, truncate'"),
    ],
)  # fmt: skip
def test_existing_mode_says_what_is_missing(
    database: Database, connection: Connection, publication: str, what: str, remedy: str
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE TABLE events_1 PARTITION OF events DEFAULT",
    )
    if publication:
        database.execute(publication)
    with pytest.raises(SourceNotReadyError) as caught:
        ensure(connection, EXISTING)
    assert what in caught.value.what
    assert remedy in caught.value.remedy


def test_the_remedy_for_existing_mode_does_no_harm(database: Database, connection: Connection) -> None:
    database.execute("CREATE TABLE bare (a int)")
    with pytest.raises(SourceNotReadyError) as caught:
        ensure(connection, EXISTING)
    database.execute(*caught.value.remedy.splitlines())
    assert ensure(connection, EXISTING) == ("pgtide",)
    database.execute("INSERT INTO bare VALUES (1)", "UPDATE bare SET a = 2")


def test_column_lists_and_row_filters_are_seen(database: Database, connection: Connection) -> None:
    database.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int, c int)",
        "CREATE PUBLICATION one FOR TABLE t (a, b) WHERE (a > 5)",
        "CREATE PUBLICATION two FOR TABLE t (a, b) WHERE (a < 0)",
    )
    (only,) = published_tables(connection, ["one"]).values()
    assert (only.columns, only.row_filter) == (frozenset({"a", "b"}), "(a > 5)")
    (both,) = published_tables(connection, ["one", "two"]).values()
    assert both.row_filter == "((a > 5)) OR ((a < 0))"
    (table,) = Catalog(connection).tables(["public.t"])
    assert [column.name for column in Catalog(connection).shape(table.oid, ["one"]).columns] == ["a", "b"]

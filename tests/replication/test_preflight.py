"""What is asked before anything is created: each no has its remedy, and leaves the database as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pgtide import local
from pgtide.config import Config, Source
from pgtide.errors import SourceNotReadyError
from pgtide.replication.connect import connect
from pgtide.replication.preflight import SourceFacts, check_source
from pgtide.replication.publication import ensure_publication
from tests.database import Database, create_database
from tests.replication.roles import role


def config(dsn: str, **source: Any) -> Config:
    return Config(source=Source(dsn=dsn, **{"connect_timeout_seconds": 5, **source}))


def facts(database: Database, *, user: str = "postgres", **source: Any) -> SourceFacts:
    return check_source(config(database.server.dsn_of(database.name, user=user), **source))


def refusal(database: Database, *, user: str = "postgres", **source: Any) -> SourceNotReadyError:
    with unchanged(database), pytest.raises(SourceNotReadyError) as caught:
        facts(database, user=user, **source)
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    return caught.value


@contextmanager
def unchanged(database: Database) -> Iterator[None]:
    """Publications and slots are the same before and after."""
    query = """SELECT 'publication', pubname::text, xmin::text FROM pg_publication
               UNION ALL SELECT 'table', prrelid::text, xmin::text FROM pg_publication_rel
               UNION ALL SELECT 'slot', slot_name::text, restart_lsn::text FROM pg_replication_slots
                         WHERE database = current_database() ORDER BY 1, 2"""
    before = database.rows(query)
    yield
    assert database.rows(query) == before


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, total numeric(10, 2))",
        "CREATE TABLE customers (id int PRIMARY KEY)",
        "CREATE TABLE notes (x text)",
        "CREATE VIEW best AS SELECT * FROM customers",
        "CREATE MATERIALIZED VIEW summary AS SELECT count(*) FROM orders",
        "CREATE UNLOGGED TABLE cache (id int PRIMARY KEY)",
        "CREATE FOREIGN DATA WRAPPER elsewhere",
        "CREATE SERVER archive FOREIGN DATA WRAPPER elsewhere",
        "CREATE FOREIGN TABLE remote (id int) SERVER archive",
    )
    return database


@pytest.fixture
def events(shop: Database) -> Database:
    """Published, partitioned in two levels; the leaf with the rows is in a schema of its own."""
    shop.execute(
        "CREATE SCHEMA parts",
        "CREATE TABLE events (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE events_low PARTITION OF events FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id)",
        "CREATE TABLE parts.low_1 PARTITION OF events_low FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE events_high PARTITION OF events FOR VALUES FROM (100) TO (200)",
        "INSERT INTO events VALUES (1)",
        "CREATE PUBLICATION mine FOR TABLE events WITH (publish_via_partition_root, publish = 'insert, truncate')",
    )
    return shop


def test_a_ready_source_is_described_and_left_as_it_is(shop: Database) -> None:
    with unchanged(shop):
        found = facts(shop)
    assert (found.database, found.role, found.timeline) == (shop.name, "postgres", 1)
    assert found.server_version // 10000 == 16
    assert found.system_identifier.isdigit()
    assert [table.name for table in found.tables] == ["customers", "notes", "orders"]
    assert [table.name for table in found.tables_without_key] == ["notes"]


def test_a_role_with_replication_and_select_is_enough_for_an_existing_publication(shop: Database) -> None:
    shop.execute("CREATE PUBLICATION mine FOR TABLE orders, customers")
    with role(shop, "REPLICATION") as name:
        shop.execute(f"GRANT SELECT ON orders, customers TO {name}")
        found = facts(
            shop, user=name, publication="mine", publication_mode="existing", tables=("public.*s", "!public.notes")
        )
    assert [table.name for table in found.tables] == ["customers", "orders"]


def test_a_publication_that_is_complete_needs_no_rights_to_make_one(shop: Database) -> None:
    with connect(shop.dsn, timeout_s=10) as connection:
        ensure_publication(connection, Source(dsn=""), facts(shop).tables)
    with role(shop, "REPLICATION") as name:
        shop.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
        assert len(facts(shop, user=name).tables) == 3


@pytest.mark.parametrize(
    ("pattern", "what", "remedy"),
    [
        ("public.oders", "'public.oders' matches no table", "public.orders"),
        ("shop.orders", "'shop.orders' matches no table", "public.orders"),
        ("public.best", "public.best is a view", "permanent"),
        ("public.summary", "public.summary is a materialized view", "permanent"),
        ("public.remote", "public.remote is a foreign table", "permanent"),
        ("public.cache", "public.cache is an unlogged", "permanent"),
        ("zzz.qqq*", "'zzz.qqq*' matches no table", "There are: public.customers"),
    ],
)
def test_a_pattern_without_a_table_is_named_with_what_may_be_meant(
    shop: Database, pattern: str, what: str, remedy: str
) -> None:
    error = refusal(shop, tables=("public.customers", pattern))
    assert what in error.what
    assert "pgtide.toml: source.tables" in error.what
    assert remedy in error.remedy


def test_a_database_without_tables_says_so(database: Database) -> None:
    assert "no tables at all" in refusal(database).remedy


def test_excluding_everything_is_refused(shop: Database) -> None:
    assert "leaves no table" in refusal(shop, tables=("public.orders", "!public.*")).what


def test_a_partition_may_be_named_by_itself(shop: Database) -> None:
    shop.execute(
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE TABLE events_1 PARTITION OF events DEFAULT",
    )
    assert [table.name for table in facts(shop, tables=("public.events_1",)).tables] == ["events_1"]


def test_without_replication_privilege_the_statement_to_run_is_told(shop: Database) -> None:
    with role(shop) as name:
        error = refusal(shop, user=name)
        assert "REPLICATION" in error.what
        shop.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
        shop.execute(error.remedy.partition(": ")[2].partition(";")[0])
        assert "REPLICATION" not in refusal(shop, user=name).what


def test_without_select_the_grants_are_told_and_suffice(shop: Database) -> None:
    shop.execute("CREATE SCHEMA hidden", "CREATE TABLE hidden.t (id int PRIMARY KEY)")
    with role(shop, "REPLICATION") as name:
        shop.execute(f"GRANT SELECT ON customers TO {name}")
        error = refusal(shop, user=name, tables=("public.customers", "public.orders", "hidden.t"))
        assert '"public"."orders"' in error.what
        assert '"hidden"."t"' in error.what
        assert "customers" not in error.what
        shop.execute(*filter(str.strip, error.remedy.split(";")))
        assert "may not read" not in refusal(shop, user=name, tables=("public.orders", "hidden.t")).what


EVENTS: dict[str, Any] = {"tables": ("public.events",), "publication": "mine", "publication_mode": "existing"}


def test_leaf_partitions_must_be_readable_by_themselves_and_the_grants_are_told_and_suffice(events: Database) -> None:
    with role(events, "REPLICATION") as name:
        events.execute(f"GRANT SELECT ON events, events_high TO {name}")
        error = refusal(events, user=name, **EVENTS)
        assert error.what == f'role {name} may not read "parts"."low_1"'
        assert error.remedy == (
            f'GRANT USAGE ON SCHEMA "parts" TO "{name}"; GRANT SELECT ON TABLE "parts"."low_1" TO "{name}";'
        )
        events.execute(*filter(str.strip, error.remedy.split(";")))
        assert [table.name for table in facts(events, user=name, **EVENTS).tables] == ["events"]
        with events.connect(user=name) as connection, connection.transaction():  # as a load reads it
            connection.execute("LOCK TABLE ONLY parts.low_1 IN ACCESS SHARE MODE")
            assert connection.execute("SELECT id FROM ONLY parts.low_1").fetchall() == [(1,)]


def test_row_level_security_of_a_leaf_alone_is_refused(events: Database) -> None:
    events.execute("ALTER TABLE parts.low_1 ENABLE ROW LEVEL SECURITY")
    with role(events, "REPLICATION") as name:
        events.execute(
            f"GRANT USAGE ON SCHEMA parts TO {name}", f"GRANT SELECT ON events, events_high, parts.low_1 TO {name}"
        )
        error = refusal(events, user=name, **EVENTS)
    assert 'row-level security hides rows of "parts"."low_1"' in error.what


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        ("FOREIGN TABLE parts.low_2 PARTITION OF events_low FOR VALUES FROM (10) TO (20) SERVER archive", "a foreign"),
        ("UNLOGGED TABLE parts.low_2 PARTITION OF events_low FOR VALUES FROM (10) TO (20)", "an unlogged"),
    ],
)
def test_a_partition_whose_changes_nobody_sends_is_refused_until_it_is_detached(
    events: Database, leaf: str, kind: str
) -> None:
    events.execute(f"CREATE {leaf}")
    error = refusal(events, **EVENTS)
    assert f'the partition "parts"."low_2" of public.events is {kind} table' in error.what
    assert '"!public.events"' in error.remedy
    assert facts(events, tables=("public.orders",)).tables  # it is nobody else's trouble
    events.execute(error.remedy.partition(";")[0])
    assert facts(events, **EVENTS).tables


def test_an_unlogged_partition_that_is_made_permanent_is_taken(events: Database) -> None:
    events.execute("ALTER TABLE events_high SET UNLOGGED")
    error = refusal(events, **EVENTS)
    assert 'ALTER TABLE "public"."events_high" SET LOGGED;' in error.remedy
    events.execute('ALTER TABLE "public"."events_high" SET LOGGED')
    assert facts(events, **EVENTS).tables


def test_row_level_security_that_hides_rows_is_refused(shop: Database) -> None:
    shop.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
    with role(shop, "REPLICATION") as name:
        shop.execute(f"GRANT SELECT ON orders TO {name}")
        error = refusal(shop, user=name, tables=("public.orders",))
    assert "row-level security" in error.what
    assert "BYPASSRLS" in error.remedy


def test_tables_of_others_cannot_be_published_and_both_ways_out_are_told(shop: Database) -> None:
    with role(shop, "REPLICATION") as name:
        shop.execute(f"GRANT SELECT ON orders TO {name}", f'GRANT CREATE ON DATABASE "{shop.name}" TO {name}')
        error = refusal(shop, user=name, tables=("public.orders",))
        assert 'does not own "public"."orders"' in error.what
        assert f'GRANT "postgres" TO "{name}"' in error.remedy
        shop.execute(error.remedy.splitlines()[-1])
        assert facts(shop, user=name, tables=("public.orders",), publication_mode="existing").tables


def test_creating_a_publication_needs_create_on_the_database(shop: Database) -> None:
    with role(shop, "REPLICATION") as name:
        shop.execute(f"ALTER TABLE orders OWNER TO {name}")
        error = refusal(shop, user=name, tables=("public.orders",))
        assert f"may not create a publication in database {shop.name}" in error.what
        shop.execute(error.remedy.splitlines()[0])
        assert facts(shop, user=name, tables=("public.orders",)).tables
        shop.execute("ALTER TABLE orders OWNER TO postgres")


def test_a_publication_of_another_role_is_not_altered(shop: Database) -> None:
    with connect(shop.dsn, timeout_s=10) as connection:
        ensure_publication(connection, Source(dsn=""), facts(shop, tables=("public.customers",)).tables)
    with role(shop, "REPLICATION") as name:
        shop.execute(f"ALTER TABLE orders OWNER TO {name}")
        error = refusal(shop, user=name, tables=("public.orders",))
        assert 'does not own publication "pgtide"' in error.what
        shop.execute("ALTER TABLE orders OWNER TO postgres")


def test_wal_level_must_be_logical() -> None:
    with local.postgres(wal_level="replica") as server:
        database = create_database(server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        error = refusal(database)
    assert "wal_level is replica" in error.what
    assert "ALTER SYSTEM SET wal_level = logical" in error.remedy


def test_a_free_slot_and_a_free_wal_sender_are_needed() -> None:
    with local.postgres(max_replication_slots=1, max_wal_senders=1) as server:
        database = create_database(server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        with connect(database.dsn, replication=True, timeout_s=10):
            assert "max_wal_senders" in refusal(database).remedy
        database.execute("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
        error = refusal(database)
        assert "all 1 replication slots of the server are in use (other)" in error.what
        assert "max_replication_slots" in error.remedy
        (warning,) = facts(database, slot="other").warnings
        assert "all 1 replication slots of the server are in use, ours included" in warning
        assert error.remedy in warning
        assert facts(database, slot="other", read_from=database.dsn).warnings == (), "made on the standby"
        assert facts(database, slot="other").tables


def test_two_phase_needs_a_server_that_has_it(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with unchanged(shop):
        facts(shop, two_phase=True)
    monkeypatch.setattr("pgtide.replication.preflight._TWO_PHASE_SINCE", 170000)  # there is no server without it here
    error = refusal(shop, two_phase=True)
    assert "source.two_phase" in error.what
    assert "source.two_phase = false" in error.remedy

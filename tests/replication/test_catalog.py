"""Tables and shapes as the catalog tells them, against a real server and its own relation messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from pgtide.config import Source
from pgtide.errors import PgtideError
from pgtide.local import VERSIONS, LocalPostgres
from pgtide.replication.catalog import Catalog, TableInfo
from pgtide.replication.connect import connect
from pgtide.replication.publication import ensure_publication
from pgtide.schema import TableShape
from pgtide.types import PgType
from tests.database import Database, create_database, drop_database
from tests.replication.relation_messages import create_slot, relation_messages
from tests.replication.roles import role


@pytest.fixture
def catalog(database: Database) -> Iterator[Catalog]:
    with connect(database.dsn, timeout_s=10) as connection:
        yield Catalog(connection)


def info(catalog: Catalog, name: str) -> TableInfo:
    (found,) = catalog.tables([name])
    return found


def shape(catalog: Catalog, name: str) -> TableShape:
    return catalog.shape(info(catalog, name).oid)


def type_of(catalog: Catalog, column: str) -> PgType:
    (found,) = [c.type for c in shape(catalog, "public.t").columns if c.name == column]
    return found


def keys(shape: TableShape) -> list[str]:
    return [column.name for column in shape.key_columns]


def test_patterns_choose_tables_and_nothing_else(database: Database, catalog: Catalog) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE audit_log (id int PRIMARY KEY)",
        "CREATE VIEW order_view AS SELECT * FROM orders",
        "CREATE UNLOGGED TABLE cache (id int PRIMARY KEY)",
        "CREATE SCHEMA eu",
        'CREATE TABLE eu."We.ird ""name" (id int PRIMARY KEY)',
    )
    chosen = [table.qualified_name for table in catalog.tables(["*.*", "!public.audit_*"])]
    assert chosen == ['eu.We.ird "name', "public.orders"]


def test_a_partition_is_covered_by_its_root_and_stands_for_itself_without_it(
    database: Database, catalog: Catalog
) -> None:
    database.execute(
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id)",
        "CREATE TABLE events_1_a PARTITION OF events_1 FOR VALUES FROM (0) TO (5)",
    )
    assert [(t.name, t.relkind) for t in catalog.tables(["public.*"])] == [("events", "p")]
    assert [t.name for t in catalog.tables(["public.*", "!public.events"])] == ["events_1"]
    assert [t.name for t in catalog.tables(["public.events_1_a"])] == ["events_1_a"]


INDEXED = "t (a int NOT NULL); CREATE UNIQUE INDEX i ON t (a); ALTER TABLE t REPLICA IDENTITY USING INDEX i"


@pytest.mark.parametrize(
    ("table", "usable", "primary_key"),
    [
        ("t (a int, b int, PRIMARY KEY (b, a))", True, ("b", "a")),
        ("t (a int, b int, PRIMARY KEY (b) INCLUDE (a))", True, ("b",)),
        ("t (a int)", False, ()),
        ("t (a int PRIMARY KEY DEFERRABLE)", False, ()),
        ("t (a int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY NOTHING", False, ("a",)),
        ("t (a int); ALTER TABLE t REPLICA IDENTITY FULL", True, ()),
        (INDEXED, True, ()),
        (f"{INDEXED}; DROP INDEX i", False, ()),
        # The leaf's own identity decides whether its updates fail, not the root's.
        ("t (a int) PARTITION BY LIST (a); CREATE TABLE t1 PARTITION OF t DEFAULT; ALTER TABLE t REPLICA IDENTITY FULL",
         False, ()),
        ("t (a int PRIMARY KEY) PARTITION BY LIST (a); CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)", True, ("a",)),
    ],
)  # fmt: skip
def test_an_identity_is_usable_exactly_if_updates_of_the_published_table_work(
    database: Database, catalog: Catalog, table: str, usable: bool, primary_key: tuple[str, ...]
) -> None:
    database.execute(*f"CREATE TABLE {table}".split(";"), "CREATE PUBLICATION everything FOR ALL TABLES")
    database.execute("INSERT INTO t (a, b) VALUES (1, 1)" if "b int" in table else "INSERT INTO t (a) VALUES (1)")
    found = info(catalog, "public.t")
    assert (found.usable_identity, found.primary_key) == (usable, primary_key)
    if usable:
        database.execute("UPDATE t SET a = 1")
    else:
        with pytest.raises(Exception, match="does not have a replica identity"):
            database.execute("UPDATE t SET a = 1")


def test_rights_are_those_of_the_connected_role(database: Database) -> None:
    database.execute(
        "CREATE TABLE plain (id int PRIMARY KEY)",
        "CREATE TABLE by_column (id int PRIMARY KEY, x int)",
        "CREATE TABLE secret (id int PRIMARY KEY, x int)",
        "CREATE TABLE walled (id int PRIMARY KEY)",
        "ALTER TABLE walled ENABLE ROW LEVEL SECURITY",
    )
    with role(database) as name:
        database.execute(
            f"GRANT SELECT ON plain, walled TO {name}",
            f"GRANT SELECT (id, x) ON by_column TO {name}",
            f"GRANT SELECT (id) ON secret TO {name}",
        )
        with database.connect(user=name) as connection:
            assert connection.execute("SELECT * FROM by_column").fetchall() == []
            with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
                connection.execute("LOCK TABLE by_column IN ACCESS SHARE MODE")  # as a load does
        with connect(database.server.dsn_of(database.name, user=name), timeout_s=10) as connection:
            tables = {table.name: table for table in Catalog(connection).tables(["public.*"])}
    assert {name: table.readable for name, table in tables.items()} == {
        "plain": True, "by_column": False, "secret": False, "walled": True,
    }  # fmt: skip
    assert [name for name, table in tables.items() if table.hides_rows] == ["walled"]
    assert not any(table.owned for table in tables.values())
    assert {table.owner for table in tables.values()} == {"postgres"}


def test_types_are_resolved_to_the_last_field(database: Database, catalog: Catalog) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN price AS numeric(10, 2)",
        "CREATE DOMAIN grid AS int[][]",
        "CREATE TYPE address AS (street varchar(20), gone int, codes int[], mood mood)",
        "ALTER TYPE address DROP ATTRIBUTE gone",
        "CREATE TABLE t (n numeric(12, 3), a numeric(5, 1)[][], p price, g grid, c address, ca address[],"
        " r int4range, m nummultirange, e mood, v int2vector, i interval(3))",
    )
    numeric = 1700
    assert type_of(catalog, "n") == PgType(numeric, "numeric", typmod=(12 << 16 | 3) + 4)
    array = type_of(catalog, "a")
    assert (array.kind, array.name, array.dimensions) == ("array", "_numeric", 2)
    assert array.element == PgType(numeric, "numeric", typmod=(5 << 16 | 1) + 4)
    price = type_of(catalog, "p")
    assert (price.kind, price.name, price.element) == ("domain", "price", PgType(numeric, "numeric", typmod=655366))
    grid = type_of(catalog, "g").element
    assert grid is not None
    assert (grid.kind, grid.dimensions, grid.element) == ("array", 2, PgType(23, "int4"))
    composite = type_of(catalog, "c")
    assert [(name, field.name) for name, field in composite.fields] == [
        ("street", "varchar"), ("codes", "_int4"), ("mood", "mood"),
    ]  # fmt: skip
    assert composite.fields[0][1].typmod == 24
    assert composite.fields[2][1].kind == "enum"
    assert type_of(catalog, "ca").element == composite
    assert type_of(catalog, "r") == PgType(3904, "int4range", "range", element=PgType(23, "int4"))
    multirange = type_of(catalog, "m")
    assert multirange.kind == "multirange"
    assert multirange.element == PgType(3906, "numrange", "range", element=PgType(numeric, "numeric"))
    assert type_of(catalog, "v").kind == "base"


def test_a_type_that_was_altered_is_read_again(database: Database, catalog: Catalog) -> None:
    database.execute("CREATE TYPE pair AS (a int)", "CREATE TABLE t (p pair)")
    assert [name for name, _ in type_of(catalog, "p").fields] == ["a"]
    database.execute("ALTER TYPE pair ADD ATTRIBUTE b int")
    assert [name for name, _ in type_of(catalog, "p").fields] == ["a", "b"]


SHAPES = [
    "t (a int PRIMARY KEY, b text NOT NULL, c numeric(8, 2)[])",
    "t (a int, b int, c int, PRIMARY KEY (b, a))",
    "t (a int, b int PRIMARY KEY, c int); ALTER TABLE t REPLICA IDENTITY FULL",
    "t (a int, b int, c int); ALTER TABLE t REPLICA IDENTITY FULL",
    "t (a int, b int NOT NULL, c int); CREATE UNIQUE INDEX i ON t (b); ALTER TABLE t REPLICA IDENTITY USING INDEX i",
    "t (a int, b int, c int)",
    "t (x int, a int PRIMARY KEY, g int GENERATED ALWAYS AS (a * 2) STORED, b int, c int); ALTER TABLE t DROP COLUMN x",
    "t (a int PRIMARY KEY, b int, c int) PARTITION BY LIST (a); CREATE TABLE t1 PARTITION OF t DEFAULT",
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_catalogs_shape_is_the_streams_shape(version: int, server_of: Callable[[int], LocalPostgres]) -> None:
    for table in SHAPES:
        database = create_database(server_of(version))
        database.execute(*f"CREATE TABLE {table}".split(";"))
        with connect(database.dsn, timeout_s=10) as connection:
            catalog = Catalog(connection)
            publications = ensure_publication(connection, Source(dsn=""), catalog.tables(["public.*"]))
            create_slot(database, database.name)
            database.execute("INSERT INTO t (a, b, c) VALUES (1, 1, NULL)")
            messages = relation_messages(database, database.name, publications)
            (message,) = [message for message in messages if message.name == "t"]
            expected = catalog.shape_for(message)
            found = catalog.shape(message.relation_oid, publications)
            assert found == expected, table
            assert found.fingerprint == expected.fingerprint
            assert {"a", "b", "c"} <= {column.name for column in found.columns}
        drop_database(database)


def test_under_full_identity_the_primary_key_finds_rows(database: Database, catalog: Catalog) -> None:
    database.execute(
        "CREATE TABLE keyed (a int, b int PRIMARY KEY)",
        "CREATE TABLE bare (a int, b int)",
        "ALTER TABLE keyed REPLICA IDENTITY FULL",
        "ALTER TABLE bare REPLICA IDENTITY FULL",
    )
    assert keys(shape(catalog, "public.keyed")) == ["b"]
    assert keys(shape(catalog, "public.bare")) == []
    assert not info(catalog, "public.bare").has_key


def test_where_the_catalog_has_moved_on_the_message_counts(database: Database, catalog: Catalog) -> None:
    database.execute("CREATE TABLE t (a int PRIMARY KEY, b text, c int, d text)", "CREATE PUBLICATION p FOR TABLE t")
    create_slot(database, database.name)
    database.execute("INSERT INTO t VALUES (1, 'x', 2, 'y')")
    (message,) = relation_messages(database, database.name, ("p",))
    before = catalog.shape_for(message)
    database.execute(
        "ALTER TABLE t RENAME b TO renamed",
        "ALTER TABLE t DROP COLUMN c",
        "ALTER TABLE t ALTER d TYPE varchar(10)",
        "ALTER TABLE t ADD COLUMN c bigint",
    )
    after = catalog.shape_for(message)
    assert after.columns == before.columns
    assert [column.attnum for column in after.columns] == [1, 2, 3, 4]


def test_a_table_and_a_type_that_are_gone_still_have_a_shape(database: Database, catalog: Catalog) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE TABLE t (a int PRIMARY KEY, m mood)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    create_slot(database, database.name)
    database.execute("INSERT INTO t VALUES (1, 'sad')")
    (message,) = relation_messages(database, database.name, ("p",))
    database.execute("DROP TABLE t", "DROP TYPE mood")
    gone = catalog.shape_for(message)
    assert [(c.attnum, c.name, c.type.name, c.key) for c in gone.columns] == [
        (-1, "a", "int4", True),
        (-2, "m", "unknown", False),
    ]
    assert catalog.shape_for(replace(message)) == gone
    with pytest.raises(PgtideError, match="no table with oid"):
        catalog.shape(message.relation_oid)


def test_a_thousand_tables_take_a_handful_of_statements(
    database: Database, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        "CREATE TYPE address AS (street text, codes int[])",
        "DO $$ BEGIN FOR i IN 1..1000 LOOP EXECUTE format("
        "'CREATE TABLE t%s (id bigint PRIMARY KEY, a address, n numeric(8, 2)[])', i); END LOOP; END $$",
    )
    statements = []
    execute = psycopg.Cursor.execute

    def counted(cursor: psycopg.Cursor[Any], query: Any, *rest: Any, **options: Any) -> psycopg.Cursor[Any]:
        statements.append(query)
        return execute(cursor, query, *rest, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    shapes = catalog.shapes([table.oid for table in catalog.tables(["public.*"])])
    assert len(shapes) == 1000
    assert 0 < len(statements) <= 8

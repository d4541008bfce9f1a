"""Every type, in every form a server sends it, equals what SELECT prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa
import pytest

from pgtide import local
from pgtide.decode import decode_copy, needs_text
from pgtide.local import LocalPostgres
from pgtide.replication.catalog import Catalog
from pgtide.schema import TableShape
from pgtide.types.stored import stored_text
from tests.database import create_database, drop_database
from tests.decode.real_stream import Connection, copy_frames, create_slot, decode, read_slot
from tests.decode.type_cases import CASES, CASES_SINCE_17, TYPES

VERSIONS = [16, 18]
NAMES = {name: f"t{number}" for number, name in enumerate(CASES)}


@dataclass
class Seen:
    """What SELECT printed, and what came by each way: table → rows in the order of their ids."""

    selected: dict[str, list[str | None]]
    shapes: dict[str, TableShape]
    binary: dict[str, pa.RecordBatch]
    text: dict[str, pa.RecordBatch]
    copied: dict[str, pa.RecordBatch]


@pytest.fixture(scope="module", params=VERSIONS)
def seen(request: pytest.FixtureRequest, server: LocalPostgres) -> Iterator[Seen]:
    with ExitStack() as stack:
        if request.param != server.version:
            server = stack.enter_context(local.postgres(request.param))
        yield from _seen(server)


def _seen(server: LocalPostgres) -> Iterator[Seen]:
    database = create_database(server)
    with database.connect() as connection:
        for statement in TYPES:
            connection.execute(statement.encode())
        for name, table in NAMES.items():
            connection.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, v {name})".encode())
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        create_slot(connection, f"{database.name}_b")
        create_slot(connection, f"{database.name}_t")
        for name, table in NAMES.items():
            newer = CASES_SINCE_17.get(name, []) if server.version >= 17 else []
            for number, literal in enumerate([*CASES[name], *newer, None]):
                connection.execute(f"INSERT INTO {table} VALUES (%s, %s::{name})".encode(), [number, literal])
        result = Seen({}, {}, {}, {}, {})
        for form, slot, into in (("true", "b", result.binary), ("false", "t", result.text)):
            messages = read_slot(connection, f"{database.name}_{slot}", "p", binary=form)
            for table_rows in decode(connection, messages).tables:
                into[table_rows.shape.name] = table_rows.rows
                result.shapes[table_rows.shape.name] = table_rows.shape
        connection.execute("SET IntervalStyle = 'iso_8601'")
        for name, table in NAMES.items():
            result.selected[table] = selected(connection, f"SELECT v FROM {table} ORDER BY id")
            if name != "aclitem":
                frames = copy_frames(connection, f"SELECT id, v FROM {table} ORDER BY id")
                result.copied[table] = decode_copy(result.shapes[table], frames)
        assert set(result.shapes) == set(NAMES.values())
        assert Catalog(connection).tables(["public.*"])
    yield result
    drop_database(database)


def selected(connection: Connection, query: str) -> list[str | None]:
    """The first column as the server's output functions print it; a cast to text is another thing for some types."""
    result = connection.execute(query.encode()).pgresult
    assert result is not None
    values = [result.get_value(row, 0) for row in range(result.ntuples)]
    return [None if value is None else value.decode() for value in values]


def printed(shape: TableShape, rows: pa.RecordBatch) -> list[str | None]:
    """The column v as Postgres prints it; exact text counts where the storage type does not hold the value."""
    column = shape.columns[1]
    texts = rows.column("_text.c2").to_pylist() if "_text.c2" in rows.schema.names else [None] * rows.num_rows
    values = rows.column("c2").to_pylist()
    assert all(value is None or text is None for value, text in zip(values, texts, strict=True))
    return [
        text if value is None else stored_text(column.type, value) for value, text in zip(values, texts, strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["binary", "text", "copied"])
def test_values_equal_what_select_prints(seen: Seen, name: str, form: str) -> None:
    table = NAMES[name]
    if (name, form) == ("aclitem", "copied"):
        return  # COPY in binary is refused by the server
    rows = getattr(seen, form)[table]
    rows.validate(full=True)
    assert printed(seen.shapes[table], rows) == seen.selected[table]


@pytest.mark.parametrize("name", CASES)
def test_both_forms_give_the_same_columns(seen: Seen, name: str) -> None:
    table = NAMES[name]
    assert seen.binary[table].schema == seen.text[table].schema
    # By their representation, because NaN does not equal itself.
    assert repr(seen.binary[table].to_pylist()) == repr(seen.text[table].to_pylist())


def test_all_types_of_postgres_are_read_in_binary_form(seen: Seen) -> None:
    assert [shape.columns[1].type.name for shape in seen.shapes.values() if needs_text(shape.columns[1].type)] == []

"""Every type, in every form a server sends it, is what SELECT prints and what the simple decoder reads: on 15 to 18."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import pyarrow as pa
import pytest

from pgtide.decode import Decoder, Frames, RelationMessage, copied_as_text, decode_copy, needs_text
from pgtide.local import VERSIONS, LocalPostgres
from pgtide.replication.catalog import Catalog
from pgtide.schema import TableShape
from pgtide.types import PgType
from pgtide.types.stored import stored_text
from tests.compat.type_cases import cases_of, types_of
from tests.database import Database, create_database, drop_database
from tests.decode import reference_text
from tests.decode.real_stream import Connection, copy_frames, create_slot, read_slot
from tests.decode.reference import ReferenceDecoder

# How the stream is asked for, by the name that the slot's has at its end.
FORMS = {
    "binary": ("true", "postgres"),
    "text": ("false", "postgres"),
    "iso": ("false", "iso_8601"),
}
Texts = list[str | None]


@dataclass
class Seen:
    """What SELECT printed, and what came by each way: table → rows in the order of their ids."""

    tables: dict[str, str]  # by the name of the type
    selected: dict[str, Texts] = field(default_factory=dict)
    shapes: dict[str, TableShape] = field(default_factory=dict)
    decoded: dict[str, dict[str, pa.RecordBatch]] = field(default_factory=lambda: defaultdict(dict))
    reference: dict[str, dict[str, Texts]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


@pytest.fixture(scope="module")
def seen_on(server_of: Callable[[int], LocalPostgres]) -> Iterator[Callable[[int], Seen]]:
    """What was seen on a server of that version, which is looked at once."""
    databases: list[Database] = []

    @functools.cache
    def look(version: int) -> Seen:
        databases.append(create_database(server_of(version)))
        return _look(databases[-1], cases_of(version))

    yield look
    for database in databases:
        drop_database(database)


def _look(database: Database, cases: dict[str, list[str]]) -> Seen:
    version = database.server.version
    result = Seen({name: f"t{number}" for number, name in enumerate(cases)})
    with database.connect() as connection:
        for statement in types_of(version):
            connection.execute(statement.encode())
        for name, table in result.tables.items():
            connection.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, v {name})".encode())
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        for form in FORMS:
            create_slot(connection, f"{database.name}_{form}")
        with connection.transaction():
            for name, table in result.tables.items():
                insert = f"INSERT INTO {table} VALUES (%s, %s::{name})".encode()
                connection.cursor().executemany(insert, list(enumerate([*cases[name], None])))
        shape_of = functools.cache(Catalog(connection).shape_for)
        for form, (binary, interval_style) in FORMS.items():
            connection.execute(f"SET IntervalStyle = '{interval_style}'".encode())
            protocol = "4" if version >= 16 else "3"
            messages = read_slot(connection, f"{database.name}_{form}", "p", binary=binary, proto_version=protocol)
            _decode_both_ways(shape_of, messages, form, result)
        connection.execute("SET IntervalStyle = 'iso_8601'")
        for table in result.tables.values():
            result.selected[table] = selected(connection, f"SELECT v FROM {table} ORDER BY id")
            value = "v::text" if copied_as_text(result.shapes[table].columns[1].type) else "v"
            frames = copy_frames(connection, f"SELECT id, {value} FROM {table} ORDER BY id")
            result.decoded["copied"][table] = decode_copy(result.shapes[table], frames)
    return result


def _decode_both_ways(
    shape_of: Callable[[RelationMessage], TableShape], messages: list[bytes], form: str, result: Seen
) -> None:
    for rows in Decoder(shape_of).feed(Frames.from_messages(messages)).tables:
        result.decoded[form][rows.shape.name] = rows.rows
        result.shapes[rows.shape.name] = rows.shape
    reference = ReferenceDecoder(shape_of, printed_by_reference)
    for message in messages:
        reference.feed(message)
    names = {shape.fingerprint: name for name, shape in result.shapes.items()}
    for row in reference.result.rows:
        result.reference[form][names[row["table"]]].append(row["new"]["v"])


def printed_by_reference(pg_type: PgType, value: tuple[bytes, bytes]) -> str | None:
    kind, content = value
    assert kind != b"u"
    if kind == b"n":
        return None
    return reference_text.printed(pg_type, content) if kind == b"b" else content.decode()


def selected(connection: Connection, query: str) -> Texts:
    """The first column as the server's output functions print it; a cast to text is another thing for some types."""
    result = connection.execute(query.encode()).pgresult
    assert result is not None
    values = [result.get_value(row, 0) for row in range(result.ntuples)]
    return [None if value is None else value.decode() for value in values]


def printed(shape: TableShape, rows: pa.RecordBatch) -> Texts:
    """The column v as Postgres prints it; exact text counts where the storage type does not hold the value."""
    column = shape.columns[1]
    texts = rows.column("_text.c2").to_pylist() if "_text.c2" in rows.schema.names else [None] * rows.num_rows
    values = rows.column("c2").to_pylist()
    assert all(value is None or text is None for value, text in zip(values, texts, strict=True))
    return [
        text if value is None else stored_text(column.type, value) for value, text in zip(values, texts, strict=True)
    ]


def differences(found: Texts, expected: Texts) -> list[tuple[int, object, object]]:
    """Where they differ, cut short: a failure with a megabyte in it takes minutes to show."""
    pairs = enumerate(zip_longest(found, expected, fillvalue="(nothing)"))
    return [(place, f"{one}"[:200], f"{other}"[:200]) for place, (one, other) in pairs if one != other]


@pytest.mark.parametrize(("version", "name"), [(version, name) for version in VERSIONS for name in cases_of(version)])
def test_values_equal_what_select_prints_and_what_the_simple_decoder_reads(
    seen_on: Callable[[int], Seen], version: int, name: str
) -> None:
    seen = seen_on(version)
    table = seen.tables[name]
    expected = seen.selected[table]
    for form in (*FORMS, "copied"):
        rows = seen.decoded[form][table]
        rows.validate(full=True)
        assert differences(printed(seen.shapes[table], rows), expected) == [], form
    for form in ("binary", "iso"):
        assert differences(seen.reference[form][table], expected) == [], f"{form}, reference"


@pytest.mark.parametrize("version", VERSIONS)
def test_all_forms_give_the_same_columns(seen_on: Callable[[int], Seen], version: int) -> None:
    seen = seen_on(version)
    for name, table in seen.tables.items():
        first, *others = (seen.decoded[form][table] for form in FORMS)
        for other in others:
            assert first.schema == other.schema, name
            # By their representation, because NaN does not equal itself.
            assert differences([*map(repr, first.to_pylist())], [*map(repr, other.to_pylist())]) == [], name


@pytest.mark.parametrize("version", VERSIONS)
def test_all_types_are_read_in_binary_form_and_none_is_left_out(seen_on: Callable[[int], Seen], version: int) -> None:
    seen = seen_on(version)
    assert set(seen.shapes) == set(seen.tables.values())
    assert [shape.columns[1].type.name for shape in seen.shapes.values() if needs_text(shape.columns[1].type)] == []

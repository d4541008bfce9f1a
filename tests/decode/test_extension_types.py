"""Types of extensions that a bare server lacks: bytes and texts as Postgres 15 with contrib and PostGIS 3.3 sent and
printed them.  Contrib is also asked of real servers (`tests/compat/test_types.py`), PostGIS is too large to fetch.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pgtide.decode import Decoder, Frames, needs_text
from pgtide.errors import DecodeError
from pgtide.schema import Column, TableShape
from pgtide.types import PgType, storage_type
from pgtide.types.stored import stored_text
from tests.decode import wire

GEOMETRY = PgType(17000, "geometry")
HSTORE, LTREE, CITEXT = PgType(16385, "hstore"), PgType(16513, "ltree"), PgType(16698, "citext")
RECORDED: list[tuple[PgType, str, str]] = [
    (HSTORE, "00000000", ""),
    (HSTORE, "0000000100000001610000000131", '"a"=>"1"'),
    (HSTORE, "000000020000000161ffffffff00000003622063000000047122785c", '"a"=>NULL, "b c"=>"q\\"x\\\\"'),
    (HSTORE, "0000000100000002c3bc00000002c3b6", '"ü"=>"ö"'),
    (
        PgType(16390, "_hstore", "array", element=HSTORE),
        "00000001000000010000400100000002000000010000000e0000000100000001610000000131ffffffff",
        '{"\\"a\\"=>\\"1\\"",NULL}',
    ),
    (LTREE, "01", ""),
    (LTREE, "01612e622e63", "a.b.c"),
    (
        PgType(16516, "_ltree", "array", element=LTREE),
        "00000001000000000000408100000002000000010000000401612e62000000020163",
        "{a.b,c}",
    ),
    (PgType(16600, "lquery"), "012a2e617b312c327d2e627c63", "*.a{1,2}.b|c"),
    (PgType(16601, "ltxtquery"), "0161202620622a207c202163", "a & b* | !c"),
    (CITEXT, "416243", "AbC"),
    (
        PgType(16700, "_citext", "array", element=CITEXT),
        "00000001000000000000413a000000020000000100000001410000000162",
        "{A,b}",
    ),
    (
        PgType(16800, "cube"),
        "000000023ff0000000000000400000000000000040080000000000004010000000000000",
        "(1, 2),(3, 4)",
    ),
    (PgType(16800, "cube"), "800000023ff00000000000004000000000000000", "(1, 2)"),
    (PgType(16800, "cube"), "80000000", "()"),
    (PgType(142, "xml"), "3c613ec3bc3c2f613e", "<a>ü</a>"),
    # PostGIS: geometry_send gives EWKB, and its text is the same in hexadecimal.  POINT(1 2), SRID 4326.
    (
        GEOMETRY,
        "0101000020e6100000000000000000f03f0000000000000040",
        "0101000020E6100000000000000000F03F0000000000000040",
    ),
    (GEOMETRY, "0101000000000000000000f87f000000000000f87f", "0101000000000000000000F87F000000000000F87F"),
    (
        PgType(17001, "geography"),
        "0105000020e610000001000000010200000002000000a779c7293a2465400b462575025a46c0c66d3480b7fc6440c3d32b65195246c0",
        "0105000020E610000001000000010200000002000000A779C7293A2465400B462575025A46C0C66D3480B7FC6440C3D32B65195246C0",
    ),
    # Between geometries of an array stands a colon.
    (
        PgType(17002, "_geometry", "array", element=GEOMETRY),
        "000000010000000100004006000000020000000100000009010700000000000000ffffffff",
        "{010700000000000000:NULL}",
    ),
]
WITHOUT_BINARY = {"seg": "1 .. 2", "isbn13": "978-0-11-000533-1", "query_int": "1 & ( 2 | !3 )"}


def decoded(pg_type: PgType, *values: wire.Value) -> pa.RecordBatch:
    table = wire.WireTable(9, "t", "d", (wire.WireColumn("v", pg_type, False),))
    shape = TableShape(9, "public", "t", "d", (Column(1, "v", pg_type),))
    messages = [wire.relation(table), *(wire.insert(9, [value]) for value in values)]
    feed = Decoder(lambda _: shape).feed(Frames.from_messages([wire.xlog_data(message) for message in messages]))
    return feed.tables[0].rows


@pytest.mark.parametrize(("pg_type", "binary", "text"), RECORDED, ids=[f"{t.name} {x}" for t, _, x in RECORDED])
def test_both_forms_give_the_value_that_prints_as_recorded(pg_type: PgType, binary: str, text: str) -> None:
    rows = decoded(pg_type, (b"b", bytes.fromhex(binary)), (b"t", text.encode()), wire.NULL)
    first, second, third = rows.column("c1").to_pylist()
    assert first == second
    assert third is None
    assert stored_text(pg_type, first) == text
    assert rows.schema.field("c1").type == storage_type(pg_type)


def test_geometry_is_stored_as_ewkb_bytes() -> None:
    pg_type, binary, _ = next(recorded for recorded in RECORDED if recorded[0] == GEOMETRY)
    assert decoded(pg_type, (b"b", bytes.fromhex(binary))).column("c1").to_pylist() == [bytes.fromhex(binary)]


@pytest.mark.parametrize("name", WITHOUT_BINARY)
def test_types_without_binary_output_come_as_text_but_not_inside_of_others(name: str) -> None:
    pg_type = PgType(18000, name)
    assert decoded(pg_type, (b"t", WITHOUT_BINARY[name].encode())).column("c1").to_pylist() == [WITHOUT_BINARY[name]]
    assert not needs_text(pg_type)
    assert not needs_text(PgType(18001, "a_domain", "domain", element=pg_type))
    assert needs_text(PgType(18002, f"_{name}", "array", element=pg_type))
    assert needs_text(PgType(18003, "pair", "composite", fields=(("a", PgType(25, "text")), ("b", pg_type))))


def test_unknown_type_is_read_as_text_and_refused_in_binary_with_the_remedy() -> None:
    unknown: Any = PgType(19000, "complex_number")
    assert needs_text(unknown)
    assert needs_text(PgType(19001, "_complex_number", "array", element=unknown))
    assert decoded(unknown, (b"t", b"(1,2)"), wire.NULL).column("c1").to_pylist() == ["(1,2)", None]
    with pytest.raises(DecodeError, match=r"public\.t, column v \(complex_number\)") as refused:
        decoded(unknown, (b"b", b"\1\2"))
    assert "Restart without binary" in refused.value.remedy

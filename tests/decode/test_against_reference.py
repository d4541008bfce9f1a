"""The columnar decoder says the same as the simple one, about any stream, however it is cut into feeds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtide.change import Op
from pgtide.decode import Decoded, Decoder, Frames, RelationMessage
from pgtide.schema import Column, TableShape
from tests.decode import wire
from tests.decode.random_streams import TYPES, streams
from tests.decode.reference import ReferenceDecoder, Result

BY_OID_AND_TYPMOD = {(pg_type.oid, pg_type.typmod): pg_type for pg_type in TYPES}


def shape_of(message: RelationMessage) -> TableShape:
    columns = [
        Column(place + 1, column.name, BY_OID_AND_TYPMOD[column.type_oid, column.typmod], column.key)
        for place, column in enumerate(message.columns)
    ]
    return TableShape(message.relation_oid, message.namespace, message.name, message.replica_identity, tuple(columns))


def table_rows(shape: TableShape, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a batch in the reference's words."""
    result = []
    for row in rows:
        flags = int.from_bytes(row.get("_unchanged", b""), "little")
        old = {
            column.name: (row[f"_old.{column.storage_name}"], row.get(f"_old._text.{column.storage_name}"))
            for column in shape.columns
            if f"_old.{column.storage_name}" in row
        }
        result.append(
            {
                "table": "messages" if shape.relation_oid == 0 else shape.fingerprint,
                "op": row["_op"],
                "change": row["_change"],
                "subxid": row["_subxid"],
                "unchanged": {column.name for bit, column in enumerate(shape.columns) if flags >> bit & 1},
                "image": row.get("_old", 0),
                "new": {
                    column.name: (row[column.storage_name], row.get(f"_text.{column.storage_name}"))
                    for column in shape.columns
                },
                "old": old if row["_op"] == Op.UPDATE and row.get("_old") else None,
            }
        )
    return result


def collect(feeds: list[Decoded]) -> Result:
    result = Result()
    for feed in feeds:
        assert feed.first_change == result.changes
        for table in feed.tables:
            table.rows.validate(full=True)
            numbers = table.rows.column("_change").to_pylist()
            assert numbers == sorted(numbers)
            result.rows += table_rows(table.shape, table.rows.to_pylist())
        base = len(result.controls)
        result.origins |= {base + place: name for place, name in feed.origins.items()}
        result.gids |= {base + place: gid for place, gid in feed.gids.items()}
        result.controls += feed.controls.tolist()
        result.changes += feed.changes
        result.wal_end = max(result.wal_end, feed.wal_end)
    result.rows.sort(key=lambda row: int(row["change"]))
    return result


def same_rows(columnar: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert [row["change"] for row in columnar] == list(range(len(columnar)))
    assert len(columnar) == len(reference)
    for got, expected in zip(columnar, reference, strict=True):
        if expected["old"] is not None and got["old"] != expected["old"]:
            # A batch has the columns of its widest old image; those that this row's image lacks are null.
            extra = {name: value for name, value in got["old"].items() if name not in expected["old"]}
            assert set(extra.values()) <= {(None, None)}
            got = got | {"old": {name: got["old"][name] for name in expected["old"]}}
        assert got == expected


@settings(max_examples=150)
@given(streams(), st.data())
def test_columnar_decoder_equals_reference_for_any_stream_and_any_cuts(
    messages: list[bytes], data: st.DataObject
) -> None:
    reference = ReferenceDecoder(shape_of)
    for message in messages:
        reference.feed(message)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(messages)), max_size=4)))
    bounds = [0, *cuts, len(messages)]
    decoder = Decoder(shape_of)
    pieces = [messages[first:last] for first, last in itertools.pairwise(bounds)]
    result = collect([decoder.feed(Frames.from_messages(piece)) for piece in pieces])
    same_rows(result.rows, reference.result.rows)
    assert result.controls == reference.result.controls
    assert (result.origins, result.gids) == (reference.result.origins, reference.result.gids)
    assert (result.changes, result.wal_end) == (reference.result.changes, reference.result.wal_end)


def test_frames_may_lie_anywhere_in_a_buffer_that_is_used_again() -> None:
    table = wire.WireTable(1, "t", "d", (wire.WireColumn("a", TYPES[1], True), wire.WireColumn("b", TYPES[5], False)))
    messages = [
        wire.xlog_data(wire.relation(table)),
        wire.xlog_data(wire.insert(1, [(b"b", b"\0\0\0\7"), (b"b", "größe".encode())])),
    ]
    buffer, starts, ends = bytearray(b"d\0\0\0\0"), [], []
    for message in messages:
        starts.append(len(buffer))
        buffer += message
        ends.append(len(buffer))
        buffer += b"d\0\0\0\0"
    buffer += bytes(64)
    decoded = Decoder(shape_of).feed(Frames(buffer, np.array(starts, np.int64), np.array(ends, np.int64)))
    buffer[:] = b"\xff" * len(buffer)
    assert decoded.tables[0].rows.select(["c1", "c2"]).to_pylist() == [{"c1": 7, "c2": "größe"}]

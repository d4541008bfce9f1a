"""Bytes that no server sends give one clear error, whatever they are: no crash, no hang, no other exception."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from pgtide.decode import Decoder, Frames, decode_copy
from pgtide.errors import DecodeError
from pgtide.local import LocalPostgres
from pgtide.schema import TableShape
from tests.database import create_database, drop_database
from tests.decode import wire
from tests.decode.random_streams import TYPES as WIRE_TYPES
from tests.decode.real_stream import copy_frames, create_slot, decode, read_slot
from tests.decode.test_against_reference import shape_of
from tests.decode.type_cases import CASES, TYPES

HEADER_BYTES = 25
MUTATIONS_PER_TABLE = 60

TABLE = wire.WireTable(
    7, "t", "d", (wire.WireColumn("a", WIRE_TYPES[1], True), wire.WireColumn("b", WIRE_TYPES[5], False))
)
ROW: list[wire.Value] = [(b"b", b"\0\0\0\7"), (b"b", b"text")]


@pytest.fixture(scope="module")
def real_messages(server: LocalPostgres) -> Iterator[dict[TableShape, list[bytes]]]:
    """Relation and row messages of a table for every type, as a server sent them, in both forms."""
    database = create_database(server)
    found: dict[TableShape, list[bytes]] = {}
    with database.connect() as connection:
        for statement in TYPES:
            connection.execute(statement.encode())
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        for number, (name, literals) in enumerate(CASES.items()):
            connection.execute(f"CREATE TABLE t{number} (id integer PRIMARY KEY, v {name})".encode())
            short = [literal for literal in literals if len(literal) < 200]
            create_slot(connection, f"{database.name}_b")
            create_slot(connection, f"{database.name}_t")
            for place, literal in enumerate([*short, None]):
                connection.execute(f"INSERT INTO t{number} VALUES (%s, %s::{name})".encode(), [place, literal])
            for slot, binary in (("b", "true"), ("t", "false")):
                messages = read_slot(connection, f"{database.name}_{slot}", "p", binary=binary)
                shape = decode(connection, messages).tables[0].shape
                kept = [message for message in messages if message[HEADER_BYTES : HEADER_BYTES + 1] in (b"R", b"I")]
                found.setdefault(shape, []).extend(kept)
                connection.execute("SELECT pg_drop_replication_slot(%s)", [f"{database.name}_{slot}"])
    yield found
    drop_database(database)


def mutated(rng: random.Random, message: bytes) -> bytes:
    """A message with one thing wrong behind its header; by chance it may still be a good one."""
    data = bytearray(message[HEADER_BYTES:])
    at = rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            del data[at:]
        case 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2:
            data[at : at + 4] = struct.pack(">i", rng.choice([-1, -2, 0, 1, 2**31 - 1, -(2**31), 65536, len(data)]))
        case 3:
            data += rng.randbytes(rng.randrange(1, 9))
        case 4:
            data[at : at + 8] = rng.randbytes(8)
        case _:
            data[at:at] = rng.randbytes(rng.randrange(1, 5))
    return message[:HEADER_BYTES] + bytes(data or b"I")


def test_rows_with_one_thing_wrong_are_decoded_or_refused(real_messages: dict[TableShape, list[bytes]]) -> None:
    rng = random.Random(4)
    refused = 0
    for shape, messages in real_messages.items():
        relation = next(message for message in messages if message[HEADER_BYTES : HEADER_BYTES + 1] == b"R")
        rows = [message for message in messages if message[HEADER_BYTES : HEADER_BYTES + 1] == b"I"]
        for _ in range(MUTATIONS_PER_TABLE):
            chosen = rng.randrange(len(rows))
            feed = [relation, *rows[:chosen], mutated(rng, rows[chosen]), *rows[chosen + 1 :]]
            try:
                decoded = Decoder(lambda _, shape=shape: shape).feed(Frames.from_messages(feed))  # type: ignore[misc]
                for table in decoded.tables:
                    table.rows.validate(full=True)
            except DecodeError:
                refused += 1
    assert refused > 0.5 * MUTATIONS_PER_TABLE * len(real_messages)


def test_copied_tuples_with_one_thing_wrong_are_decoded_or_refused(server: LocalPostgres) -> None:
    rng = random.Random(5)
    columns = ", ".join(
        f"v{number} {name}" for number, name in enumerate(("int4", "text", "numeric", "int4[]", "uuid", "interval"))
    )
    database = create_database(server)
    with database.connect() as connection:
        connection.execute(f"CREATE TABLE t ({columns})".encode())
        connection.execute("INSERT INTO t VALUES (1, 'a', 1.5, '{1,NULL}', gen_random_uuid(), '1 day')")
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        create_slot(connection, f"{database.name}_c")
        connection.execute("INSERT INTO t SELECT * FROM t")
        shape = decode(connection, read_slot(connection, f"{database.name}_c", "p")).tables[0].shape
        frames = copy_frames(connection, "SELECT * FROM t")
    drop_database(database)
    whole = bytes(frames.buffer[int(frames.starts[0]) : int(frames.ends[0])])
    assert decode_copy(shape, frames).num_rows == 2
    padded = bytes(HEADER_BYTES) + whole
    for _ in range(500):
        broken = mutated(rng, padded)[HEADER_BYTES:]
        try:
            decode_copy(shape, Frames.from_messages([whole, broken])).validate(full=True)
        except DecodeError:
            continue


def test_random_bytes_give_rows_or_one_clear_error() -> None:
    rng = random.Random(6)
    refused = 0
    for _ in range(2000):
        message = rng.choice([b"w", b"k", b"", b"w" + bytes(24)]) + rng.randbytes(rng.randrange(0, 60))
        decoder = Decoder(shape_of)
        decoder.feed(Frames.from_messages([wire.xlog_data(wire.relation(TABLE))]))
        try:
            decoder.feed(Frames.from_messages([message]))
        except DecodeError:
            refused += 1
    assert 1000 < refused <= 2000, "most random bytes are no message at all"


GOOD: dict[str, bytes] = {
    "B": wire.begin(1, 2, 3),
    "C": wire.commit(1, 2),
    "O": wire.origin(1, "o"),
    "R": wire.relation(TABLE),
    "I": wire.insert(7, ROW),
    "U": wire.update(7, ROW, ROW, b"O"),
    "D": wire.delete(7, ROW, b"K"),
    "T": wire.truncate([7, 7]),
    "M": wire.logical_message(True, 1, "p", b"content"),
    "S": wire.stream_start(5, True),
    "c": wire.stream_commit(5, 1, 2),
    "A": wire.stream_abort(5, 6, (1, 2)),
    "b": wire.begin_prepare(1, 2, 3, "g"),
    "P": wire.prepare(b"P", 1, 2, 3, "g"),
    "K": wire.prepare(b"K", 1, 2, 3, "g"),
    "r": wire.rollback_prepared(1, 2, 3, "g"),
    "p": wire.prepare(b"p", 1, 2, 3, "g"),
}


def feed_after_relation(message: bytes) -> None:
    decoder = Decoder(shape_of)
    decoder.feed(Frames.from_messages([wire.xlog_data(wire.relation(TABLE))]))
    decoder.feed(Frames.from_messages([message]))


@pytest.mark.parametrize("kind", GOOD)
def test_every_truncation_of_a_message_is_refused(kind: str) -> None:
    whole = wire.xlog_data(GOOD[kind])
    feed_after_relation(whole)
    for length in range(len(whole)):
        if kind == "A" and length == HEADER_BYTES + 9:
            continue  # an abort without LSN and time is a good one
        with pytest.raises(DecodeError):
            feed_after_relation(whole[:length])


@pytest.mark.parametrize("kind", [kind for kind in GOOD if kind not in "ObPKrp"])
def test_a_message_with_bytes_left_over_is_refused(kind: str) -> None:
    with pytest.raises(DecodeError):
        feed_after_relation(wire.xlog_data(GOOD[kind] + b"\0"))


@pytest.mark.parametrize("kind", sorted(set(range(256)) - {ord(kind) for kind in "BCORYIUDTMSEcAbPKrp"}))
def test_unknown_kinds_are_named(kind: int) -> None:
    with pytest.raises(DecodeError, match=rf"unknown kind.*\({kind}\)"):
        feed_after_relation(wire.xlog_data(bytes([kind]) + bytes(50)))


def refusals() -> dict[str, tuple[Callable[[], bytes], str]]:
    huge = struct.pack(">iiIii", 1, 0, 23, 2**31 - 1, 1)
    return {
        "unknown relation": (lambda: wire.insert(99, ROW), "oid 99 came before its description"),
        "unknown truncated relation": (lambda: wire.truncate([99]), "oid 99 came before"),
        "other column count": (lambda: wire.insert(7, ROW[:1]), "2 columns"),
        "wrong width": (lambda: wire.insert(7, [(b"b", b"\0\7"), ROW[1]]), r"public\.t, column a \(int4\)"),
        "invalid UTF-8": (lambda: wire.insert(7, [ROW[0], (b"b", b"\xff\xfe")]), r"column b \(text\).*UTF-8"),
        "value of unknown kind": (lambda: wire.insert(7, [(b"z", b""), ROW[1]]), "unknown kind"),
        "not a number": (lambda: wire.insert(7, [(b"t", b"1x"), ROW[1]]), r"column a \(int4\)"),
        "huge array": (lambda: wire.insert(7, [(b"b", huge), ROW[1]]), "column a"),
    }


@pytest.mark.parametrize("name", refusals())
def test_errors_name_what_is_wrong(name: str) -> None:
    make, message = refusals()[name]
    with pytest.raises(DecodeError, match=message):
        feed_after_relation(wire.xlog_data(make()))


def test_an_array_that_claims_billions_of_elements_costs_no_memory() -> None:
    table = wire.WireTable(7, "t", "d", (wire.WireColumn("a", WIRE_TYPES[-1], False),))
    decoder = Decoder(shape_of)
    decoder.feed(Frames.from_messages([wire.xlog_data(wire.relation(table))]))
    claim = struct.pack(">iiIii", 1, 0, 23, 2**31 - 1, 1)
    frames = Frames.from_messages([wire.xlog_data(wire.insert(7, [(b"b", claim)]))])
    before = pa.total_allocated_bytes()
    with pytest.raises(DecodeError, match="more elements than bytes"):
        decoder.feed(frames)
    assert pa.total_allocated_bytes() - before < 2**20

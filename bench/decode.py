"""What decoding costs: rows per second and CPU per row, for rows of 10 columns, in large and in tiny feeds.

    python bench/decode.py [--rows 200000] [--json]

The input is made here, message by message as a server sends it.  `feed` is the time of `Decoder.feed` for
frames that are laid out already (finding frames belongs to whoever reads the socket); CPU time of the
process, best of several rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from decimal import Decimal

from pgtide.decode import Decoder, Frames, RelationMessage
from pgtide.schema import Column, TableShape
from pgtide.types import PgType

COLUMNS = (
    ("id", PgType(20, "int8"), True),
    ("customer", PgType(23, "int4"), False),
    ("name", PgType(25, "text"), False),
    ("email", PgType(1043, "varchar", typmod=104), False),
    ("amount", PgType(1700, "numeric", typmod=(12 << 16 | 2) + 4), False),
    ("created_at", PgType(1184, "timestamptz"), False),
    ("active", PgType(16, "bool"), False),
    ("score", PgType(701, "float8"), False),
    ("token", PgType(2950, "uuid"), False),
    ("day", PgType(1082, "date"), False),
)
TABLES = (16384, 16390, 16396)


@dataclass(frozen=True)
class Result:
    name: str
    rows: int
    feeds: int
    rows_per_second: int
    cpu_us_per_row: float
    us_per_feed: float


def shape_of(message: RelationMessage) -> TableShape:
    columns = tuple(Column(place + 1, name, pg_type, key) for place, (name, pg_type, key) in enumerate(COLUMNS))
    return TableShape(message.relation_oid, message.namespace, message.name, message.replica_identity, columns)


def xlog_data(message: bytes) -> bytes:
    return b"w" + struct.pack(">QQq", 1, 1, 0) + message


def relation(oid: int) -> bytes:
    head = b"R" + struct.pack(">I", oid) + b"public\0table_%d\0" % oid + b"d" + struct.pack(">H", len(COLUMNS))
    return head + b"".join(
        bytes([key]) + name.encode() + b"\0" + struct.pack(">Ii", pg_type.oid, pg_type.typmod)
        for name, pg_type, key in COLUMNS
    )


def numeric(value: Decimal) -> bytes:
    cents = int(value * 100)
    groups: list[int] = []
    for group in (cents // 10**10, cents // 10**6 % 10**4, cents // 100 % 10**4, cents % 100 * 100):
        if groups or group:
            groups.append(group)
    weight = len(groups) - 2
    while groups and groups[-1] == 0:
        groups.pop()
    return struct.pack(f">HhHH{len(groups)}H", len(groups), weight, 0, 2, *groups)


def values(rng: random.Random, number: int, binary: bool) -> list[bytes]:
    amount = Decimal(rng.randrange(10**9)) / 100
    token = uuid.UUID(int=rng.getrandbits(128))
    name, email = f"customer number {number}".encode(), f"user{number}@example.com".encode()
    if binary:
        return [
            struct.pack(">q", number), struct.pack(">i", number % 1000), name, email, numeric(amount),
            struct.pack(">q", 7 * 10**14 + number), b"\x01", struct.pack(">d", number / 7), token.bytes,
            struct.pack(">i", 9000 + number % 365),
        ]  # fmt: skip
    return [
        b"%d" % number, b"%d" % (number % 1000), name, email, f"{amount:.2f}".encode(),
        b"2024-05-17 12:34:56.%06d+00" % (number % 10**6), b"t", repr(number / 7).encode(), str(token).encode(),
        b"2024-05-%02d" % (1 + number % 28),
    ]  # fmt: skip


def row(kind: bytes, oid: int, fields: list[bytes], binary: bool) -> bytes:
    tag = b"b" if binary else b"t"
    if kind == b"D":
        head, fields = b"K", [fields[0]]
    else:
        head = b"N"
    tuple_data = b"".join(tag + struct.pack(">I", len(value)) + value for value in fields)
    nulls = b"n" * (len(COLUMNS) - len(fields))
    return kind + struct.pack(">I", oid) + head + struct.pack(">H", len(COLUMNS)) + tuple_data + nulls


def stream(rows: int, per_transaction: int, *, binary: bool, interleaved: bool) -> list[bytes]:
    rng = random.Random(7)
    messages = []
    for number in range(rows):
        if number % per_transaction == 0:
            messages.append(b"B" + struct.pack(">QqI", number, 7 * 10**14, number))
        oid = rng.choice(TABLES) if interleaved else TABLES[0]
        kind = rng.choice((b"I", b"I", b"U", b"D")) if interleaved else b"I"
        messages.append(row(kind, oid, values(rng, number, binary), binary))
        if (number + 1) % per_transaction == 0:
            messages.append(b"C" + struct.pack(">BQQq", 0, number, number + 1, 7 * 10**14))
    return [xlog_data(message) for message in messages]


def ready_decoder() -> Decoder:
    decoder = Decoder(shape_of)
    decoder.feed(Frames.from_messages([xlog_data(relation(oid)) for oid in TABLES]))
    return decoder


def measure(name: str, messages: list[bytes], rows: int, feed_messages: int, rounds: int = 5) -> Result:
    frames = [
        Frames.from_messages(messages[first : first + feed_messages])
        for first in range(0, len(messages), feed_messages)
    ]
    frames = frames[:20_000]
    fed = min(len(messages), feed_messages * len(frames))
    rows = rows * fed // len(messages)

    def once() -> None:
        decoder = ready_decoder()
        for some in frames:
            decoder.feed(some)

    cpu = best_of(once, rounds)
    return Result(
        name, rows, len(frames), round(rows / cpu), round(cpu / rows * 1e6, 3), round(cpu / len(frames) * 1e6, 1)
    )


def best_of(action: Callable[[], None], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        before = time.process_time()
        action()
        best = min(best, time.process_time() - before)
    return best


def run(rows: int) -> list[Result]:
    results = []
    for binary in (True, False):
        form = "binary" if binary else "text"
        large = stream(rows, 1000, binary=binary, interleaved=False)
        single = stream(rows, 1, binary=binary, interleaved=False)
        mixed = stream(rows, 1000, binary=binary, interleaved=True)
        results += [
            measure(f"{form}, transactions of 1,000 rows, feeds of 4,000 messages", large, rows, 4000),
            measure(f"{form}, transactions of 1 row, feeds of 4,000 messages", single, rows, 4000),
            measure(f"{form}, three tables and kinds interleaved, feeds of 4,000 messages", mixed, rows, 4000),
            measure(f"{form}, transactions of 1 row, feeds of one transaction", single[:6000], 2000, 3),
            measure(f"{form}, transactions of 1 row, feeds of five transactions", single[:15000], 5000, 15),
        ]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = run(arguments.rows)
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    for result in results:
        cost = f"{result.cpu_us_per_row:8.3f} µs/row {result.us_per_feed:10.1f} µs/feed"
        print(f"{cost} {result.rows_per_second:>10,} rows/s  {result.name}")


if __name__ == "__main__":
    main()

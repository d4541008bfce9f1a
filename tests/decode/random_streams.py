"""Random streams: tables, values, transactions of all sorts, as bytes."""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import strategies as st

from pgtide.types import PgType
from tests.decode import wire
from tests.decode.reference import FAR_DATES, FAR_TIMES, day, instant
from tests.decode.wire import NULL, UNCHANGED, Value, WireColumn, WireTable

INT4 = PgType(23, "int4")
TYPES = [
    PgType(21, "int2"), INT4, PgType(20, "int8"), PgType(701, "float8"), PgType(16, "bool"), PgType(25, "text"),
    PgType(17, "bytea"), PgType(1700, "numeric", typmod=(12 << 16 | 2) + 4), PgType(1700, "numeric"),
    PgType(1700, "numeric", typmod=(38 << 16 | 10) + 4), PgType(1082, "date"), PgType(1184, "timestamptz"),
    PgType(2950, "uuid"), PgType(3802, "jsonb"), PgType(1007, "_int4", "array", element=INT4),
]  # fmt: skip
Both = tuple[bytes, bytes]  # binary form, text form


def numeric_both(value: Decimal, scale: int) -> Both:
    if value.is_nan():
        return struct.pack(">HhHH", 0, 0, 0xC000, 0), b"NaN"
    printed = f"{value:.{scale}f}"
    whole, _, fraction = printed.lstrip("-").partition(".")
    whole = whole.zfill(-(-len(whole) // 4) * 4)
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    digits = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while digits and digits[0] == 0:
        digits.pop(0)
        weight -= 1
    while digits and digits[-1] == 0:
        digits.pop()
    if not digits:
        weight, printed = 0, printed.lstrip("-")
    sign = 0x4000 if printed.startswith("-") else 0
    return struct.pack(f">HhHH{len(digits)}H", len(digits), weight, sign, scale, *digits), printed.encode()


def array_both(elements: list[int | None], lower: int) -> Both:
    if not elements:
        return struct.pack(">iiI", 0, 0, 23), b"{}"
    raw = struct.pack(">iiIii", 1, None in elements, 23, len(elements), lower)
    for element in elements:
        raw += struct.pack(">i", -1) if element is None else struct.pack(">ii", 4, element)
    inner = ",".join("NULL" if element is None else str(element) for element in elements)
    bounds = "" if lower == 1 else f"[{lower}:{lower + len(elements) - 1}]="
    return raw, f"{bounds}{{{inner}}}".encode()


def timestamp_text(number: int) -> bytes:
    whole = instant(number)
    fraction = f".{whole.microsecond:06d}".rstrip("0") if whole.microsecond else ""
    return f"{whole.replace(microsecond=0, tzinfo=None).isoformat(' ')}{fraction}+00".encode()


def _integers(layout: str, bits: int) -> st.SearchStrategy[Both]:
    numbers = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return numbers.map(lambda number: (struct.pack(layout, number), str(number).encode()))


def _decimals(digits: int, scale: int) -> st.SearchStrategy[Both]:
    finite = st.integers(-(10**digits) + 1, 10**digits - 1).map(lambda number: Decimal(f"{number}e-{scale}"))
    return st.one_of(finite, st.just(Decimal("NaN"))).map(lambda value: numeric_both(value, scale))


def _texts(strings: st.SearchStrategy[str], header: bytes = b"") -> st.SearchStrategy[Both]:
    return strings.map(lambda string: (header + string.encode(), string.encode()))


def _far(values: dict[int, str], layout: str) -> st.SearchStrategy[Both]:
    return st.sampled_from(sorted(values.items())).map(lambda item: (struct.pack(layout, item[0]), item[1].encode()))


def both_forms(pg_type: PgType) -> st.SearchStrategy[Both]:
    """A value of the type in both forms, as a server would send it."""
    if pg_type.kind == "array":
        numbers = st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1))
        return st.builds(array_both, st.lists(numbers, max_size=5), st.sampled_from([1, 1, 1, 0]))
    if pg_type.name == "numeric":
        if pg_type.typmod < 4:
            scaled = st.integers(0, 25).flatmap(lambda scale: _decimals(40, scale))
            return st.one_of(scaled, st.integers(0, 8).flatmap(lambda scale: _decimals(9, scale)))
        return _decimals(12, 2) if pg_type.typmod >> 16 == 12 else _decimals(38, 10)
    last_us = int((datetime(9999, 12, 31, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    first_us = int((datetime(1, 1, 1, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    days = st.integers(-730_119, 2_921_939).map(lambda n: (struct.pack(">i", n), day(n).isoformat().encode()))
    instants = st.integers(first_us, last_us).map(lambda n: (struct.pack(">q", n), timestamp_text(n)))
    strategies: dict[str, st.SearchStrategy[Both]] = {
        "int2": _integers(">h", 16),
        "int4": _integers(">i", 32),
        "int8": _integers(">q", 64),
        "float8": st.floats(allow_nan=False).map(lambda x: (struct.pack(">d", x), repr(x).encode())),
        "bool": st.booleans().map(lambda flag: (bytes([flag]), b"t" if flag else b"f")),
        "text": _texts(st.text(max_size=20)),
        "jsonb": _texts(st.sampled_from(["{}", '{"a": 1}', "null"]), b"\1"),
        "bytea": st.binary(max_size=12).map(lambda raw: (raw, b"\\x" + raw.hex().encode())),
        "uuid": st.uuids().map(lambda value: (value.bytes, str(uuid.UUID(bytes=value.bytes)).encode())),
        "date": st.one_of(days, days, _far(FAR_DATES, ">i")),
        "timestamptz": st.one_of(instants, instants, _far(FAR_TIMES, ">q")),
    }
    return strategies[pg_type.name]


@st.composite
def tables(draw: st.DrawFn, oid: int) -> WireTable:
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=9))
    identity = draw(st.sampled_from("dfin"))
    keys = draw(st.lists(st.booleans(), min_size=len(types), max_size=len(types)))
    columns = [
        WireColumn(f"col {place}", pg_type, key or identity == "f")
        for place, (pg_type, key) in enumerate(zip(types, keys, strict=True))
    ]
    return WireTable(oid, f"table {oid}", identity, tuple(columns))


@st.composite
def values(draw: st.DrawFn, table: WireTable, *, only_key: bool = False, unchanged: bool = True) -> list[Value]:
    chosen: list[Value] = []
    for column in table.columns:
        form = draw(st.sampled_from("bbbtnu" if unchanged else "bbbtn"))
        if form == "n" or (only_key and not column.key):
            chosen.append(NULL)
        elif form == "u":
            chosen.append(UNCHANGED)
        else:
            in_binary, in_text = draw(both_forms(column.type))
            chosen.append((b"b", in_binary) if form == "b" else (b"t", in_text))
    return chosen


@st.composite
def changes(draw: st.DrawFn, known: dict[int, WireTable], xid: int) -> bytes:
    """One change of a table that was described before, or a new description of one."""
    kind = draw(st.sampled_from("IIIUUDDTMRY"))
    table = known[draw(st.sampled_from(sorted(known)))]
    if kind == "I":
        return wire.insert(table.oid, draw(values(table)), xid)
    if kind in "UD":
        tag = draw(st.sampled_from([b"K", b"O"]))
        old = draw(values(table, only_key=tag == b"K", unchanged=False))
        if kind == "D":
            return wire.delete(table.oid, old, tag, xid)
        return wire.update(table.oid, draw(values(table)), old if draw(st.booleans()) else None, tag, xid)
    if kind == "T":
        return wire.truncate(draw(st.lists(st.sampled_from(sorted(known)), max_size=3)), xid)
    if kind == "M":
        lsn, prefix = (
            draw(st.integers(0, 2**40)),
            draw(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)),
        )
        return wire.logical_message(draw(st.booleans()), lsn, prefix, draw(st.binary(max_size=9)), xid)
    if kind == "Y":
        return wire.type_message(xid)
    if draw(st.booleans()):
        known[table.oid] = draw(tables(table.oid))
    return wire.relation(known[table.oid], xid)


LSNS = st.integers(0, 2**63)
CLOCKS = st.integers(-(2**50), 2**55)
XIDS = st.integers(1, 2**32 - 1)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)

CONTROLS: list[st.SearchStrategy[bytes]] = [
    st.builds(wire.begin, LSNS, CLOCKS, XIDS),
    st.builds(wire.commit, LSNS, CLOCKS),
    st.builds(wire.origin, LSNS, NAMES),
    st.builds(wire.stream_commit, XIDS, LSNS, CLOCKS),
    st.builds(wire.stream_abort, XIDS, XIDS, st.one_of(st.none(), st.tuples(LSNS, CLOCKS))),
    st.builds(wire.begin_prepare, LSNS, CLOCKS, XIDS, NAMES),
    st.builds(wire.prepare, st.sampled_from([b"P", b"K", b"p"]), LSNS, CLOCKS, XIDS, NAMES),
    st.builds(wire.rollback_prepared, LSNS, CLOCKS, XIDS, NAMES),
]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """CopyData payloads: every table is described first; the order of the rest is any that can be read."""
    known = {oid: draw(tables(oid)) for oid in range(1, 1 + draw(st.integers(1, 3)))}
    messages = [wire.relation(table) for table in known.values()]
    for _ in range(draw(st.integers(0, 6))):
        xid = draw(st.sampled_from([0, 0, 700, 701]))
        if xid:
            messages.append(wire.stream_start(xid, draw(st.booleans())))
        messages += [draw(changes(known, draw(XIDS) if xid else 0)) for _ in range(draw(st.integers(0, 6)))]
        if xid:
            messages.append(wire.stream_stop())
        messages += draw(st.lists(st.one_of(CONTROLS), max_size=3))
    framed = [wire.xlog_data(message, draw(LSNS)) for message in messages]
    for place in draw(st.lists(st.integers(0, len(framed)), max_size=2)):
        framed.insert(place, draw(st.builds(wire.keepalive, LSNS, CLOCKS, st.booleans())))
    return framed

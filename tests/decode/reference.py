"""A decoder as one would write it first: message by message, value by value, with struct.

It shares nothing with the columnar one but the shapes; what both say about the same bytes must be equal.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any

from pgtide.decode import RelationColumn, RelationMessage
from pgtide.schema import TableShape
from pgtide.types import PgType

EPOCH_US = 946_684_800_000_000
Stored = tuple[Any, str | None]  # value, or None and the exact text

# The values beyond the years 1 to 9999 that the tests use.
FAR_DATES = {2**31 - 1: "infinity", -(2**31): "-infinity", -746_117: "0044-03-15 BC", 2_921_940: "10000-01-01"}
FAR_TIMES = {
    2**63 - 1: "infinity",
    -(2**63): "-infinity",
    -746_117 * 86_400_000_000: "0044-03-15 00:00:00+00 BC",
    2_921_940 * 86_400_000_000: "10000-01-01 00:00:00+00",
}


@dataclass
class Result:
    rows: list[dict[str, Any]] = field(default_factory=list)
    controls: list[tuple[Any, ...]] = field(default_factory=list)
    origins: dict[int, str] = field(default_factory=dict)
    gids: dict[int, str] = field(default_factory=dict)
    changes: int = 0
    wal_end: int = 0


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def unpack(self, layout: str) -> Any:
        values = struct.unpack_from(">" + layout, self.data, self.at)
        self.at += struct.calcsize(">" + layout)
        return values[0] if len(values) == 1 else values

    def text(self) -> str:
        end = self.data.index(0, self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]


class ReferenceDecoder:
    def __init__(
        self,
        shape_of: Callable[[RelationMessage], TableShape],
        decode_value: Callable[[PgType, tuple[bytes, bytes]], Any] | None = None,
    ) -> None:
        self.shape_of = shape_of
        self.decode_value = decode_value or decode
        self.relations: dict[int, tuple[RelationMessage, TableShape]] = {}
        self.stream_xid = 0
        self.result = Result()

    def feed(self, message: bytes) -> None:
        reader = Reader(message)
        result = self.result
        if reader.unpack("c") == b"k":
            wal_end, clock, reply = reader.unpack("QqB")
            result.wal_end = max(result.wal_end, wal_end)
            self._control("k", end_lsn=wal_end, timestamp_us=clock + EPOCH_US, flags=reply)
            return
        _, wal_end, _ = reader.unpack("QQq")
        result.wal_end = max(result.wal_end, wal_end)
        kind = reader.unpack("c").decode()
        subxid = reader.unpack("I") if self.stream_xid and kind in "IUDTRYM" else 0
        if kind in "IUD":
            self._row(kind, subxid, reader)
        elif kind == "R":
            self._relation(reader)
        elif kind == "T":
            self._truncate(subxid, reader)
        elif kind == "M":
            self._message(subxid, reader)
        elif kind != "Y":
            self._frame(kind, reader)
        assert kind == "Y" or reader.at == len(message)

    def _control(self, kind: str, **fields: int) -> None:
        names = ("xid", "subxid", "commit_lsn", "end_lsn", "timestamp_us", "flags")
        self.result.controls.append((ord(kind), self.result.changes, *(fields.get(name, 0) for name in names)))

    def _frame(self, kind: str, reader: Reader) -> None:
        place = len(self.result.controls)
        if kind == "B":
            lsn, clock, xid = reader.unpack("QqI")
            self._control(kind, commit_lsn=lsn, timestamp_us=clock + EPOCH_US, xid=xid)
        elif kind in "Cc":
            xid = reader.unpack("I") if kind == "c" else 0
            flags, lsn, end, clock = reader.unpack("BQQq")
            self._control(kind, flags=flags, commit_lsn=lsn, end_lsn=end, timestamp_us=clock + EPOCH_US, xid=xid)
        elif kind == "O":
            self._control(kind, commit_lsn=reader.unpack("Q"))
            self.result.origins[place] = reader.text()
        elif kind == "S":
            self.stream_xid, first = reader.unpack("IB")
            self._control(kind, xid=self.stream_xid, flags=first)
        elif kind == "E":
            self.stream_xid = 0
            self._control(kind)
        elif kind == "A":
            xid, subxid = reader.unpack("II")
            lsn, clock = reader.unpack("Qq") if reader.at < len(reader.data) else (0, -EPOCH_US)
            self._control(kind, xid=xid, subxid=subxid, end_lsn=lsn, timestamp_us=clock + EPOCH_US)
        else:
            self._two_phase(kind, place, reader)

    def _two_phase(self, kind: str, place: int, reader: Reader) -> None:
        flags = 0 if kind == "b" else reader.unpack("B")
        lsn, end = reader.unpack("QQ")
        if kind == "r":
            reader.unpack("q")
        clock, xid = reader.unpack("qI")
        self._control(kind, flags=flags, commit_lsn=lsn, end_lsn=end, timestamp_us=clock + EPOCH_US, xid=xid)
        self.result.gids[place] = reader.text()

    def _relation(self, reader: Reader) -> None:
        oid, namespace, name = reader.unpack("I"), reader.text(), reader.text()
        identity, count = reader.unpack("cH")
        columns = []
        for _ in range(count):
            flags, column = reader.unpack("B"), reader.text()
            type_oid, typmod = reader.unpack("Ii")
            columns.append(RelationColumn(column, type_oid, typmod, bool(flags)))
        message = RelationMessage(oid, namespace, name, identity.decode(), tuple(columns))
        self.relations[oid] = message, self.shape_of(message)

    def _add(self, table: str, op: int, subxid: int, **fields: Any) -> None:
        row = {"table": table, "op": op, "change": self.result.changes, "subxid": subxid, **fields}
        self.result.rows.append(row)
        self.result.changes += 1

    def _truncate(self, subxid: int, reader: Reader) -> None:
        count, _ = reader.unpack("iB")
        for _ in range(count):
            _, shape = self.relations[reader.unpack("I")]
            nulls = {column.name: (None, None) for column in shape.columns}
            self._add(shape.fingerprint, 5, subxid, unchanged=set(), image=0, new=nulls, old=None)

    def _message(self, subxid: int, reader: Reader) -> None:
        flags, lsn = reader.unpack("BQ")
        prefix = reader.text()
        content = reader.take(reader.unpack("I"))
        fields = (("prefix", prefix), ("content", content), ("transactional", bool(flags & 1)), ("lsn", lsn))
        new = {name: (value, None) for name, value in fields}
        self._add("messages", 6, subxid, unchanged=set(), image=0, new=new, old=None)

    def _row(self, kind: str, subxid: int, reader: Reader) -> None:
        message, shape = self.relations[reader.unpack("I")]
        tag, image, old = reader.unpack("c"), 0, None
        if tag != b"N":
            image = 1 if tag == b"K" else 2
            old = self._tuple(message, reader)
            if kind == "U":
                assert reader.unpack("c") == b"N"
        new = old if kind == "D" else self._tuple(message, reader)
        assert new is not None
        if kind == "U" and old is not None:
            new = [
                before if now[0] == b"u" and before[0] in (b"b", b"t") else now
                for now, before in zip(new, old, strict=True)
            ]
        keys = [column.key for column in message.columns]
        types = {column.name: column.type for column in shape.columns}
        names = [column.name for column in message.columns]
        values = dict(zip(names, new, strict=True))
        kept_old = None
        if kind == "U" and old is not None:
            kept = zip(names, old, keys, strict=True)
            kept_old = {name: self.decode_value(types[name], value) for name, value, key in kept if key or image == 2}
        self._add(
            shape.fingerprint,
            {"I": 1, "U": 2, "D": 3}[kind],
            subxid,
            unchanged={name for name, value in values.items() if value[0] == b"u"},
            image=image,
            new={name: self.decode_value(types[name], value) for name, value in values.items()},
            old=kept_old,
        )

    def _tuple(self, message: RelationMessage, reader: Reader) -> list[tuple[bytes, bytes]]:
        assert reader.unpack("H") == len(message.columns)
        values = []
        for _ in message.columns:
            kind = reader.unpack("c")
            values.append((kind, reader.take(reader.unpack("I")) if kind in b"bt" else b""))
        return values


def decode(pg_type: PgType, value: tuple[bytes, bytes]) -> Stored:
    kind, content = value
    if kind in b"nu":
        return None, None
    return binary(pg_type, content) if kind == b"b" else text(pg_type, content.decode())


def day(number: int) -> date:
    return date(2000, 1, 1) + timedelta(days=number)


def instant(number: int) -> datetime:
    return datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=number)


def binary(pg_type: PgType, raw: bytes) -> Stored:
    layouts = {"int2": ">h", "int4": ">i", "int8": ">q", "float4": ">f", "float8": ">d", "bool": ">?"}
    if pg_type.kind == "array":
        return binary_array(pg_type, raw)
    if pg_type.name in layouts:
        return struct.unpack(layouts[pg_type.name], raw)[0], None
    if pg_type.name == "date":
        (number,) = struct.unpack(">i", raw)
        return (None, FAR_DATES[number]) if number in FAR_DATES else (day(number), None)
    if pg_type.name == "timestamptz":
        (number,) = struct.unpack(">q", raw)
        return (None, FAR_TIMES[number]) if number in FAR_TIMES else (instant(number), None)
    if pg_type.name == "numeric":
        return numeric(pg_type, binary_numeric(raw))
    if pg_type.name in ("uuid", "bytea"):
        return raw, None
    return (raw[1:] if pg_type.name == "jsonb" else raw).decode(), None


def binary_numeric(raw: bytes) -> str:
    count, weight, sign, scale = struct.unpack_from(">HhHH", raw)
    if sign == 0xC000:
        return "NaN"
    with localcontext(prec=300):
        total = Decimal(0)
        for place, digit in enumerate(struct.unpack_from(f">{count}H", raw, 8)):
            total += Decimal(digit).scaleb(4 * (weight - place))
        return f"{'-' if sign else ''}{total:.{scale}f}"


def numeric(pg_type: PgType, printed: str) -> Stored:
    if pg_type.typmod < 4:
        return printed, None
    return (None, "NaN") if printed == "NaN" else (Decimal(printed), None)


def binary_array(pg_type: PgType, raw: bytes) -> Stored:
    assert pg_type.element is not None
    reader = Reader(raw)
    dimensions, _, _ = reader.unpack("iiI")
    if dimensions == 0:
        return [], None
    size, lower = reader.unpack("ii")
    elements = []
    for _ in range(size):
        length = reader.unpack("i")
        elements.append(None if length < 0 else binary(pg_type.element, reader.take(length))[0])
    if lower != 1:
        inner = ",".join("NULL" if element is None else str(element) for element in elements)
        return None, f"[{lower}:{lower + size - 1}]={{{inner}}}"
    return elements, None


def text(pg_type: PgType, printed: str) -> Stored:
    if pg_type.kind == "array":
        if printed.startswith("["):
            return None, printed
        inner = printed.strip("{}")
        return [None if each == "NULL" else int(each) for each in inner.split(",")] if inner else [], None
    match pg_type.name:
        case "int2" | "int4" | "int8":
            return int(printed), None
        case "float4" | "float8":
            return float(printed), None
        case "bool":
            return printed == "t", None
        case "date":
            return (None, printed) if printed in FAR_DATES.values() else (date.fromisoformat(printed), None)
        case "timestamptz":
            return (None, printed) if printed in FAR_TIMES.values() else (datetime.fromisoformat(printed), None)
        case "numeric":
            return numeric(pg_type, printed)
        case "uuid":
            return uuid.UUID(printed).bytes, None
        case "bytea":
            return bytes.fromhex(printed[2:]), None
    return printed, None

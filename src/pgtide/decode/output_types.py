"""Output functions of the types that are stored as text, by the type's name.

Formats follow the send and out functions in Postgres's `src/backend/utils/adt` and in the extensions.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from pgtide.decode.output import interval, timetz
from pgtide.errors import DecodeError
from pgtide.lsn import format_lsn
from pgtide.types.literals import float4, float8

Print = Callable[[bytes], str]


def _inet(raw: bytes, always_bits: bool = False) -> str:
    family, bits, _, size = raw[:4]
    address = raw[4:]
    version = {2: (socket.AF_INET, 4), 3: (socket.AF_INET6, 16)}.get(family)
    if version is None or len(address) != size or size != version[1]:
        raise DecodeError("a network address is of an unknown family")
    text = socket.inet_ntop(version[0], address)
    return f"{text}/{bits}" if always_bits or bits != 8 * size else text


def _cidr(raw: bytes) -> str:
    return _inet(raw, always_bits=True)


def _macaddr(raw: bytes) -> str:
    if len(raw) not in (6, 8):
        raise DecodeError("a hardware address has neither 6 nor 8 bytes")
    return raw.hex(":")


def _bits(raw: bytes) -> str:
    (count,) = struct.unpack_from(">i", raw)
    if count < 0 or len(raw) != 4 + (count + 7) // 8:
        raise DecodeError("a bit string has another length than it says")
    return "".join(f"{byte:08b}" for byte in raw[4:])[:count]


def _pg_lsn(raw: bytes) -> str:
    return format_lsn(*struct.unpack(">Q", raw))


def _tid(raw: bytes) -> str:
    block, offset = struct.unpack(">IH", raw)
    return f"({block},{offset})"


def _char(raw: bytes) -> str:
    (byte,) = raw
    if byte == 0:
        return ""
    return chr(byte) if byte < 128 else f"\\{byte:03o}"


def _snapshot(raw: bytes) -> str:
    count, xmin, xmax = struct.unpack_from(">iQQ", raw)
    running = struct.unpack(f">{count}Q", raw[20:]) if count >= 0 else ()
    return f"{xmin}:{xmax}:{','.join(map(str, running))}"


def _points(raw: bytes) -> list[str]:
    numbers = [float8(number) for number in struct.unpack(f">{len(raw) // 8}d", raw)]
    if len(numbers) % 2:
        raise DecodeError("a geometric value has a point with one coordinate")
    return [f"({x},{y})" for x, y in zip(numbers[0::2], numbers[1::2], strict=True)]


def _point(raw: bytes) -> str:
    (point,) = _points(raw)
    return point


def _lseg(raw: bytes) -> str:
    return "[{},{}]".format(*_points(raw))


def _box(raw: bytes) -> str:
    return "{},{}".format(*_points(raw))


def _path(raw: bytes) -> str:
    inner = ",".join(_counted_points(raw[1:]))
    return f"({inner})" if raw[0] else f"[{inner}]"


def _polygon(raw: bytes) -> str:
    return f"({','.join(_counted_points(raw))})"


def _counted_points(raw: bytes) -> list[str]:
    (count,) = struct.unpack_from(">i", raw)
    points = _points(raw[4:])
    if len(points) != count:
        raise DecodeError("a geometric value has another number of points than it says")
    return points


def _line(raw: bytes) -> str:
    return "{" + ",".join(float8(number) for number in struct.unpack(">3d", raw)) + "}"


def _circle(raw: bytes) -> str:
    return f"<{_point(raw[:16])},{float8(*struct.unpack('>d', raw[16:]))}>"


def _cube(raw: bytes) -> str:
    (header,) = struct.unpack_from(">I", raw)
    is_point, dimensions = header >> 31, header & 0x7FFFFFFF
    numbers = [float8(number) for number in struct.unpack(f">{(len(raw) - 4) // 8}d", raw[4:])]
    if len(numbers) != dimensions * (1 if is_point else 2):
        raise DecodeError("a cube has another number of coordinates than it says")
    corner = f"({', '.join(numbers[:dimensions])})"
    return corner if is_point else f"{corner},({', '.join(numbers[dimensions:])})"


def _sparsevec(raw: bytes) -> str:
    dimensions, count, _ = struct.unpack_from(">3i", raw)
    if count < 0 or len(raw) != 12 + 8 * count:
        raise DecodeError("a sparse vector has another length than it says")
    places = struct.unpack_from(f">{count}i", raw, 12)
    numbers = struct.unpack_from(f">{count}f", raw, 12 + 4 * count)
    inner = ",".join(f"{place + 1}:{float4(number)}" for place, number in zip(places, numbers, strict=True))
    return f"{{{inner}}}/{dimensions}"


def _vector_of(element: str) -> Print:
    """int2vector, oidvector: arrays in binary, numbers with spaces between them in text."""
    width = struct.calcsize(f">{element}")

    def printed(raw: bytes) -> str:
        dimensions, _, _, count, _ = struct.unpack_from(">iiIii", raw) if len(raw) > 12 else (0, 0, 0, 0, 0)
        if dimensions > 1 or count < 0 or len(raw) != 12 + (8 + count * (4 + width)) * (dimensions == 1):
            raise DecodeError("a vector has another length than it says")
        return " ".join(str(struct.unpack_from(f">i{element}", raw, 20 + k * (4 + width))[1]) for k in range(count))

    return printed


def _lexeme(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _tsvector(raw: bytes) -> str:
    (count,) = struct.unpack_from(">i", raw)
    at, lexemes = 4, []
    for _ in range(count):
        end = raw.index(0, at)
        word = _lexeme(raw[at:end].decode())
        (places,) = struct.unpack_from(">H", raw, end + 1)
        numbers = struct.unpack_from(f">{places}H", raw, end + 3)
        at = end + 3 + 2 * places
        # The weight is in the upper two bits; D, the lowest, is not shown.
        shown = ",".join(f"{number & 0x3FFF}{('', 'C', 'B', 'A')[number >> 14]}" for number in numbers)
        lexemes.append(f"{word}:{shown}" if shown else word)
    if at != len(raw):
        raise DecodeError("a tsvector has another length than it says")
    return " ".join(lexemes)


_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITY = {_OR: 1, _AND: 2, _PHRASE: 3, _NOT: 4}
_MAX_QUERY_DEPTH = 500  # a query may be nested deeper than Python's stack allows


class _TsQuery:
    """Items come in prefix order: an operator, its right operand, its left operand."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 4
        (self.count,) = struct.unpack_from(">i", raw)

    def item(self, parent: int = 0, right_of_phrase: bool = False, depth: int = 0) -> str:
        """As `infix` in tsquery.c: brackets where the parent binds more tightly, and right of a phrase operator."""
        if depth > _MAX_QUERY_DEPTH:
            raise DecodeError("a tsquery is nested too deeply to be printed", remedy="Restart without binary.")
        kind = self._raw[self._at]
        if kind == 1:
            return self._operand()
        if kind != 2:
            raise DecodeError("a tsquery has an item of an unknown kind")
        operator = self._raw[self._at + 1]
        priority = _PRIORITY[operator]
        self._at += 2
        brackets = priority < parent or (operator == _PHRASE and right_of_phrase)
        if operator == _NOT:
            text = "!" + self.item(priority, False, depth + 1)
        else:
            joint = {_AND: " & ", _OR: " | "}.get(operator) or self._distance()
            right = self.item(priority, operator == _PHRASE, depth + 1)
            text = self.item(priority, False, depth + 1) + joint + right
        return f"( {text} )" if brackets else text

    def _distance(self) -> str:
        (distance,) = struct.unpack_from(">H", self._raw, self._at)
        self._at += 2
        return " <-> " if distance == 1 else f" <{distance}> "

    def _operand(self) -> str:
        weight, prefix = self._raw[self._at + 1], self._raw[self._at + 2]
        end = self._raw.index(0, self._at + 3)
        text = _lexeme(self._raw[self._at + 3 : end].decode())
        self._at = end + 1
        marks = ("*" if prefix else "") + "".join(
            letter for letter, bit in (("A", 8), ("B", 4), ("C", 2), ("D", 1)) if weight & bit
        )
        return f"{text}:{marks}" if marks else text


def _tsquery(raw: bytes) -> str:
    query = _TsQuery(raw)
    return query.item() if query.count else ""


PRINTED: dict[str, Print] = {
    "interval": interval,
    "timetz": timetz,
    "inet": _inet,
    "cidr": _cidr,
    "macaddr": _macaddr,
    "macaddr8": _macaddr,
    "bit": _bits,
    "varbit": _bits,
    "pg_lsn": _pg_lsn,
    "tid": _tid,
    "char": _char,
    "pg_snapshot": _snapshot,
    "txid_snapshot": _snapshot,
    "point": _point,
    "lseg": _lseg,
    "path": _path,
    "box": _box,
    "polygon": _polygon,
    "line": _line,
    "circle": _circle,
    "cube": _cube,
    "sparsevec": _sparsevec,
    "int2vector": _vector_of("h"),
    "oidvector": _vector_of("I"),
    "tsvector": _tsvector,
    "tsquery": _tsquery,
}

"""Binary values printed as Postgres prints them, one value at a time, for every type: plain, slow, and independent.

It shares nothing with the columnar decoder but the resolved type.  Formats as in the send and out functions of Postgres
and of its extensions; intervals in IntervalStyle iso_8601, times in UTC.
"""

from __future__ import annotations

import ipaddress
import struct
import uuid
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from pgtide.types import PgType

DAY_US = 86_400_000_000
DAYS_OF_400_YEARS = 146_097
INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)


def printed(pg_type: PgType, raw: bytes) -> str:
    element = pg_type.element
    match pg_type.kind:
        case "enum":
            return raw.decode()
        case "domain":
            assert element is not None
            return printed(element, raw)
        case "array":
            assert element is not None
            return array(element, raw)
        case "composite":
            return composite([field for _, field in pg_type.fields], raw)
        case "range":
            assert element is not None
            return range_(element, raw)
        case "multirange":
            assert element is not None
            (count,) = struct.unpack_from(">i", raw)
            return "{" + ",".join(printed(element, part) for part in sized(raw[4:], count) if part is not None) + "}"
    return BASE[pg_type.name](raw) if pg_type.name in BASE else raw.decode()


def sized(raw: bytes, count: int) -> list[bytes | None]:
    """`count` values, each with its length in front; -1 is null."""
    values: list[bytes | None] = []
    at = 0
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, at)
        values.append(None if length < 0 else raw[at + 4 : at + 4 + length])
        at += 4 + max(length, 0)
    assert at == len(raw)
    return values


def array(element: PgType, raw: bytes) -> str:
    dimensions, _, _ = struct.unpack_from(">iiI", raw)
    if dimensions == 0:
        return "{}"
    bounds = [struct.unpack_from(">ii", raw, 12 + 8 * n) for n in range(dimensions)]
    count = int(np.prod([size for size, _ in bounds]))
    delimiter = {"box": ";", "over_box": ";", "geometry": ":", "geography": ":"}.get(element.name, ",")
    texts = []
    for value in sized(raw[12 + 8 * dimensions :], count):
        text = None if value is None else printed(element, value)
        texts.append("NULL" if text is None else array_quoted(text, delimiter))

    def level(depth: int, items: list[str]) -> str:
        if depth == dimensions:
            return items[0]
        step = len(items) // bounds[depth][0]
        inner = [level(depth + 1, items[at : at + step]) for at in range(0, len(items), step)]
        return "{" + delimiter.join(inner) + "}"

    shown = "".join(f"[{low}:{low + size - 1}]" for size, low in bounds)
    return (f"{shown}=" if any(low != 1 for _, low in bounds) else "") + level(0, texts)


def array_quoted(text: str, delimiter: str) -> str:
    plain = text != "" and text.upper() != "NULL" and not set(text) & set('"\\{} \t\n\r\v\f' + delimiter)
    return text if plain else '"' + "".join(f"\\{c}" if c in '"\\' else c for c in text) + '"'


def doubled(text: str, special: str) -> str:
    plain = text != "" and not set(text) & set(special + '"\\ \t\n\r\v\f')
    return text if plain else '"' + "".join(c * 2 if c in '"\\' else c for c in text) + '"'


def composite(fields: Sequence[PgType], raw: bytes) -> str:
    (count,) = struct.unpack_from(">i", raw)
    assert count == len(fields)
    at, texts = 4, []
    for field in fields:
        _, length = struct.unpack_from(">Ii", raw, at)
        at += 8
        texts.append("" if length < 0 else doubled(printed(field, raw[at : at + length]), "(),"))
        at += max(length, 0)
    return f"({','.join(texts)})"


def range_(subtype: PgType, raw: bytes) -> str:
    empty, lower_in, upper_in, lower_infinite, upper_infinite = (raw[0] >> bit & 1 for bit in range(5))
    if empty:
        return "empty"
    present = [not lower_infinite, not upper_infinite]
    values = iter(sized(raw[1:], sum(present)))
    bounds = [doubled(printed(subtype, next(values) or b""), "()[],") if there else "" for there in present]
    return f"{'[' if lower_in else '('}{bounds[0]},{bounds[1]}{']' if upper_in else ')'}"


def number(layout: str) -> Callable[[bytes], str]:
    return lambda raw: str(struct.unpack(f">{layout}", raw)[0])


def floating(shortest: str, plain_digits: int) -> str:
    """From the shortest digits that name the number: plain from 1e-4 on, up to so many digits."""
    if shortest in ("nan", "inf", "-inf"):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[shortest]
    value = Decimal(shortest)
    if value.is_zero():
        return "-0" if value.is_signed() else "0"
    exponent = value.adjusted()
    if -4 <= exponent < plain_digits:
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    digits = "".join(map(str, value.as_tuple().digits)).rstrip("0")
    mantissa = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
    return f"{'-' if value.is_signed() else ''}{mantissa}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"


def float8(value: float) -> str:
    return floating(repr(value), 15)


def float4(value: float) -> str:
    return floating(str(np.float32(value)), 6)


def numeric(raw: bytes) -> str:
    count, weight, sign, scale = struct.unpack_from(">HhHH", raw)
    if sign in (0xC000, 0xD000, 0xF000):
        return {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}[sign]
    digits = {weight - n: digit for n, digit in enumerate(struct.unpack_from(f">{count}H", raw, 8))}
    whole = "".join(f"{digits.get(place, 0):04d}" for place in range(max(weight, 0), -1, -1)).lstrip("0") or "0"
    fraction = "".join(f"{digits.get(place, 0):04d}" for place in range(-1, -(scale + 3) // 4 - 1, -1))[:scale]
    return ("-" if sign == 0x4000 else "") + whole + (f".{fraction}" if scale else "")


def money(raw: bytes) -> str:
    (cents,) = struct.unpack(">q", raw)
    return f"{'-' if cents < 0 else ''}${abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def day(number: int) -> tuple[str, str]:
    """Year-month-day, and what stands behind the time: nothing, or BC.  The calendar repeats after 400 years."""
    cycles, rest = divmod(number, DAYS_OF_400_YEARS)
    found = date(2000, 1, 1) + timedelta(days=rest)
    year = found.year + 400 * cycles
    return f"{year if year > 0 else 1 - year:04d}-{found:%m-%d}", "" if year > 0 else " BC"


def date_(raw: bytes) -> str:
    (number,) = struct.unpack(">i", raw)
    return infinite(number, INT32) or "".join(day(number))


def infinite(number: int, bounds: tuple[int, int]) -> str:
    return {bounds[0]: "-infinity", bounds[1]: "infinity"}.get(number, "")


def clock(micros: int) -> str:
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
    return text + (f".{fraction:06d}".rstrip("0") if fraction else "")


def timestamp(zone: str) -> Callable[[bytes], str]:
    def text(raw: bytes) -> str:
        (micros,) = struct.unpack(">q", raw)
        days, rest = divmod(micros, DAY_US)
        shown, era = day(days)
        return infinite(micros, INT64) or f"{shown} {clock(rest)}{zone}{era}"

    return text


def timetz(raw: bytes) -> str:
    micros, west = struct.unpack(">qi", raw)
    parts = [abs(west) // 3600, abs(west) // 60 % 60, abs(west) % 60]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return clock(micros) + ("-" if west > 0 else "+") + ":".join(f"{part:02d}" for part in parts)


def interval(raw: bytes) -> str:
    micros, days, months = struct.unpack(">qii", raw)
    if (micros, days, months) in ((INT64[0], INT32[0], INT32[0]), (INT64[1], INT32[1], INT32[1])):
        return infinite(micros, INT64)

    def towards_zero(value: int, unit: int) -> tuple[int, int]:
        quotient = abs(value) // unit * (1 if value >= 0 else -1)
        return quotient, value - quotient * unit

    years, months = towards_zero(months, 12)
    hours, rest = towards_zero(micros, 3_600_000_000)
    minutes, rest = towards_zero(rest, 60_000_000)
    seconds = ""
    if rest:
        seconds = f"{'-' if rest < 0 else ''}{Decimal(abs(rest)).scaleb(-6):f}".rstrip("0").rstrip(".") + "S"
    long = "".join(f"{count}{unit}" for count, unit in ((years, "Y"), (months, "M"), (days, "D")) if count)
    short = "".join(f"{count}{unit}" for count, unit in ((hours, "H"), (minutes, "M")) if count) + seconds
    return "P" + long + (f"T{short}" if short else "") if long or short else "PT0S"


def network(raw: bytes) -> str:
    family, bits, is_cidr, size = raw[:4]
    assert (family, size) in ((2, 4), (3, 16))
    address = ipaddress.ip_address(raw[4:])
    text = str(address)
    embedded = ipaddress.IPv4Address(raw[-4:])
    if size == 16 and raw[4:16] == bytes(10) + b"\xff\xff":
        text = f"::ffff:{embedded}"
    elif size == 16 and raw[4:16] == bytes(12) and raw[16:18] != bytes(2):
        text = f"::{embedded}"
    return text if bits == 8 * size and not is_cidr else f"{text}/{bits}"


def bits(raw: bytes) -> str:
    (count,) = struct.unpack_from(">i", raw)
    return "".join(str(raw[4 + place // 8] >> 7 - place % 8 & 1) for place in range(count))


def points(raw: bytes) -> list[str]:
    return [f"({float8(x)},{float8(y)})" for x, y in struct.iter_unpack(">dd", raw)]


def path(raw: bytes) -> str:
    opening, closing = "()" if raw[0] else "[]"
    return opening + ",".join(points(raw[5:])) + closing


def cube(raw: bytes) -> str:
    (header,) = struct.unpack_from(">I", raw)
    numbers = [float8(value) for (value,) in struct.iter_unpack(">d", raw[4:])]
    size = header & 0x7FFF_FFFF
    corners = [numbers] if header >> 31 else [numbers[:size], numbers[size:]]
    return ",".join(f"({', '.join(corner)})" for corner in corners)


def hstore(raw: bytes) -> str:
    (count,) = struct.unpack_from(">i", raw)
    parts = sized(raw[4:], 2 * count)

    def quoted(part: bytes | None) -> str:
        text = None if part is None else "".join(f"\\{c}" if c in '"\\' else c for c in part.decode())
        return "NULL" if text is None else f'"{text}"'

    return ", ".join(f"{quoted(key)}=>{quoted(value)}" for key, value in zip(parts[::2], parts[1::2], strict=True))


def vector(layout: str) -> Callable[[bytes], str]:
    return lambda raw: f"[{','.join(float4(value) for (value,) in struct.iter_unpack(layout, raw[4:]))}]"


def sparsevec(raw: bytes) -> str:
    size, count, _ = struct.unpack_from(">iii", raw)
    places, values = struct.unpack_from(f">{count}i", raw, 12), struct.unpack_from(f">{count}f", raw, 12 + 4 * count)
    inner = ",".join(f"{place + 1}:{float4(value)}" for place, value in zip(places, values, strict=True))
    return f"{{{inner}}}/{size}"


def numbers_with_spaces(layout: str) -> Callable[[bytes], str]:
    def text(raw: bytes) -> str:
        (dimensions,) = struct.unpack_from(">i", raw)
        count = struct.unpack_from(">i", raw, 12)[0] if dimensions else 0
        values = sized(raw[20:], count)
        return " ".join(number(layout)(value) for value in values if value is not None)

    return text


def lexeme(word: bytes) -> str:
    return "'" + word.decode().replace("\\", "\\\\").replace("'", "''") + "'"


def tsvector(raw: bytes) -> str:
    (count,) = struct.unpack_from(">i", raw)
    at, shown = 4, []
    for _ in range(count):
        word = raw[at : raw.index(0, at)]
        at += len(word) + 1
        (places,) = struct.unpack_from(">H", raw, at)
        marks = [
            f"{mark & 16383}{' CBA'[mark >> 14].strip()}" for mark in struct.unpack_from(f">{places}H", raw, at + 2)
        ]
        at += 2 + 2 * places
        shown.append(lexeme(word) + (":" if marks else "") + ",".join(marks))
    return " ".join(shown)


def tsquery(raw: bytes) -> str:
    """Operators come before their operands, the right one first; brackets where the operator above binds tighter."""
    at = 4
    if struct.unpack_from(">i", raw) == (0,):
        return ""

    def take(layout: str) -> Any:
        nonlocal at
        values = struct.unpack_from(f">{layout}", raw, at)
        at += struct.calcsize(f">{layout}")
        return values[0] if len(values) == 1 else values

    def item(outer: int, right_of_phrase: bool = False) -> str:
        nonlocal at
        if take("B") == 1:
            weight, prefix = take("BB")
            word = raw[at : raw.index(0, at)]
            at += len(word) + 1
            marks: str = "*" * prefix + "".join("DCBA"[bit] for bit in (3, 2, 1, 0) if weight >> bit & 1)
            return lexeme(word) + (":" if marks else "") + marks
        operator = take("B")
        binding = {3: 1, 2: 2, 4: 3, 1: 4}[operator]
        if operator == 1:
            text = f"!{item(binding)}"
        else:
            distance = take("H") if operator == 4 else 0
            sign = {2: "&", 3: "|", 4: "<->" if distance == 1 else f"<{distance}>"}[operator]
            right = item(binding, operator == 4)
            text = f"{item(binding)} {sign} {right}"
        return f"( {text} )" if binding < outer or (operator == 4 and right_of_phrase) else text

    return item(0)


def snapshot(raw: bytes) -> str:
    count, first, last = struct.unpack_from(">iQQ", raw)
    return f"{first}:{last}:{','.join(map(str, struct.unpack_from(f'>{count}Q', raw, 20)))}"


def tid(raw: bytes) -> str:
    return "({},{})".format(*struct.unpack(">IH", raw))


def lsn(raw: bytes) -> str:
    return "{:X}/{:X}".format(*struct.unpack(">II", raw))


def versioned(raw: bytes) -> str:
    assert raw[0] == 1
    return raw[1:].decode()


BASE: dict[str, Callable[[bytes], str]] = {
    "bool": lambda raw: "ft"[raw[0]],
    "int2": number("h"),
    "int4": number("i"),
    "int8": number("q"),
    "oid": number("I"),
    "xid": number("I"),
    "cid": number("I"),
    "xid8": number("Q"),
    "float4": lambda raw: float4(struct.unpack(">f", raw)[0]),
    "float8": lambda raw: float8(struct.unpack(">d", raw)[0]),
    "numeric": numeric,
    "money": money,
    "bytea": lambda raw: f"\\x{raw.hex()}",
    "geometry": lambda raw: raw.hex().upper(),
    "geography": lambda raw: raw.hex().upper(),
    "char": lambda raw: raw.strip(b"\0").decode(),
    "date": date_,
    "timestamp": timestamp(""),
    "timestamptz": timestamp("+00"),
    "time": lambda raw: clock(struct.unpack(">q", raw)[0]),
    "timetz": timetz,
    "interval": interval,
    "uuid": lambda raw: str(uuid.UUID(bytes=raw)),
    "jsonb": versioned,
    "jsonpath": versioned,
    "ltree": versioned,
    "lquery": versioned,
    "ltxtquery": versioned,
    "inet": network,
    "cidr": network,
    "macaddr": lambda raw: raw.hex(":"),
    "macaddr8": lambda raw: raw.hex(":"),
    "bit": bits,
    "varbit": bits,
    "pg_lsn": lsn,
    "tid": tid,
    "pg_snapshot": snapshot,
    "point": lambda raw: points(raw)[0],
    "line": lambda raw: "{" + ",".join(float8(value) for value in struct.unpack(">ddd", raw)) + "}",
    "lseg": lambda raw: f"[{','.join(points(raw))}]",
    "box": lambda raw: ",".join(points(raw)),
    "path": path,
    "polygon": lambda raw: f"({','.join(points(raw[4:]))})",
    "circle": lambda raw: f"<{points(raw[:16])[0]},{float8(struct.unpack('>d', raw[16:])[0])}>",
    "tsvector": tsvector,
    "tsquery": tsquery,
    "int2vector": numbers_with_spaces("h"),
    "oidvector": numbers_with_spaces("I"),
    "hstore": hstore,
    "cube": cube,
    "vector": vector(">f"),
    "halfvec": vector(">e"),
    "sparsevec": sparsevec,
}

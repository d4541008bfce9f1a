"""Which codec a type has, by its name and kind; and how any value in binary form is printed."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from functools import lru_cache

import pyarrow as pa

from pgtide.decode import output
from pgtide.decode.codec import Boolean, Bytes, Calendar, Codec, Number, Text, Uuid
from pgtide.decode.lists import Array, Hstore, Multirange, Vector
from pgtide.decode.numeric import Decimal, NumericText
from pgtide.decode.output_types import PRINTED
from pgtide.decode.printed import Money, ObjectIdentifier, Printed, TextOnly, TimeOfDay, UnsignedText, iso_interval_text
from pgtide.decode.structs import Composite, Range
from pgtide.errors import DecodeError
from pgtide.types.literals import (
    RangeLiteral,
    float4,
    float8,
    format_array,
    format_composite,
    format_hstore,
    format_range,
)
from pgtide.types.pg_type import (
    NO_BINARY_OUTPUT,
    OID_TYPES,
    TEXT_TYPES,
    VERSIONED_TEXT_TYPES,
    PgType,
    array_delimiter,
    decimal_precision_scale,
)

_BASE: dict[str, Codec] = {
    "bool": Boolean(),
    "int2": Number(pa.int16(), "i2"),
    "int4": Number(pa.int32(), "i4"),
    "int8": Number(pa.int64(), "i8"),
    "float4": Number(pa.float32(), "f4"),
    "float8": Number(pa.float64(), "f8"),
    "bytea": Bytes(),
    "uuid": Uuid(),
    "date": Calendar(pa.date32(), output.date),
    "timestamp": Calendar(pa.timestamp("us"), output.timestamp),
    "timestamptz": Calendar(pa.timestamp("us", "UTC"), output.timestamptz),
    "time": TimeOfDay(),
    "money": Money(),
    "xid": UnsignedText(pa.uint32(), "u4"),
    "cid": UnsignedText(pa.uint32(), "u4"),
    "xid8": UnsignedText(pa.uint64(), "u8"),
    **dict.fromkeys(OID_TYPES, ObjectIdentifier()),
    **dict.fromkeys(TEXT_TYPES, Text()),
    **dict.fromkeys(VERSIONED_TEXT_TYPES, Text(header=1)),
    **{name: Printed(printed) for name, printed in PRINTED.items()},
    "interval": Printed(PRINTED["interval"], iso_interval_text),
    **dict.fromkeys(("geometry", "geography"), Bytes(prefix=b"")),
}


@lru_cache(maxsize=4096)
def codec_of(pg_type: PgType) -> Codec:
    """The codec of a type; one that is not known is read in text form only."""
    element = pg_type.element
    match pg_type.kind:
        case "domain":
            return codec_of(_given(element))
        case "enum":
            return _BASE["text"]
        case "array":
            return Array(pg_type, codec_of(_given(element)), print_value)
        case "composite":
            return Composite(pg_type, [codec_of(field) for _, field in pg_type.fields], print_value)
        case "range":
            return Range(pg_type, codec_of(_given(element)), print_value)
        case "multirange":
            return Multirange(pg_type, _range_codec(_given(element)), print_value)
    match pg_type.name:
        case "numeric":
            decimal = decimal_precision_scale(pg_type.typmod)
            return Decimal(*decimal) if decimal else NumericText()
        case "hstore":
            return Hstore(pg_type, print_value)
        case "vector":
            return Vector(pg_type, 4, print_value)
        case "halfvec":
            return Vector(pg_type, 2, print_value)
    return _BASE.get(pg_type.name) or TextOnly()


def _range_codec(pg_type: PgType) -> Range:
    return Range(pg_type, codec_of(_given(pg_type.element)), print_value)


def _given(element: PgType | None) -> PgType:
    if element is None:
        raise DecodeError("a type refers to another one that was not resolved")
    return element


def needs_text(pg_type: PgType, inside: bool = False) -> bool:
    """Whether a column of this type can be read only if the stream is in text form.

    A type without binary output comes as text even in a binary stream, but inside of an array or composite
    it stops the stream with an error.
    """
    if pg_type.kind == "base" and pg_type.name in NO_BINARY_OUTPUT:
        return inside
    if pg_type.kind == "base":
        return isinstance(codec_of(pg_type), TextOnly)
    within = inside or pg_type.kind != "domain"
    parts = [field for _, field in pg_type.fields] + ([pg_type.element] if pg_type.element is not None else [])
    return any(needs_text(part, within) for part in parts)


def _unpacked(layout: str, printed: Callable[..., str]) -> Callable[[bytes], str]:
    return lambda raw: printed(*struct.unpack(layout, raw))


def _money(cents: int) -> str:
    return f"{'-' if cents < 0 else ''}${abs(cents) // 100:,}.{abs(cents) % 100:02d}"


_PRINT_BASE: dict[str, Callable[[bytes], str]] = {
    **PRINTED,
    "bool": _unpacked(">B", lambda value: "t" if value else "f"),
    "int2": _unpacked(">h", str),
    "int4": _unpacked(">i", str),
    "int8": _unpacked(">q", str),
    "float4": _unpacked(">f", float4),
    "float8": _unpacked(">d", float8),
    "numeric": output.numeric,
    "bytea": lambda raw: f"\\x{raw.hex()}",
    "uuid": lambda raw: str(uuid.UUID(bytes=raw)),
    "date": _unpacked(">i", output.date),
    "timestamp": _unpacked(">q", output.timestamp),
    "timestamptz": _unpacked(">q", output.timestamptz),
    "time": _unpacked(">q", output.time_of_day),
    "money": _unpacked(">q", _money),
    "xid": _unpacked(">I", str),
    "cid": _unpacked(">I", str),
    "xid8": _unpacked(">Q", str),
    **dict.fromkeys(OID_TYPES, _unpacked(">I", str)),
    **dict.fromkeys(TEXT_TYPES, bytes.decode),
    **dict.fromkeys(VERSIONED_TEXT_TYPES, lambda raw: raw[1:].decode()),
    **dict.fromkeys(("geometry", "geography"), lambda raw: raw.hex().upper()),
}


def print_value(pg_type: PgType, raw: bytes) -> str:
    """What Postgres prints for a value in binary form."""
    match pg_type.kind:
        case "domain":
            return print_value(_given(pg_type.element), raw)
        case "enum":
            return raw.decode()
        case "array":
            return _print_array(_given(pg_type.element), raw)
        case "composite":
            return format_composite(_print_fields(pg_type, raw))
        case "range":
            return format_range(_print_range(_given(pg_type.element), raw))
        case "multirange":
            (count,) = struct.unpack_from(">i", raw)
            return "{" + ",".join(_print_list(_given(pg_type.element), raw, 4, count)[0]) + "}"  # type: ignore[arg-type]
    if pg_type.name in ("hstore", "vector", "halfvec"):
        return _print_container(pg_type.name, raw)
    if pg_type.name not in _PRINT_BASE:
        raise DecodeError(f"the binary form of {pg_type.name} is not known", remedy="Restart without binary.")
    return _PRINT_BASE[pg_type.name](raw)


def _print_list(element: PgType, raw: bytes, at: int, count: int) -> tuple[list[str | None], int]:
    """`count` values, each behind its length; and where they end."""
    texts: list[str | None] = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, at)
        at += 4
        if length < -1 or at + length > len(raw):
            raise DecodeError("an element goes beyond the end of its value")
        texts.append(None if length < 0 else print_value(element, raw[at : at + length]))
        at += max(length, 0)
    return texts, at


def _print_array(element: PgType, raw: bytes) -> str:
    (dimensions,) = struct.unpack_from(">i", raw)
    bounds = struct.unpack_from(f">{2 * dimensions}i", raw, 12)
    sizes, lowers = bounds[0::2], bounds[1::2]
    count = 1 if sizes else 0
    for size in sizes:
        count = min(count * size, len(raw))  # never more than the bytes that are there
    elements, _ = _print_list(element, raw, 12 + 8 * dimensions, count)
    return format_array(sizes, lowers, elements, array_delimiter(element))


def _print_fields(pg_type: PgType, raw: bytes) -> list[str | None]:
    at, texts = 4, []
    for _, field in pg_type.fields:
        (text,), at = _print_list(field, raw, at + 4, 1)
        texts.append(text)
    return texts


def _print_range(bound: PgType, raw: bytes) -> RangeLiteral:
    flags, at = raw[0], 1
    bounds: list[str | None] = []
    for infinite in (8, 16):
        texts, at = _print_list(bound, raw, at, 0 if flags & (1 | infinite) else 1)
        bounds.append(texts[0] if texts else None)
    return RangeLiteral(bounds[0], bounds[1], bool(flags & 2), bool(flags & 4), bool(flags & 1))


def _print_container(name: str, raw: bytes) -> str:
    if name == "hstore":
        (count,) = struct.unpack_from(">i", raw)
        texts, _ = _print_list(PgType(25, "text"), raw, 4, 2 * count)
        return format_hstore([(key or "", value) for key, value in zip(texts[0::2], texts[1::2], strict=True)])
    (count,) = struct.unpack_from(">H", raw)
    numbers = struct.unpack_from(f">{count}{'f' if name == 'vector' else 'e'}", raw, 4)
    return "[" + ",".join(float4(number) for number in numbers) + "]"

"""One value from its text to what Spark sees: for the rare values that a storage type could not hold.

Nested values arrive here as a whole, because one element of theirs did not fit (an infinite date in an
array); the policy then applies to that element, and the others keep their values.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from pgtide.types.literals import parse_array, parse_composite, parse_hstore, parse_multirange, parse_range
from pgtide.types.pg_type import OID_TYPES, PgType, array_delimiter, decimal_precision_scale, part_of
from pgtide.types.policy import TypePolicy

_ISO_INTERVAL = re.compile(
    r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?)(\d+)(?:\.(\d{1,6}))?S)?)?"
)
_TIMETZ = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?")
_DAY_US = 86_400_000_000
_DAYS_PER_MONTH = 30  # as Postgres counts when it must compare intervals
_FIRST, _LAST = datetime.min, datetime.max


def from_text(pg_type: PgType, text: str, policy: TypePolicy, altered: Counter[str]) -> Any:
    """The value as Python has it, fit for the type's `lake_type`."""
    match pg_type.kind:
        case "domain":
            return from_text(part_of(pg_type), text, policy, altered)
        case "enum":
            return text
        case "array":
            return _array(pg_type, text, policy, altered)
        case "composite":
            fields = parse_composite(text)
            if len(fields) != len(pg_type.fields):
                altered["composite with other fields → null"] += 1
                return None
            pairs = zip(pg_type.fields, fields, strict=True)
            return {name: _maybe(field, value, policy, altered) for (name, field), value in pairs}
        case "range":
            return _range(part_of(pg_type), text, policy, altered)
        case "multirange":
            return [from_text(part_of(pg_type), each, policy, altered) for each in parse_multirange(text)]
    return _base(pg_type, text, policy, altered)


def _maybe(pg_type: PgType, text: str | None, policy: TypePolicy, altered: Counter[str]) -> Any:
    return None if text is None else from_text(pg_type, text, policy, altered)


def _array(pg_type: PgType, text: str, policy: TypePolicy, altered: Counter[str]) -> Any:
    if policy.arrays == "string":
        return text
    element = part_of(pg_type)
    literal = parse_array(text, array_delimiter(element))
    if literal.sizes and (len(literal.sizes) != pg_type.dimensions or set(literal.lower_bounds) != {1}):
        altered["array of other dimensions or lower bounds → null"] += 1
        return None
    values = [_maybe(element, each, policy, altered) for each in literal.elements]
    for size in reversed(literal.sizes[1:]):
        values = [values[at : at + size] for at in range(0, len(values), size)]
    return values


def _range(bound: PgType, text: str, policy: TypePolicy, altered: Counter[str]) -> dict[str, Any]:
    literal = parse_range(text)
    return {
        "lower": _maybe(bound, literal.lower, policy, altered),
        "upper": _maybe(bound, literal.upper, policy, altered),
        "lower_inclusive": literal.lower_inclusive,
        "upper_inclusive": literal.upper_inclusive,
        "empty": literal.empty,
    }


def _base(pg_type: PgType, text: str, policy: TypePolicy, altered: Counter[str]) -> Any:
    match pg_type.name:
        case "bool":
            return text == "t"
        case "int2" | "int4" | "int8":
            return int(text)
        case "float4" | "float8":
            return float(text)
        case "numeric":
            return _numeric(pg_type, text, policy, altered)
        case "money":
            digits = re.sub(r"\D", "", text)
            return Decimal(int(digits)).scaleb(-2) * (-1 if "-" in text else 1)
        case "bytea":
            return bytes.fromhex(text.removeprefix("\\x"))
        case "geometry" | "geography":
            return bytes.fromhex(text)
        case "date" | "timestamp" | "timestamptz":
            return _calendar(pg_type, text, policy, altered)
        case "time" | "timetz" | "interval":
            return _micros(pg_type.name, text, altered) if policy.times == "micros" else text
        case "hstore":
            return parse_hstore(text)
        case "vector" | "halfvec":
            return [float(number) for number in text.strip("[]").split(",") if number]
    if pg_type.name in OID_TYPES:
        return int(text) if text.isdigit() else None
    return text


def _numeric(pg_type: PgType, text: str, policy: TypePolicy, altered: Counter[str]) -> Any:
    decimal, loose = decimal_precision_scale(pg_type.typmod), policy.loose_decimal
    if policy.decimals == "string" or (decimal is None and loose is None):
        return text
    if text == "NaN" or text.endswith("Infinity"):
        altered["numeric NaN or infinity → null"] += 1
        return None
    scale = decimal[1] if decimal else loose.scale if loose else 0
    return Decimal(text).quantize(Decimal(1).scaleb(-scale))


def _calendar(pg_type: PgType, text: str, policy: TypePolicy, altered: Counter[str]) -> Any:
    if policy.infinity == "string":
        return text
    low = text == "-infinity" or text.endswith(" BC")
    if low or text == "infinity" or text.index("-") > 4:
        if policy.infinity == "null":
            altered[f"{pg_type.name} out of range → null"] += 1
            return None
        altered[f"{pg_type.name} out of range → the nearest one in range"] += 1
        nearest = _FIRST if low else _LAST
        if pg_type.name == "date":
            return nearest.date()
        return nearest.replace(tzinfo=UTC) if pg_type.name == "timestamptz" else nearest
    return date.fromisoformat(text) if pg_type.name == "date" else datetime.fromisoformat(text)


def _micros(name: str, text: str, altered: Counter[str]) -> int | None:
    """time: since midnight; timetz: since midnight in UTC; interval: with months of 30 days."""
    if name == "interval":
        return _interval_micros(text, altered)
    zone_us = 0
    if name == "timetz":
        match = _TIMETZ.fullmatch(text)
        if match is None:
            raise ValueError(f"not a time with time zone: {text!r}")
        sign = 1 if match[5] == "+" else -1
        hours, minutes, seconds = (int(match[group] or 0) for group in (6, 7, 8))
        zone_us = sign * ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
        text = text[: match.start(5)]
    whole, _, fraction = text.partition(".")
    hours, minutes, seconds = (int(part) for part in whole.split(":"))
    micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + int(fraction.ljust(6, "0"))
    return (micros - zone_us) % _DAY_US if name == "timetz" else micros


def _interval_micros(text: str, altered: Counter[str]) -> int | None:
    match = _ISO_INTERVAL.fullmatch(text)
    if match is None:  # infinity, since Postgres 17
        altered["interval infinity → null"] += 1
        return None
    years, months, days, hours, minutes = (int(match[group] or 0) for group in range(1, 6))
    if years or months:
        altered["interval with months of 30 days"] += 1
    seconds_us = int(match[7] or 0) * 1_000_000 + int((match[8] or "").ljust(6, "0"))
    span = timedelta(days=(12 * years + months) * _DAYS_PER_MONTH + days, hours=hours, minutes=minutes)
    return span // timedelta(microseconds=1) + (-seconds_us if match[6] else seconds_us)

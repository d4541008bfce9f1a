"""Postgres's output functions: the text of a value from its binary form, one value at a time.

Used where a storage type cannot hold a value, and for types that are stored as text.  What these print
equals what SELECT prints with DateStyle = ISO, TimeZone = UTC, IntervalStyle = iso_8601, bytea_output = hex.
"""

from __future__ import annotations

import struct

from pgtide.errors import DecodeError

DAY_US = 86_400_000_000
EPOCH_DAYS = 10_957  # 2000-01-01, where Postgres's calendar begins, in days since 1970-01-01
FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31 in days since 1970-01-01

NUMERIC_POSITIVE, NUMERIC_NEGATIVE = 0x0000, 0x4000
_NUMERIC_SPECIAL = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}


def numeric(raw: bytes) -> str:
    count, weight, sign, scale = struct.unpack_from(">HhHH", raw)
    if sign in _NUMERIC_SPECIAL:
        return _NUMERIC_SPECIAL[sign]
    if len(raw) != 8 + 2 * count:
        raise DecodeError("a numeric has another length than its header says")
    groups = struct.unpack_from(f">{count}H", raw, 8)
    digits = "".join(f"{group:04d}" for group in groups)
    point = 4 * (weight + 1)  # place of the decimal point among the digits
    if point <= 0:
        whole, fraction = "0", "0" * -point + digits
    else:
        whole, fraction = digits[:point].ljust(point, "0").lstrip("0") or "0", digits[point:]
    text = whole if scale == 0 else f"{whole}.{fraction[:scale].ljust(scale, '0')}"
    return f"-{text}" if sign == NUMERIC_NEGATIVE else text


def civil(days: int) -> tuple[int, int, int]:
    """Year, month and day (Gregorian for all times; year 0 is 1 BC) of a number of days since 2000-01-01."""
    era, day_of_era = divmod(days + 730_425, 146_097)  # counted from 0000-03-01, in cycles of 400 years
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return era * 400 + year_of_era + (month <= 2), month, day


def _day(days: int) -> tuple[str, str]:
    year, month, day = civil(days)
    era = " BC" if year <= 0 else ""
    return f"{1 - year if year <= 0 else year:04d}-{month:02d}-{day:02d}", era


def time_of_day(micros: int) -> str:
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:06d}".rstrip("0") if fraction else text


def date(days: int) -> str:
    """From the wire's number: days since 2000-01-01."""
    if days in (2**31 - 1, -(2**31)):
        return "infinity" if days > 0 else "-infinity"
    text, era = _day(days)
    return text + era


def timestamp(micros: int, zone: str = "") -> str:
    """From the wire's number: microseconds since 2000-01-01."""
    if micros in (2**63 - 1, -(2**63)):
        return "infinity" if micros > 0 else "-infinity"
    days, rest = divmod(micros, DAY_US)
    text, era = _day(days)
    return f"{text} {time_of_day(rest)}{zone}{era}"


def timestamptz(micros: int) -> str:
    return timestamp(micros, "+00")


def timetz(raw: bytes) -> str:
    micros, seconds_west = struct.unpack(">qi", raw)
    seconds = abs(seconds_west)
    zone = f"{'+' if seconds_west <= 0 else '-'}{seconds // 3600:02d}"
    if seconds % 3600:
        zone += f":{seconds // 60 % 60:02d}"
    if seconds % 60:
        zone += f":{seconds % 60:02d}"
    return time_of_day(micros) + zone


def interval(raw: bytes) -> str:
    micros, days, months = struct.unpack(">qii", raw)
    if (micros, days, months) == (2**63 - 1, 2**31 - 1, 2**31 - 1):
        return "infinity"
    if (micros, days, months) == (-(2**63), -(2**31), -(2**31)):
        return "-infinity"
    return iso_interval(months, days, micros)


def iso_interval(months: int, days: int, micros: int) -> str:
    """IntervalStyle iso_8601: every part has a sign of its own."""
    years, months = _parts(months, 12)
    hours, rest = _parts(micros, 3_600_000_000)
    minutes, rest = _parts(rest, 60_000_000)
    date_part = "".join(f"{value}{unit}" for value, unit in ((years, "Y"), (months, "M"), (days, "D")) if value)
    time_part = "".join(f"{value}{unit}" for value, unit in ((hours, "H"), (minutes, "M")) if value)
    if rest:
        seconds, fraction = divmod(abs(rest), 1_000_000)
        tail = f".{fraction:06d}".rstrip("0") if fraction else ""
        time_part += f"{'-' if rest < 0 else ''}{seconds}{tail}S"
    if not date_part and not time_part:
        return "PT0S"
    return f"P{date_part}{'T' + time_part if time_part else ''}"


def _parts(value: int, unit: int) -> tuple[int, int]:
    """Quotient and remainder, both with the sign of the value, as in C."""
    whole, rest = divmod(abs(value), unit)
    return (-whole, -rest) if value < 0 else (whole, rest)

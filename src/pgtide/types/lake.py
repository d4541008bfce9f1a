"""The reading side of types: from a column of the log to what Spark sees, by policies that a user chooses.

The log holds every value exactly, as its storage type or as text beside a null (see `types`).  Here both
become one column.  A policy may have to alter a value (NaN has no decimal, infinity no date): each such
value is counted under the reason, so that nothing changes silently.
"""

from __future__ import annotations

from collections import Counter
from decimal import ROUND_HALF_UP, Context, Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.errors import TableError
from pgtide.types.lake_values import from_text
from pgtide.types.pg_type import OID_TYPES, PgType, nested_list, part_of, range_struct, storage_type
from pgtide.types.policy import TypePolicy
from pgtide.types.stored import stored_text

CALENDAR_TYPES = ("date", "timestamp", "timestamptz")
TIME_TYPES = ("time", "timetz", "interval")
_DAY_US = 86_400_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31: the range of Spark's dates and timestamps


def is_variant(pg_type: PgType, policy: TypePolicy) -> bool:
    """Whether Spark shall parse this column into a VARIANT; Arrow has no such type, so it travels as a string."""
    if pg_type.kind == "domain":
        return is_variant(part_of(pg_type), policy)
    return pg_type.kind == "base" and pg_type.name in ("json", "jsonb") and policy.json == "variant"


def lake_type(pg_type: PgType, policy: TypePolicy) -> pa.DataType:
    """The Arrow type of what Spark sees."""
    match pg_type.kind:
        case "domain":
            return lake_type(part_of(pg_type), policy)
        case "array":
            if policy.arrays == "string":
                return pa.string()
            return nested_list(lake_type(part_of(pg_type), policy), pg_type.dimensions)
        case "composite":
            return pa.struct([pa.field(name, lake_type(field, policy)) for name, field in pg_type.fields])
        case "range":
            return range_struct(lake_type(part_of(pg_type), policy))
        case "multirange":
            return pa.list_(lake_type(part_of(pg_type), policy))
    stored = storage_type(pg_type)
    if pg_type.name == "numeric":
        if policy.decimals == "string":
            return pa.string()
        return (policy.loose_decimal or stored) if pa.types.is_string(stored) else stored
    if pg_type.name in CALENDAR_TYPES and policy.infinity == "string":
        return pa.string()
    if pg_type.name in TIME_TYPES:
        return pa.int64() if policy.times == "micros" else pa.string()
    return pa.string() if pg_type.name == "uuid" else stored


def to_lake(
    pg_type: PgType,
    values: pa.Array,
    text: pa.Array | None,
    policy: TypePolicy,
    altered: Counter[str] | None = None,
) -> pa.Array:
    """A column of the log (`c<n>` and, if there, `_text.c<n>`) as Spark sees it; counts altered values by reason."""
    counted: Counter[str] = Counter() if altered is None else altered
    if text is not None and text.null_count == len(text):
        text = None
    while pg_type.kind == "domain":
        pg_type = part_of(pg_type)
    if pg_type.kind not in ("base", "enum"):
        return _nested(pg_type, values, text, policy, counted)
    if pg_type.name == "numeric" and pg_type.kind == "base":
        return _numeric(values, text, policy, counted)
    if pg_type.name in CALENDAR_TYPES and pg_type.kind == "base":
        return _calendar(pg_type, values, text, policy, counted)
    if pg_type.name in TIME_TYPES and pg_type.kind == "base":
        return _time(pg_type, values, policy, counted)
    if pg_type.name == "uuid" and pg_type.kind == "base":
        return uuid_text(values)
    if pg_type.name in OID_TYPES and text is not None:
        counted["an object's name where its number is wanted"] += len(text) - text.null_count
    return values


def _numeric(values: pa.Array, text: pa.Array | None, policy: TypePolicy, counted: Counter[str]) -> pa.Array:
    if policy.decimals == "string":
        if pa.types.is_string(values.type):
            return values
        printed = _plain_decimals(values)
        return printed if text is None else pc.coalesce(printed, text)
    if pa.types.is_string(values.type) and policy.loose_decimal is not None:
        return _loose_decimals(values, policy.loose_decimal, counted)
    if text is not None:
        counted["numeric NaN → null"] += len(text) - text.null_count
    return values


def _plain_decimals(values: pa.Array) -> pa.Array:
    """Decimals as Postgres prints them: Arrow uses an exponent for very small ones."""
    printed = pc.cast(values, pa.string())
    if not pc.any(pc.match_substring(printed, "E")).as_py():
        return printed
    return pa.array([None if value is None else f"{value:f}" for value in values.to_pylist()], pa.string())


def _loose_decimals(values: pa.Array, wanted: pa.DataType, counted: Counter[str]) -> pa.Array:
    special = pc.match_substring_regex(values, "^(NaN|-?Infinity)$")
    counted["numeric NaN or infinity → null"] += pc.sum(special).as_py() or 0
    finite = pc.if_else(special, None, values)
    digits = pc.utf8_length(pc.replace_substring_regex(finite, r"^[^.]*\.?", ""))
    too_fine = pc.greater(digits, wanted.scale)
    if pc.any(too_fine).as_py():
        counted[f"numeric rounded to {wanted.scale} decimals"] += pc.sum(too_fine).as_py()
    whole = pc.utf8_length(pc.replace_substring_regex(finite, r"^-|\..*$", ""))
    if (pc.max(whole).as_py() or 0) > max(wanted.precision - wanted.scale, 1):
        raise TableError(
            f"a numeric value has more than {wanted.precision - wanted.scale} digits before its point",
            remedy='Give the column a precision in Postgres, or set decimals = "string".',
        )
    if not pc.any(too_fine).as_py():
        return pc.cast(finite, wanted)
    context, unit = Context(prec=100), Decimal(1).scaleb(-wanted.scale)
    rounded = [
        None if value is None else Decimal(value).quantize(unit, ROUND_HALF_UP, context) for value in finite.to_pylist()
    ]
    return pa.array(rounded, wanted)


def _calendar(
    pg_type: PgType, values: pa.Array, text: pa.Array | None, policy: TypePolicy, counted: Counter[str]
) -> pa.Array:
    if policy.infinity == "string":
        printed = calendar_text(pg_type, values)
        return printed if text is None else pc.coalesce(printed, text)
    if text is None:
        return values
    beyond = len(text) - text.null_count
    if policy.infinity == "null":
        counted[f"{pg_type.name} out of range → null"] += beyond
        return values
    counted[f"{pg_type.name} out of range → the nearest one in range"] += beyond
    low = pc.or_(pc.equal(text, "-infinity"), pc.ends_with(text, " BC"))
    per_day = 1 if pa.types.is_date32(values.type) else _DAY_US
    number = pa.int32() if per_day == 1 else pa.int64()
    least = pa.scalar(_FIRST_DAY * per_day, number).cast(values.type)
    greatest = pa.scalar((_LAST_DAY + 1) * per_day - 1, number).cast(values.type)
    return pc.coalesce(values, pc.if_else(low, least, greatest))


def calendar_text(pg_type: PgType, values: pa.Array) -> pa.Array:
    """Dates and timestamps of the years 1 to 9999 as Postgres prints them in UTC."""
    if pg_type.name == "date":
        return pc.cast(values, pa.string())
    printed = _without_trailing_zeros(pc.cast(values.cast(pa.timestamp("us")), pa.string()))
    return printed if pg_type.name == "timestamp" else pc.binary_join_element_wise(printed, "+00", "")


def _without_trailing_zeros(times: pa.Array) -> pa.Array:
    """Of a text that ends in a point and six digits."""
    return pc.utf8_rtrim(pc.utf8_rtrim(times, "0"), ".")


def _time(pg_type: PgType, values: pa.Array, policy: TypePolicy, counted: Counter[str]) -> pa.Array:
    if pg_type.name == "time":
        return values if policy.times == "micros" else time_text(values)
    if policy.times == "string":
        return values
    micros = [None if text is None else from_text(pg_type, text, policy, counted) for text in values.to_pylist()]
    return pa.array(micros, pa.int64())


_DIGITS = np.frombuffer(b"0123456789", np.uint8)
_HEX_PAIRS = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)  # the two digits of each byte
_UUID_DASHED = np.dtype(
    {"names": list("abcde"), "formats": ["V8", "V4", "V4", "V4", "V12"], "offsets": [0, 9, 14, 19, 24], "itemsize": 36}
)
_UUID_UNDASHED = np.dtype([("a", "V8"), ("b", "V4"), ("c", "V4"), ("d", "V4"), ("e", "V12")])


def time_text(micros: pa.Array) -> pa.Array:
    """Microseconds since midnight as Postgres prints a time."""
    numbers = micros.fill_null(0).to_numpy(zero_copy_only=False)
    characters = np.tile(np.frombuffer(b"00:00:00.000000", np.uint8), (len(numbers), 1))
    seconds, fraction = np.divmod(numbers, 1_000_000)
    for place, part, width in (
        (0, seconds // 3600, 2),
        (3, seconds // 60 % 60, 2),
        (6, seconds % 60, 2),
        (9, fraction, 6),
    ):
        for digit in range(width):
            characters[:, place + digit] = _DIGITS[part // 10 ** (width - 1 - digit) % 10]
    return _without_trailing_zeros(_fixed_text(characters, micros))


def uuid_text(values: pa.Array) -> pa.Array:
    """UUIDs as Postgres prints them."""
    filled = values.fill_null(bytes(16)) if values.null_count else values
    data = np.frombuffer(filled.buffers()[1] or b"", np.uint8)
    raw = data[16 * filled.offset : 16 * (filled.offset + len(filled))].reshape(-1, 16)
    digits = _HEX_PAIRS.take(raw).view(_UUID_UNDASHED)
    characters = np.full((len(values), 36), ord("-"), np.uint8)
    dashed = characters.view(_UUID_DASHED)
    for group in _UUID_DASHED.names or ():
        dashed[group] = digits[group]  # as one value: by characters it would take twice as long
    return _fixed_text(characters, values)


def _fixed_text(characters: np.ndarray[tuple[int, int], np.dtype[np.uint8]], like: pa.Array) -> pa.Array:
    """Strings that all have the same length, null where `like` is null."""
    count, width = characters.shape
    offsets = pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32))
    data = pa.py_buffer(np.ascontiguousarray(characters))
    strings = pa.Array.from_buffers(pa.string(), count, [None, offsets, data])
    return strings if like.null_count == 0 else pc.if_else(like.is_valid(), strings, None)


def _nested(
    pg_type: PgType, values: pa.Array, text: pa.Array | None, policy: TypePolicy, counted: Counter[str]
) -> pa.Array:
    wanted = lake_type(pg_type, policy)
    if pa.types.is_string(wanted):  # arrays as text
        printed = [None if value is None else stored_text(pg_type, value) for value in values.to_pylist()]
        array = pa.array(printed, pa.string())
        return array if text is None else pc.coalesce(array, text)
    array = _children_to_lake(pg_type, values, policy, counted)
    if text is None:
        return array
    rows = np.flatnonzero(text.is_valid().to_numpy(zero_copy_only=False))
    parsed = [from_text(pg_type, text[row].as_py(), policy, counted) for row in rows.tolist()]
    source = np.arange(len(array))
    source[rows] = len(array) + np.arange(len(rows))
    return pa.concat_arrays([array, pa.array(parsed, wanted)]).take(pa.array(source))


def _children_to_lake(pg_type: PgType, values: pa.Array, policy: TypePolicy, counted: Counter[str]) -> pa.Array:
    """Elements mapped as columns of their own, then put together as they were."""
    wanted = lake_type(pg_type, policy)
    if values.type == wanted:
        return values
    if pa.types.is_struct(wanted):
        parts = [field for _, field in pg_type.fields] or [part_of(pg_type)] * 2
        flat = values.flatten()
        children = [to_lake(part, child, None, policy, counted) for part, child in zip(parts, flat, strict=False)]
        return pa.StructArray.from_arrays([*children, *flat[len(parts) :]], fields=list(wanted), mask=values.is_null())
    elements = part_of(pg_type)
    child = values.flatten()
    if pg_type.kind == "array" and pg_type.dimensions > 1:
        inner = PgType(pg_type.oid, pg_type.name, "array", pg_type.typmod, elements, pg_type.dimensions - 1)
        mapped = _children_to_lake(inner, child, policy, counted)
    else:
        mapped = to_lake(elements, child, None, policy, counted)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, mapped, type=wanted, mask=values.is_null())

"""One number for a row, equal for two rows exactly if all their values are equal: what verify compares.

Spark's own hash of several columns passes over nulls and forgets where an array ends, so (null, 'a') and ('a', null)
would look alike; here every value is hashed together with whether it is null, and every array with its length.  Floats
are told apart to the bit: -0.0 is not 0.0, and NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql.functions import (
    array_sort,
    coalesce,
    concat,
    date_format,
    length,
    lit,
    map_entries,
    md5,
    size,
    substring,
    to_json,
    transform,
    when,
    xxhash64,
)
from pyspark.sql.functions import hex as hexadecimal
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
    TimestampType,
)

VALUE_CHARACTERS = 64 << 10
_ROW_CHARACTERS = 4 << 20  # what the driver may be sent of one row
# Two instants never look alike: by default JSON ends at milliseconds, and text leaves out the offset from UTC.
_INSTANT = "yyyy-MM-dd HH:mm:ss.SSSSSSXXXXX"
_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": _INSTANT,
    "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
}


def hash_of(values: Sequence[tuple[Column, DataType]]) -> Column:
    """64 bits over these values, in order."""
    return xxhash64(*(part for value, of in values for part in _parts(value, of)))


def _parts(value: Column, of: DataType) -> list[Column]:
    """What is hashed for a value: never ambiguous, whatever comes before and after."""
    absent = value.isNull()
    match of:
        case StructType():
            return [absent, *(part for field in of for part in _parts(value.getField(field.name), field.dataType))]
        case ArrayType():
            element = of.elementType
            return [
                absent,
                coalesce(size(value), lit(0)),
                transform(value, lambda one: xxhash64(*_parts(one, element))),
            ]
        case MapType():
            entries = StructType().add("key", of.keyType).add("value", of.valueType)
            return _parts(array_sort(map_entries(value)), ArrayType(entries))
        case FloatType() | DoubleType():
            # Spark hashes both zeros alike.
            negative_zero = when(value == 0, value.cast("string").startswith("-"))
            return [absent, value, coalesce(negative_zero, lit(False))]
        case _:
            return [absent, value]


def text_of(value: Column, of: DataType, columns: int = 1) -> Column:
    """A value for people: all of it, unless it is so long that the text tells where it was cut.

    Then it has a digest, which tells two values apart that begin alike.  `columns`: how many of the row are shown.
    """
    match of:
        case StructType() | ArrayType() | MapType():
            text = to_json(value, _JSON)
        case TimestampType():
            text = date_format(value, _INSTANT)
        case BinaryType():
            text = concat(lit("\\x"), hexadecimal(value))
        case _:
            text = value.cast("string")
    limit = min(VALUE_CHARACTERS, _ROW_CHARACTERS // columns)
    count = length(text).cast("string")
    told = concat(
        lit("… (cut here: "), count, lit(f" characters, the first {limit} are shown; md5 "), md5(text), lit(")")
    )
    return when(length(text) > limit, concat(substring(text, 1, limit), told)).otherwise(text)

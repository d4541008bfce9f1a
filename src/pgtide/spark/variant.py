"""JSON text as VARIANT values: the two byte strings that Spark keeps for each.

Spark's own Python encoder does it, value by value (some 50 µs for a small document): where that is too slow, read the
column as a string and use `parse_json` in SQL, which runs in the JVM.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import VariantType
from pyspark.sql.variant_utils import VariantUtils


def variant_array(text: pa.Array) -> pa.Array:
    """VARIANT for each JSON text; null for null."""
    parsed = [None if value is None else VariantUtils.parse_json(value) for value in text.to_pylist()]
    values = [None if one is None else {"value": one[0], "metadata": one[1]} for one in parsed]
    return pa.array(values, to_arrow_type(VariantType()))

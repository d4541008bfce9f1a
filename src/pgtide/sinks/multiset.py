"""Tables without a key: rows that come and go are counted, and exactly so many equal rows of the target go.

Equal means: every column the same, null like null, floats by what they print (NaN is NaN, and -0.0 is not 0.0), nested
values in each of their parts.  Equal rows of the target are told apart by `_row_id`, which Iceberg's format v3 gives
every row.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.functions import expr
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
)

from pgtide.sinks.iceberg_table import quoted
from pgtide.sinks.merge import DELETED, PREFIX

SIGN = PREFIX + "sign"  # 1: the row comes, -1: it goes
LOST_ROW = "pgtide: a row that was deleted is not in the mirror"

_COUNT = PREFIX + "count"
_ROW = PREFIX + "row"
_GROUP = PREFIX + "group"
_SAME = PREFIX + "same"


def net_rows(rows: DataFrame) -> DataFrame:
    """Distinct rows, and how many of each come (or go, when negative); none that cancel each other out."""
    columns = columns_of(rows)
    same = [
        expr(_identity(field.dataType, quoted(field.name))).alias(f"{_SAME}{place}")
        for place, field in enumerate(columns)
    ]
    kept = [expr(f"first({quoted(field.name)})").alias(field.name) for field in columns]
    count = expr(f"CAST(sum({quoted(SIGN)}) AS INT)").alias(_COUNT)
    return (
        rows.groupBy(*same)
        .agg(*kept, count)
        .select(*map(quoted, columns.names), quoted(_COUNT))
        .where(f"{quoted(_COUNT)} <> 0")
    )


def rows_that_come(net: DataFrame) -> DataFrame:
    """Of net rows those that come, each as often as it does."""
    names = [quoted(name) for name in net.columns if name != _COUNT]
    each = net.where(f"{quoted(_COUNT)} > 0").withColumn(_ROW, expr(f"explode(sequence(1, {quoted(_COUNT)}))"))
    return each.select(*names)


def columns_of(rows: DataFrame) -> StructType:
    """The table's own columns."""
    return StructType([field for field in rows.schema if field.name not in (SIGN, _COUNT)])


def multiset_statement(target: str, net: str, columns: StructType, *, soft_delete: bool = False) -> str:
    """The MERGE that makes the net rows come and go.  A row to go that the target does not have is an error.

    With soft deletes rows that go are marked, and those that are marked are not there any more.
    """
    names = [quoted(field.name) for field in columns]
    go, mark, living = (
        (f"UPDATE SET t.{DELETED} = true", f", {DELETED}", ", false") if soft_delete else ("DELETE", "", "")
    )
    nothing = ", ".join(f"NULL AS {name}" for name in names)  # of the types that the other rows have
    return (
        f"MERGE INTO {target} t USING ("
        f"SELECT {quoted(_ROW)}, {nothing} FROM ({_rows_that_go(target, net, columns, soft_delete)}) "
        f"UNION ALL SELECT CAST(NULL AS BIGINT), {', '.join(names)} FROM "
        f"(SELECT *, explode(sequence(1, {quoted(_COUNT)})) FROM {net} WHERE {quoted(_COUNT)} > 0)"
        f") s ON t._row_id = s.{quoted(_ROW)} "
        f"WHEN MATCHED THEN {go} "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(names)}{mark}) "
        f"VALUES ({', '.join(f's.{name}' for name in names)}{living})"
    )


def marked_rows_lacking(target: str, rows: str, columns: StructType) -> str:
    """A query: of these rows, under soft deletes, those that are marked beyond as many as the target has marked.

    Equal in these columns: others may have values only in rows that were written before the source dropped them.
    """
    same = [_identity(field.dataType, quoted(field.name)) for field in columns]
    names = [quoted(f"{_SAME}{place}") for place in range(len(same))]
    listed = ", ".join(f"{one} AS {name}" for one, name in zip(same, names, strict=True))
    ours = ", ".join([*names, quoted(_ROW)])
    there = f"SELECT {listed}, count(*) AS {quoted(_COUNT)} FROM {target} WHERE {DELETED} GROUP BY {', '.join(same)}"
    marked = (
        f"SELECT *, {listed}, row_number() OVER (PARTITION BY {', '.join(same)} ORDER BY 1) AS {quoted(_ROW)} "
        f"FROM {rows} WHERE {DELETED}"
    )
    matched = " AND ".join(f"m.{name} <=> b.{name}" for name in names)
    return (
        f"(SELECT m.* EXCEPT ({ours}) FROM ({marked}) m LEFT JOIN ({there}) b ON {matched} "
        f"WHERE m.{quoted(_ROW)} > coalesce(b.{quoted(_COUNT)}, 0))"
    )


def _rows_that_go(target: str, net: str, columns: StructType, soft_delete: bool) -> str:
    """A query: the `_row_id` of as many equal rows as go; it fails where there are fewer."""
    going = f"SELECT *, monotonically_increasing_id() AS {quoted(_GROUP)} FROM {net} WHERE {quoted(_COUNT)} < 0"
    same = " AND ".join(
        f"{_identity(field.dataType, f't.{quoted(field.name)}')} <=> "
        f"{_identity(field.dataType, f'g.{quoted(field.name)}')}"
        for field in columns
    )
    numbered = (
        f"SELECT t._row_id AS {quoted(_ROW)}, -g.{quoted(_COUNT)} AS wanted, "
        f"row_number() OVER (PARTITION BY g.{quoted(_GROUP)} ORDER BY t._row_id) AS number, "
        f"count(t._row_id) OVER (PARTITION BY g.{quoted(_GROUP)}) AS there "
        f"FROM ({going}) g LEFT JOIN {target} t ON {same}{f' AND NOT t.{DELETED}' if soft_delete else ''}"
    )
    checked = f"CASE WHEN there < wanted THEN raise_error('{LOST_ROW}') ELSE {quoted(_ROW)} END"
    return f"SELECT {checked} AS {quoted(_ROW)} FROM ({numbered}) WHERE number <= wanted"


def _identity(kind: DataType, name: str, depth: int = 0) -> str:
    """What two values have in common if and only if they are the same.

    Spark compares all but floats and maps exactly, also within others.  No text of a whole nested value is compared:
    as JSON, timestamps lose their microseconds, and a field that is null is not there.
    """
    if not _holds_float_or_map(kind):
        return name
    match kind:
        case ArrayType():
            one = f"e{depth}"
            return f"transform({name}, {one} -> {_identity(kind.elementType, one, depth + 1)})"
        case StructType():
            parts = ", ".join(
                _identity(field.dataType, f"{name}.{quoted(field.name)}", depth + 1) for field in kind.fields
            )
            return f"CASE WHEN {name} IS NOT NULL THEN struct({parts}) END"
        case MapType():
            entries = StructType().add("key", kind.keyType).add("value", kind.valueType)
            return f"array_sort({_identity(ArrayType(entries), f'map_entries({name})', depth)})"
        case _:
            return f"CAST({name} AS STRING)"


def _holds_float_or_map(kind: DataType) -> bool:
    match kind:
        case ArrayType():
            return _holds_float_or_map(kind.elementType)
        case StructType():
            return any(_holds_float_or_map(field.dataType) for field in kind.fields)
        case _:
            return isinstance(kind, FloatType | DoubleType | MapType)

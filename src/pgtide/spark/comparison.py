"""Whether two frames hold the same rows, and if not, in what they differ.

Rows are compared as a multiset: a row that is there twice is one too many.  One pass brings three numbers per row to
Spark's shuffle: a hash of its key, a hash of all its values, and the side it is on; that tells how many rows are
missing, too many, or differ.  Only if some are, further passes fetch the first of them in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, zip_longest
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql.functions import array, col, expr
from pyspark.sql.types import StructType

from pgtide.sinks.iceberg_table import quoted
from pgtide.spark.row_hash import hash_of, text_of

EXAMPLES = 10
LINE_CHARACTERS = 200  # of a value, where it is shown to people
_BEFORE_DIFFERENCE = 40
_ROWS_FETCHED = 2 * EXAMPLES + 2

_COUNTS = (
    "coalesce(sum(source_rows), 0) AS source_rows",
    "coalesce(sum(mirror_rows), 0) AS mirror_rows",
    "coalesce(sum(greatest(in_source - in_mirror, 0)), 0) AS missing",
    "coalesce(sum(greatest(in_mirror - in_source, 0)), 0) AS extra",
    "coalesce(sum(least(in_source, in_mirror)), 0) AS differing",
)

Values = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that is not the same on both sides, as text: all of it where only one side has it, else what differs."""

    kind: str  # missing, extra, differing
    key: Values
    source: Values | None
    mirror: Values | None
    rows: int = 1  # so many equal ones of it


@dataclass(frozen=True, slots=True)
class Comparison:
    source_rows: int
    mirror_rows: int
    missing: int  # rows that only the source has
    extra: int  # rows that only the mirror has, repeated ones included
    differing: int  # rows whose key both have, with other values
    examples: tuple[Difference, ...] = ()
    problems: tuple[str, ...] = ()  # what could not be compared, such as a column that only one side has

    @property
    def mismatches(self) -> int:
        return self.missing + self.extra + self.differing + len(self.problems)

    @property
    def equal(self) -> bool:
        return self.mismatches == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def comparison_from_json(data: dict[str, Any]) -> Comparison:
    examples = tuple(Difference(**example) for example in data["examples"])
    return Comparison(**(data | {"examples": examples, "problems": tuple(data["problems"])}))


def described(found: Comparison) -> str:
    """One line for people."""
    if found.equal:
        return f"{found.source_rows:,} rows, equal"
    counts = f"{found.missing:,} missing, {found.extra:,} too many, {found.differing:,} differ"
    rows = f"{found.source_rows:,} rows in the source, {found.mirror_rows:,} in the mirror"
    return "; ".join([rows, counts, *found.problems])


def shown(example: Difference) -> str:
    """One line for people; of a long value the part in which it differs, or its beginning."""
    where = f"{_listed(example.key)}: " if example.key else ""
    times = f" ({example.rows} times)" if example.rows > 1 else ""
    if example.source is None:
        return f"{where}only in the mirror{times}: {_listed(example.mirror or {})}"
    if example.mirror is None:
        return f"{where}only in the source{times}: {_listed(example.source)}"
    alike = {name: _alike(value or "", example.mirror[name] or "") for name, value in example.source.items()}
    return f"{where}the source has {_listed(example.source, alike)}, the mirror has {_listed(example.mirror, alike)}"


def is_cut(example: Difference) -> bool:
    """Whether `shown` leaves out something of it."""
    values = [value for side in (example.key, example.source, example.mirror) if side for value in side.values()]
    return any(len(value or "") > LINE_CHARACTERS for value in values)


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    differ = (place for place, (ours, theirs) in enumerate(zip(one, other, strict=False)) if ours != theirs)
    return next(differ, min(len(one), len(other)))


def _listed(values: Values, alike: Mapping[str, int] | None = None) -> str:
    return ", ".join(f"{name} = {_value(value, (alike or {}).get(name, 0))}" for name, value in values.items())


def _value(value: str | None, alike: int) -> str:
    if value is None:
        return "NULL"
    if len(value) <= LINE_CHARACTERS:
        return repr(value)
    begin = max(0, min(alike - _BEFORE_DIFFERENCE, len(value) - LINE_CHARACTERS))
    end = begin + LINE_CHARACTERS
    before, after = "…" if begin else "", "…" if end < len(value) else ""
    return f"{before}{value[begin:end]!r}{after} (characters {begin + 1:,} to {end:,} of {len(value):,})"


def compare(source: DataFrame, mirror: DataFrame, columns: StructType, key: Sequence[str]) -> Comparison:
    """Compares these columns of the two; without a key, rows can only be missing or extra."""
    sides = _Sides(source, mirror, columns, tuple(key))
    counts = sides.counts()
    examples = sides.examples() if counts.mismatches else ()
    return Comparison(counts.source_rows, counts.mirror_rows, counts.missing, counts.extra, counts.differing, examples)


class _Sides:
    """Both sides with the same columns, called c0, c1, …: a user's column may be called anything.

    `h` is the hash of all values; `k` that of the key, or of all values where there is no key.
    """

    def __init__(self, source: DataFrame, mirror: DataFrame, columns: StructType, key: tuple[str, ...]) -> None:
        self._columns = columns
        self._key = key
        self._source, self._mirror = self._hashed(source), self._hashed(mirror)

    def counts(self) -> Comparison:
        by_key = (
            self._grouped()
            .groupBy("k")
            .agg(
                expr("sum(source_rows) AS source_rows"),
                expr("sum(mirror_rows) AS mirror_rows"),
                expr("sum(greatest(surplus, 0)) AS in_source"),
                expr("sum(greatest(-surplus, 0)) AS in_mirror"),
            )
        )
        return Comparison(**by_key.selectExpr(*_COUNTS).collect()[0].asDict())

    def examples(self) -> tuple[Difference, ...]:
        """The first by key."""
        key = [f"c{place}" for place, field in enumerate(self._columns) if field.name in self._key]
        unequal = self._grouped(*key).where("surplus <> 0").orderBy(*key, "k", "h").limit(_ROWS_FETCHED).collect()
        if len(unequal) == _ROWS_FETCHED and unequal[0]["k"] != unequal[-1]["k"]:
            unequal = [row for row in unequal if row["k"] != unequal[-1]["k"]]  # its other rows may be cut off
        in_source = self._shown(self._source, [row["h"] for row in unequal if row["surplus"] > 0])
        in_mirror = self._shown(self._mirror, [row["h"] for row in unequal if row["surplus"] < 0])
        found: list[Difference] = []
        for _, group in groupby(unequal, key=lambda row: row["k"]):
            rows = list(group)
            for ours, theirs in zip_longest(
                [row for row in rows if row["surplus"] > 0], [row for row in rows if row["surplus"] < 0]
            ):
                count = min(abs(row["surplus"]) for row in (ours, theirs) if row is not None)
                found.append(self._difference(ours and in_source[ours["h"]], theirs and in_mirror[theirs["h"]], count))
        return tuple(found[:EXAMPLES])

    def _grouped(self, *carried: str) -> DataFrame:
        """Rows that are equal, and how many of them each side has; `carried` columns are part of the key."""
        source = self._source.selectExpr("k", "h", "1 AS side", *carried)
        mirror = self._mirror.selectExpr("k", "h", "-1 AS side", *carried)
        # Partitioned by key alone, this grouping and one by key that follows need one shuffle together.
        return source.union(mirror).repartition("k").groupBy("k", "h").agg(
            expr("sum(side) AS surplus"),
            expr("count_if(side > 0) AS source_rows"),
            expr("count_if(side < 0) AS mirror_rows"),
            *(expr(f"first({name}) AS {name}") for name in carried),
        )  # fmt: skip

    def _hashed(self, side: DataFrame) -> DataFrame:
        named = side.select(*(col(quoted(field.name)).alias(f"c{place}") for place, field in enumerate(self._columns)))
        values = [(col(f"c{place}"), field) for place, field in enumerate(self._columns)]
        key = [(value, field.dataType) for value, field in values if not self._key or field.name in self._key]
        hashed = named.withColumn("h", hash_of([(value, field.dataType) for value, field in values]))
        return hashed.withColumn("k", hash_of(key) if self._key else col("h"))

    def _shown(self, side: DataFrame, hashes: list[int]) -> dict[int, Row]:
        """These rows as text, and with a hash for each value."""
        if not hashes:
            return {}
        texts = [
            text_of(col(f"c{place}"), field.dataType, len(self._columns)) for place, field in enumerate(self._columns)
        ]
        digests = [hash_of([(col(f"c{place}"), field.dataType)]) for place, field in enumerate(self._columns)]
        rows = side.where(col("h").isin(hashes)).dropDuplicates(["h"])
        return {
            row["h"]: row
            for row in rows.select("h", array(*texts).alias("texts"), array(*digests).alias("digests")).collect()
        }

    def _difference(self, ours: Row | None, theirs: Row | None, rows: int) -> Difference:
        names = [field.name for field in self._columns]
        source = None if ours is None else dict(zip(names, ours["texts"], strict=True))
        mirror = None if theirs is None else dict(zip(names, theirs["texts"], strict=True))
        whole = source if source is not None else mirror
        assert whole is not None
        key = {name: whole[name] for name in self._key}
        if ours is None or theirs is None or source is None or mirror is None:
            return Difference("missing" if mirror is None else "extra", key, source, mirror, rows)
        differing = [
            name for name, one, other in zip(names, ours["digests"], theirs["digests"], strict=True) if one != other
        ]
        return Difference(
            "differing",
            key,
            {name: source[name] for name in differing},
            {name: mirror[name] for name in differing},
            rows,
        )

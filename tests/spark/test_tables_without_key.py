"""Tables without a key under REPLICA IDENTITY FULL: the mirror has each row exactly as often as the source."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from pgtide.schema import Column, TableShape
from pgtide.spark import apply
from pgtide.spark.rows import arrow_schema, table_schema
from pgtide.types import PgType
from tests.spark.conftest import Mirrored
from tests.spark.logs import Change, full_delete, full_update, insert, table_shape, truncate, update
from tests.spark.shop import Shop

TIMESTAMP, TIMESTAMPTZ = PgType(1114, "timestamp"), PgType(1184, "timestamptz")
SPAN = PgType(3908, "tsrange", "range", element=TIMESTAMP)
READ = PgType(
    17001, "read", "composite",
    fields=(("n", PgType(21, "int2")), ("x", PgType(700, "float4")), ("at", TIMESTAMPTZ), ("street `no.", TIMESTAMP)),
)  # fmt: skip
READINGS = TableShape(
    17000, "public", "readings", "f",
    (
        Column(1, "sensor", PgType(25, "text")),
        Column(2, "value", PgType(701, "float8")),
        Column(3, "tags", PgType(1009, "_text", kind="array", element=PgType(25, "text"), dimensions=1)),
        Column(4, "seen", PgType(1185, "_timestamptz", kind="array", element=TIMESTAMPTZ)),
        Column(5, "span", SPAN),
        Column(6, "spans", PgType(4533, "tsmultirange", "multirange", element=SPAN)),
        Column(7, "reads", PgType(17002, "_read", kind="array", element=READ)),
        Column(8, "levels", PgType(1005, "_int2", kind="array", element=PgType(21, "int2"))),
        Column(9, "labels", PgType(17003, "hstore")),
    ),
)  # fmt: skip

VALUES: list[dict[str, Any]] = [
    {"sensor": sensor, "value": value, "tags": tags}
    for sensor in ("a", None, "")
    for value in (0.0, -0.0, float("nan"), None)
    for tags in (["x", None], [], None)
]


def moment(microsecond: int, year: int = 2024) -> datetime:
    return datetime(year, 1, 1, microsecond=microsecond, tzinfo=UTC)


def span(microsecond: int, year: int = 2024, lower_inclusive: bool = True) -> dict[str, Any]:
    lower = moment(microsecond, year).replace(tzinfo=None)
    return {
        "lower": lower, "upper": None, "lower_inclusive": lower_inclusive, "upper_inclusive": False, "empty": False,
    }  # fmt: skip


def read(n: int | None = None, x: float | None = None, at: datetime | None = None) -> dict[str, Any]:
    return {"n": n, "x": x, "at": at}


# Each two of these differ somewhere deep inside.
DEEP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"seen": [moment(1)]}, {"seen": [moment(2)]}),
    ({"seen": [moment(1, year=1)]}, {"seen": [moment(2, year=1)]}),
    ({"seen": [moment(999_998, year=9999)]}, {"seen": [moment(999_999, year=9999)]}),
    ({"seen": [None]}, {"seen": []}),
    ({"span": span(1)}, {"span": span(2)}),
    ({"span": span(1)}, {"span": span(1, lower_inclusive=False)}),
    ({"spans": [span(1), span(3)]}, {"spans": [span(2), span(3)]}),
    ({"spans": [span(1)]}, {"spans": [span(1), span(1)]}),
    ({"reads": [read(at=moment(1))]}, {"reads": [read(at=moment(2))]}),
    ({"reads": [read(x=0.0)]}, {"reads": [read(x=-0.0)]}),
    ({"reads": [read(x=float("nan"))]}, {"reads": [read(x=None)]}),
    ({"reads": [read()]}, {"reads": [None]}),
    ({"reads": [read(n=1)]}, {"reads": [read(x=1.0)]}),
    ({"levels": [1, None]}, {"levels": [None, 1]}),
    ({"labels": [("a", "1"), ("b", None)]}, {"labels": [("a", "1")]}),
]


class Source:
    """The table as the source has it, and the changes that its transactions send."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.rows: list[dict[str, Any]] = []

    def transaction(self, truncates: bool) -> list[Change]:
        return [self._change(truncates) for _ in range(self._random.randint(1, 8))]

    def _change(self, truncates: bool) -> Change:
        kind = self._random.random()
        if truncates and kind > 0.9:
            self.rows.clear()
            return truncate(READINGS)
        new = self._random.choice(self._random.choice([VALUES, [row for pair in DEEP for row in pair]]))
        if not self.rows or kind < 0.5:
            self.rows.append(new)
            return insert(READINGS, **new)
        old = self.rows.pop(self._random.randrange(len(self.rows)))
        if kind < 0.7:
            return full_delete(READINGS, **old)
        self.rows.append(new)
        return full_update(READINGS, old, **new)

    def counted(self) -> Counter[str]:
        return counted(pa.Table.from_pylist(self.rows, arrow_schema(table_schema(READINGS))))


def counted(rows: pa.Table) -> Counter[str]:
    return Counter(repr(row) for row in rows.to_pylist())


def mirrored_rows(mirrored: Mirrored) -> Counter[str]:
    return counted(mirrored.spark.table(mirrored.target(READINGS)).toArrow())


def test_values_that_differ_only_deep_inside_make_different_rows(mirrored: Mirrored) -> None:
    """Each row is updated to its other value, then half of the rows go: the new ones are found, and nothing else."""
    rows = [({"sensor": str(n), **old}, {"sensor": str(n), **new}) for n, (old, new) in enumerate(DEEP)]
    expected = Source(seed=0)
    mirrored.log.commit(*(insert(READINGS, **old) for old, _ in rows))
    mirrored.run()
    mirrored.log.commit(*(full_update(READINGS, old, **new) for old, new in rows))
    mirrored.run()
    expected.rows = [new for _, new in rows]
    assert mirrored_rows(mirrored) == expected.counted()
    mirrored.log.commit(*(full_delete(READINGS, **new) for _, new in rows[::2]))
    mirrored.run()
    expected.rows = [new for _, new in rows[1::2]]
    assert mirrored_rows(mirrored) == expected.counted()


@pytest.mark.parametrize(("by_executors", "truncates"), [(False, False), (True, True)])
def test_rows_come_and_go_exactly_as_often(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch, by_executors: bool, truncates: bool
) -> None:
    if by_executors:
        monkeypatch.setattr(apply, "DRIVER_ROWS", 0)
    source = Source(seed=7)
    for _ in range(3):
        for _ in range(6):
            mirrored.log.commit(*source.transaction(truncates))
        mirrored.run()
        assert mirrored_rows(mirrored) == source.counted()


def test_a_row_that_goes_and_is_not_there_parks_the_table(mirrored: Mirrored, spark: SparkSession) -> None:
    mirrored.log.commit(insert(READINGS, sensor="a"), insert(READINGS, sensor="a"))
    mirrored.run()
    spark.sql(f"DELETE FROM {mirrored.target(READINGS)}").collect()
    mirrored.log.commit(full_delete(READINGS, sensor="a"))
    mirrored.run(parked=["public.readings"])
    assert "Drop the mirror table to load it anew" in mirrored.progress()["tables"]["public.readings"]["error"]


def test_an_update_that_does_not_say_of_which_row_parks_the_table(mirrored: Mirrored) -> None:
    keyless = table_shape(key=())
    mirrored.log.commit(insert(keyless, id=1))
    mirrored.log.commit(update(keyless, id=1, amount=2))
    mirrored.run(parked=["public.orders"])
    assert "REPLICA IDENTITY FULL" in mirrored.progress()["tables"]["public.orders"]["error"]


@pytest.mark.timeout(300)
def test_changes_from_before_a_key_was_made_count_rows_and_those_after_it_find_them(shop: Shop) -> None:
    """One of two equal rows goes in the transaction that makes the key: found by the key, both would go."""
    shop.database.execute(
        "CREATE TABLE twins (id int NOT NULL, note text)",
        "ALTER TABLE twins REPLICA IDENTITY FULL",
        "INSERT INTO twins VALUES (1, 'a'), (1, 'a'), (2, 'b')",
    )
    with shop.capturing(), shop.mirroring_from_here() as wait_until_equal:
        wait_until_equal("public.twins")
        with shop.database.connect() as connection, connection.transaction():
            connection.execute("DELETE FROM twins WHERE ctid = (SELECT min(ctid) FROM twins WHERE id = 1)")
            connection.execute("ALTER TABLE twins ADD PRIMARY KEY (id)")
            connection.execute("UPDATE twins SET note = 'c' WHERE id = 2")
        wait_until_equal("public.twins")
        shop.database.execute(
            "UPDATE twins SET id = 3, note = 'd' WHERE id = 1",
            "DELETE FROM twins WHERE id = 2",
            "INSERT INTO twins VALUES (2, 'again')",
        )
        wait_until_equal("public.twins")

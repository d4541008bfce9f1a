"""Tables without a key under REPLICA IDENTITY FULL: the mirror has each row exactly as often as the source."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgtide.schema import Column, TableShape
from pgtide.spark import apply
from pgtide.types import PgType
from tests.spark.conftest import Mirrored
from tests.spark.logs import Change, full_delete, full_update, insert, table_shape, truncate, update

READINGS = TableShape(
    17000, "public", "readings", "f",
    (
        Column(1, "sensor", PgType(25, "text")),
        Column(2, "value", PgType(701, "float8")),
        Column(3, "tags", PgType(1009, "_text", kind="array", element=PgType(25, "text"), dimensions=1)),
    ),
)  # fmt: skip

VALUES = [
    {"sensor": sensor, "value": value, "tags": tags}
    for sensor in ("a", None, "")
    for value in (0.0, -0.0, float("nan"), None)
    for tags in (["x", None], [], None)
]


class Source:
    """The table as the source has it, and the changes that its transactions send."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._rows: list[dict[str, Any]] = []

    def transaction(self, truncates: bool) -> list[Change]:
        return [self._change(truncates) for _ in range(self._random.randint(1, 8))]

    def _change(self, truncates: bool) -> Change:
        kind = self._random.random()
        if truncates and kind > 0.9:
            self._rows.clear()
            return truncate(READINGS)
        new = self._random.choice(VALUES)
        if not self._rows or kind < 0.5:
            self._rows.append(new)
            return insert(READINGS, **new)
        old = self._rows.pop(self._random.randrange(len(self._rows)))
        if kind < 0.7:
            return full_delete(READINGS, **old)
        self._rows.append(new)
        return full_update(READINGS, old, **new)

    def counted(self) -> Counter[str]:
        return Counter(repr(list(row.values())) for row in self._rows)


def mirrored_rows(mirrored: Mirrored) -> Counter[str]:
    rows = mirrored.spark.table(mirrored.target(READINGS)).select("sensor", "value", "tags").collect()
    return Counter(repr(list(row)) for row in rows)


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

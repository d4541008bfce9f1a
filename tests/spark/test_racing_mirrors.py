"""A second mirror gets in between any two steps of a batch of the first, where no lock has kept it out: each change is
applied once, and every point that either has published is true."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pgtide import failpoints
from pgtide.spark.at import points
from tests.spark.conftest import Mirrored
from tests.spark.logs import Change, delete, insert, model, table_shape, update
from tests.waiting import wait_for

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500, key=("id", "region"))

SOME = ("mirror.merged", "mirror.forwarded")
ALL = ("mirror.branch.created", *SOME, "mirror.point.ready", "mirror.point.published", "mirror.reported")


@pytest.fixture(autouse=True)
def nothing_armed_afterwards() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [SOME, pytest.param(ALL, marks=pytest.mark.heavy)], ids=["some", "all"])
def test_second_mirror_between_two_steps_repeats_nothing_and_loses_nothing(
    steps: tuple[str, ...], mirrored: Mirrored, tmp_path: Path
) -> None:
    changes: list[Change] = []
    up_to: dict[int, int] = {}  # by offset, how many of these changes

    def change() -> int:
        number = len(up_to)
        made = [insert(ORDERS, id=number, amount=0, body="large"), insert(ITEMS, id=number, region="n")]
        made += [update(ORDERS, unchanged=["body"], id=earlier, amount=number) for earlier in range(number)]
        made += [delete(ITEMS, id=number - 2, region="n")] if number >= 2 else []
        end = mirrored.log.commit(*made)
        changes.extend(made)
        up_to[end] = len(changes)
        return end

    change()
    mirrored.run()
    for step in steps:
        gate = tmp_path / step
        with mirrored.running():
            wait_for(lambda: mirrored.progress().get("point"), what="the first mirror to begin")
            failpoints.arm(f"{step}=hold:{gate}@1")
            change()
            wait_for(gate.with_name(f"{gate.name}.held").exists, limit_s=60, what=f"the first mirror at {step}")
            mirrored.run()
            gate.touch()
            end = change()
            wait_for(partial(mirrored.has_reached, ORDERS, end), limit_s=60, what="the first mirror to go on")
        failpoints.arm("")
    mirrored.run()
    for shape in (ORDERS, ITEMS):
        mine = [change for change in changes if change.shape == shape]
        assert mirrored.rows(shape) == model(shape, mine)
        version = mirrored.sink.recorded(mirrored.target(shape))
        assert version is not None
        assert version.mark is not None
        assert version.mark.changes == len(mine), "some change was counted twice or not at all"
    published = points(mirrored.spark, mirrored.config, 1000)
    assert published[0].offset == mirrored.log.writer.end_offset
    for point in published:
        known = [change for change in changes[: up_to[point.offset]] if change.shape == ORDERS]
        rows = [row.asDict() for row in point.table("orders").collect()]
        assert sorted(rows, key=lambda row: row["id"]) == list(model(ORDERS, known).values())

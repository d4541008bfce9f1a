"""The mirror: its tables are what the log's changes make of them, however often and in whatever pieces applied."""

from __future__ import annotations

import json

from tests.spark.conftest import Mirrored
from tests.spark.logs import delete, insert, model, table_shape, truncate, update

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500, key=("id", "region"))


def test_every_kind_of_change_arrives(mirrored: Mirrored) -> None:
    first = [insert(ORDERS, id=number, region="n", amount=number, body="large" * number) for number in range(1, 7)]
    mirrored.log.commit(*first)
    mirrored.run()
    assert mirrored.rows(ORDERS) == model(ORDERS, first)
    second = [
        update(ORDERS, id=1, region="s", amount=10, body="new"),
        delete(ORDERS, id=2),
        update(ORDERS, unchanged=["body"], id=3, region="s", amount=30),
        update(ORDERS, old_key={"id": 4}, unchanged=["body"], id=40, region="s", amount=40),
        update(ORDERS, old_key={"id": 5}, unchanged=["body"], id=50, region="s"),
        update(ORDERS, old_key={"id": 6}, unchanged=["body"], id=5, region="s"),
        update(ORDERS, old_key={"id": 50}, unchanged=["body"], id=6, region="s"),
        insert(ORDERS, id=7, region="n", amount=None, body=None),
        insert(ITEMS, id=1, region="n"),
    ]
    mirrored.log.commit(*second)
    mirrored.run()
    assert mirrored.rows(ORDERS) == model(ORDERS, [*first, *(change for change in second if change.shape == ORDERS)])
    assert mirrored.rows(ITEMS) == model(ITEMS, [second[-1]])


def test_truncate_takes_effect_at_its_place(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    mirrored.run()
    mirrored.log.commit(insert(ORDERS, id=2), truncate(ORDERS), insert(ORDERS, id=3, body="after"))
    mirrored.run()
    assert list(mirrored.rows(ORDERS)) == [(3,)]
    assert list(mirrored.rows(ITEMS)) == [(1, "n")]
    mirrored.log.commit(truncate(ORDERS))
    mirrored.run()
    assert mirrored.rows(ORDERS) == {}


def test_running_again_changes_nothing(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1), insert(ORDERS, id=2))
    end = mirrored.log.commit(update(ORDERS, id=1, amount=5))
    mirrored.run()
    before = mirrored.rows(ORDERS), mirrored.snapshots(ORDERS), mirrored.mark(ORDERS)
    mirrored.run()
    assert (mirrored.rows(ORDERS), mirrored.snapshots(ORDERS), mirrored.mark(ORDERS)) == before
    assert mirrored.mark(ORDERS) == end


def test_progress_says_how_far_each_table_is(mirrored: Mirrored) -> None:
    end = mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    mirrored.run()
    progress = json.loads((mirrored.log.path / "readers" / "mirror.json").read_text())
    assert progress["offset"] == end
    assert progress["log_id"] == mirrored.log.identity.log_id
    assert progress["tables"]["public.orders"] == {
        "state": "streaming",
        "rows_applied": 1,
        "applied_offset": end,
        "error": None,
    }
    assert progress["point"]["offset"] == end

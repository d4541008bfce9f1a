"""The mirror: its tables are what the log's changes make of them, however often and in whatever pieces applied."""

from __future__ import annotations

from functools import partial

import pytest

from pgtide.errors import PgtideError
from pgtide.lsn import format_lsn
from pgtide.schema import Column, TableShape
from pgtide.sinks.iceberg_table import IcebergTable
from pgtide.spark import at
from pgtide.spark.targets import points_target
from pgtide.spark.wide_fold import Survey, WideFold
from tests.spark.conftest import Mirrored
from tests.spark.logs import INT8, delete, insert, model, table_shape, truncate, update
from tests.waiting import wait_for

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
    progress = mirrored.progress()
    assert progress["offset"] == end
    assert progress["log_id"] == mirrored.log.identity.log_id
    assert progress["tables"]["public.orders"] == {
        "state": "streaming",
        "rows_applied": 1,
        "applied_offset": end,
        "error": None,
        "load": None,
        "load_error": None,
    }
    assert progress["point"]["offset"] == end


@pytest.mark.parametrize(
    ("limit", "run_bytes"),
    [("DRIVER_ROWS", 1), ("_DECODED_BYTES", 1 << 20)],
    ids=["many rows, a block at a time", "large when decoded, all in one run"],
)
def test_many_or_large_changes_are_folded_by_executors_to_the_same_rows(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch, limit: str, run_bytes: int
) -> None:
    surveyed: list[Survey] = []
    survey = WideFold.survey

    def counted(wide: WideFold) -> Survey:
        surveyed.append(survey(wide))
        return surveyed[-1]

    monkeypatch.setattr(WideFold, "survey", counted)
    monkeypatch.setattr(f"pgtide.spark.apply.{limit}", 0)
    monkeypatch.setattr("pgtide.spark.wide_fold._RUN_BYTES", run_bytes)
    first = [insert(ORDERS, id=number, region="n", body="large" * number) for number in range(1, 20)]
    mirrored.log.commit(*first)
    second = [
        update(ORDERS, unchanged=["body"], id=3, amount=30),
        update(ORDERS, old_key={"id": 4}, id=40, body="moved"),
        delete(ORDERS, id=5),
    ]
    mirrored.log.commit(*second)
    mirrored.run()
    assert mirrored.rows(ORDERS) == model(ORDERS, [*first, *second])
    third = [
        update(ORDERS, unchanged=["body"], id=6, amount=60),
        update(ORDERS, old_key={"id": 7}, unchanged=["body"], id=70),
        update(ORDERS, old_key={"id": 70}, unchanged=["body"], id=7, amount=7),
        update(ORDERS, old_key={"id": 8}, unchanged=["body"], id=80),
    ]
    mirrored.log.commit(*third)
    mirrored.run()
    assert mirrored.rows(ORDERS) == model(ORDERS, [*first, *second, *third])
    fourth = [insert(ORDERS, id=100), truncate(ORDERS), insert(ORDERS, id=101), delete(ORDERS, id=101)]
    mirrored.log.commit(*fourth, insert(ORDERS, id=102))
    mirrored.run()
    assert list(mirrored.rows(ORDERS)) == [(102,)]
    fifth = [insert(ORDERS, id=102)]
    for first_id in (300, 200):  # blocks that have no key in common
        fifth += [insert(ORDERS, id=first_id + number, body="large") for number in range(5)]
        fifth += [
            delete(ORDERS, id=first_id),
            update(ORDERS, old_key={"id": first_id + 1}, unchanged=["body"], id=first_id, amount=1),
            update(ORDERS, old_key={"id": first_id + 2}, id=first_id + 9),
        ]
        mirrored.log.commit(*fifth[-8:])
    mirrored.run()
    assert mirrored.rows(ORDERS) == model(ORDERS, fifth)
    assert len(surveyed) == 4, "each run of the mirror"


def test_trouble_of_one_table_parks_it_and_the_others_go_on(mirrored: Mirrored) -> None:
    mirrored.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS lake.{mirrored.config.mirror.namespace}")
    mirrored.spark.sql(f"CREATE TABLE {mirrored.target(ORDERS)} (id bigint) USING iceberg")
    mirrored.spark.sql(f"INSERT INTO {mirrored.target(ORDERS)} VALUES (7)")
    end = mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    mirrored.run(parked=["public.orders"])
    assert list(mirrored.rows(ITEMS)) == [(1, "n")]
    progress = mirrored.progress()
    assert progress["tables"]["public.orders"]["state"] == "parked"
    assert "DROP TABLE" in progress["tables"]["public.orders"]["error"]
    assert progress["tables"]["public.items"]["state"] == "streaming"
    assert progress["offset"] == 0, "a parked table still needs its changes"
    point = at(mirrored.spark, config=mirrored.config)
    assert (point.offset, list(point.versions), point.not_covered) == (end, ["public.items"], ("public.orders",))
    with pytest.raises(PgtideError, match=r"does not cover public\.orders"):
        point.table("orders")


def test_parked_table_catches_up_by_itself_once_mended(mirrored: Mirrored) -> None:
    mirrored.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS lake.{mirrored.config.mirror.namespace}")
    mirrored.spark.sql(f"CREATE TABLE {mirrored.target(ORDERS)} (id bigint) USING iceberg")
    mirrored.spark.sql(f"INSERT INTO {mirrored.target(ORDERS)} VALUES (7)")
    mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    with mirrored.running():
        wait_for(lambda: mirrored.states().get("public.orders") == "parked", limit_s=60, what="orders to be parked")
        mirrored.spark.sql(f"DROP TABLE {mirrored.target(ORDERS)}")
        wait_for(lambda: mirrored.states()["public.orders"] == "streaming", limit_s=60, what="orders to be taken up")
        assert list(mirrored.rows(ORDERS)) == [(1,)]


def test_parked_table_that_is_far_behind_catches_up_one_batch_at_a_time(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others need not wait for all of it; and no point says that it has what it does not have yet."""
    monkeypatch.setattr("pgtide.spark.mirror_tables._BATCH_ROWS", 4)
    target, changes = mirrored.target(ORDERS), [insert(ORDERS, id=number) for number in range(10)]
    mirrored.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS lake.{mirrored.config.mirror.namespace}")
    mirrored.spark.sql(f"CREATE TABLE {target} (id bigint) USING iceberg")
    mirrored.spark.sql(f"INSERT INTO {target} VALUES (7)")
    for number, change in enumerate(changes):
        mirrored.log.commit(change, insert(ITEMS, id=number, region="n"))
    with mirrored.running():
        wait_for(lambda: mirrored.has_reached(ITEMS, 20), limit_s=120, what="the others to be at the end")
        wait_for(lambda: mirrored.states().get("public.orders") == "parked", limit_s=60, what="orders to be parked")
        mirrored.spark.sql(f"DROP TABLE {target}")
        wait_for(lambda: mirrored.has_reached(ORDERS, 4), limit_s=60, what="orders to be taken up")
        end = mirrored.log.commit(insert(ITEMS, id=99, region="n"))
        wait_for(lambda: mirrored.states()["public.orders"] == "streaming", limit_s=120, what="orders to catch up")
        wait_for(lambda: mirrored.progress()["point"]["offset"] == end, limit_s=60, what="a point at the end")
    assert mirrored.rows(ORDERS) == model(ORDERS, changes)
    assert sorted(mirrored.rows(ITEMS)) == [*((number, "n") for number in range(10)), (99, "n")]
    table = IcebergTable(mirrored.spark, target)
    said = table.summaries(table.head())
    versions = {snapshot_id: int(one["pgtide.offset"]) for snapshot_id, one in said if "pgtide.offset" in one}
    assert sorted(versions.values()) == [0, 4, 8, 12, 16, 20]
    points = mirrored.spark.table(points_target(mirrored.config)).where("`table` = 'public.orders' AND covered")
    told = points.where(f"log_id = '{mirrored.log.identity.log_id}'").select("version", "offset").collect()
    assert {(versions[row["version"]], row["offset"]) for row in told} <= {(20, 20), (20, end)}
    assert told


def test_value_that_the_mirror_never_had_parks_the_table(mirrored: Mirrored) -> None:
    mirrored.log.commit(update(ORDERS, unchanged=["body"], id=1, amount=1))
    mirrored.run(parked=["public.orders"])
    progress = mirrored.progress()
    assert progress["tables"]["public.orders"]["state"] == "parked"
    assert "large value" in progress["tables"]["public.orders"]["error"]
    assert mirrored.rows(ORDERS) == {}


def test_two_drivers_on_the_same_tables_apply_each_change_once(mirrored: Mirrored) -> None:
    changes = [insert(ORDERS, id=number, amount=0) for number in range(5)]
    mirrored.log.commit(*changes)
    with mirrored.running(), mirrored.running():
        for round_number in range(6):
            changed = [update(ORDERS, id=number, amount=round_number) for number in range(5)]
            changed.append(insert(ORDERS, id=100 + round_number, amount=round_number))
            changes += changed
            end = mirrored.log.commit(*changed)
            wait_for(partial(mirrored.has_reached, ORDERS, end), limit_s=60, what="the round to arrive")
    assert mirrored.rows(ORDERS) == model(ORDERS, changes)
    version = mirrored.sink.recorded(mirrored.target(ORDERS))
    assert version is not None
    assert version.mark is not None
    assert version.mark.changes == len(changes), "some change was counted twice or not at all"


def test_point_pins_all_tables_to_one_moment(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1, amount=5), insert(ITEMS, id=1, region="n", amount=5))
    mirrored.run()
    first = at(mirrored.spark, config=mirrored.config)
    mirrored.log.commit(update(ORDERS, id=1, amount=6))
    mirrored.run()
    assert first.table("public.orders").collect()[0]["amount"] == 5
    later = at(mirrored.spark, config=mirrored.config)
    assert later.table("orders").collect()[0]["amount"] == 6
    assert later.table("items").collect()[0]["amount"] == 5
    assert at(mirrored.spark, first.lsn, mirrored.config) == first
    assert at(mirrored.spark, format_lsn(later.lsn - 1), mirrored.config).offset == first.offset
    assert first.commit_timestamp is not None
    assert at(mirrored.spark, first.commit_timestamp, mirrored.config).offset == first.offset
    with pytest.raises(PgtideError, match="no consistent point"):
        at(mirrored.spark, "0/1", mirrored.config)
    assert sorted(first.create_views()) == ["items", "orders"]
    joined = mirrored.spark.sql("SELECT o.amount = i.amount AS same FROM orders o JOIN items i USING (id)")
    assert [row["same"] for row in joined.collect()] == [True]


def test_added_column_is_added_and_a_dropped_one_stays_null(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1, region="n", body="b"))
    mirrored.run()
    columns = (*(column for column in ORDERS.columns if column.name != "body"), Column(9, "vat", INT8))
    later = TableShape(ORDERS.relation_oid, "public", "orders", "d", columns)
    mirrored.log.commit(insert(later, id=2, vat=19))
    mirrored.log.commit(update(later, id=1, vat=7))
    mirrored.run()
    found = {row["id"]: row.asDict() for row in mirrored.spark.table(mirrored.target(ORDERS)).collect()}
    assert found == {
        1: {"id": 1, "region": None, "amount": None, "body": None, "vat": 7},
        2: {"id": 2, "region": None, "amount": None, "body": None, "vat": 19},
    }

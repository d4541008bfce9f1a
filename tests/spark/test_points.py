"""Points, as they are listed and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgtide.errors import ConfigurationError, PgtideError
from pgtide.failpoints import FailpointReached
from pgtide.lsn import format_lsn
from pgtide.spark import at
from pgtide.spark.at import points
from pgtide.spark.targets import POINTS_NAMESPACE, POINTS_TABLE
from tests.arming import armed
from tests.spark.conftest import Mirrored
from tests.spark.logs import insert, table_shape, update
from tests.waiting import wait_for

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500, key=("id", "region"))
LATE = table_shape("late", oid=16600)
PURCHASES = table_shape("purchases", oid=ORDERS.relation_oid)


def test_points_are_listed_newest_first_each_with_what_it_covers(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1, amount=1), insert(ITEMS, id=1, region="n"))
    mirrored.run()
    mirrored.log.commit(update(ORDERS, id=1, amount=2))
    mirrored.run()
    mirrored.spark.sql(f"CREATE TABLE {mirrored.target(LATE)} (id bigint) USING iceberg")
    mirrored.spark.sql(f"INSERT INTO {mirrored.target(LATE)} VALUES (7)")
    mirrored.log.commit(insert(LATE, id=1))
    mirrored.run(parked=["public.late"])

    listed = points(mirrored.spark, mirrored.config, limit=10)
    assert [format_lsn(point.lsn) for point in listed] == [format_lsn(lsn) for lsn in (392, 292, 192)]
    assert [point.not_covered for point in listed] == [("public.late",), (), ()]
    assert [list(point.versions) for point in listed] == [["public.items", "public.orders"]] * 3
    assert listed[0].versions["public.orders"] == listed[1].versions["public.orders"]
    assert listed[1].versions["public.orders"] != listed[2].versions["public.orders"]
    assert listed[1].versions["public.items"] == listed[2].versions["public.items"]
    assert points(mirrored.spark, mirrored.config, limit=2) == listed[:2]
    assert [at(mirrored.spark, point.lsn, mirrored.config) for point in listed] == listed
    with pytest.raises(ConfigurationError, match="names no point"):
        at(mirrored.spark, "yesterday", mirrored.config)


def test_a_mirror_that_starts_again_says_at_once_which_point_is_the_latest(mirrored: Mirrored) -> None:
    end = mirrored.log.commit(insert(ORDERS, id=1))
    mirrored.run()
    (mirrored.log.path / "readers" / "mirror.json").unlink()
    mirrored.log.commit(insert(ORDERS, id=2))
    with armed("mirror.point.ready=raise"), pytest.raises(FailpointReached):
        mirrored.run()
    assert mirrored.progress()["point"]["offset"] == end


def test_point_that_cannot_be_written_is_published_when_it_can_be_and_tables_go_on(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1))
    mirrored.run()
    lake = Path(mirrored.spark.conf.get("spark.sql.catalog.lake.warehouse") or "")
    metadata = lake / POINTS_NAMESPACE / POINTS_TABLE / "metadata"
    away = metadata.with_name("away")
    with mirrored.running():
        metadata.rename(away)
        metadata.touch()  # a file where the folder was: nothing can be written into it
        try:
            end = mirrored.log.commit(insert(ORDERS, id=2))
            wait_for(lambda: mirrored.progress().get("point_error"), limit_s=60, what="the error to be told")
            assert mirrored.has_reached(ORDERS, end)
            assert mirrored.states() == {"public.orders": "streaming"}
        finally:
            metadata.unlink()
            away.rename(metadata)
        wait_for(lambda: (mirrored.progress()["point"] or {}).get("offset") == end, limit_s=60, what="the point")
        assert mirrored.progress()["point_error"] is None


def test_the_old_name_of_a_renamed_table_is_not_covered_any_more(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    mirrored.run()
    mirrored.log.commit(insert(PURCHASES, id=2))
    mirrored.run()
    mirrored.log.commit(insert(ITEMS, id=2, region="n"))
    mirrored.run()
    *later, first = points(mirrored.spark, mirrored.config, limit=3)
    assert (list(first.versions), first.not_covered) == (["public.items", "public.orders"], ())
    for point in later:
        assert (list(point.versions), point.not_covered) == (["public.items", "public.purchases"], ("public.orders",))
    with pytest.raises(PgtideError, match=r"does not cover public\.orders: it was loading, parked, renamed"):
        later[0].table("orders")

"""Points, as they are listed and found again."""

from __future__ import annotations

import itertools
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from pgtide.errors import ConfigurationError, PgtideError
from pgtide.failpoints import FailpointReached
from pgtide.lsn import format_lsn
from pgtide.sinks import Mark, Version
from pgtide.sinks.iceberg import IcebergSink
from pgtide.spark import at
from pgtide.spark.at import points
from pgtide.spark.points import Coverage, Moment, Points
from pgtide.spark.targets import POINTS_NAMESPACE, POINTS_TABLE, points_target
from tests.arming import armed
from tests.spark.conftest import Mirrored
from tests.spark.lake_faults import metadata_folder, not_writable
from tests.spark.logs import BEGINNING, insert, table_shape, update
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


class BusySink(IcebergSink):
    """Another mirror with the same catalog publishes a point before each of the first so many replacements."""

    def __init__(self, spark: SparkSession, other: Points, times: int) -> None:
        super().__init__(spark)
        self._other, self._left = other, times

    def replace(self, version: Version, rows: DataFrame | None, mark: Mark) -> Version:
        if self._left:
            self._left -= 1
            self._other.publish(moment(100 - self._left), {"public.theirs": Coverage(1, covered=True)})
        return super().replace(version, rows, mark)


def moment(offset: int) -> Moment:
    return Moment(offset, offset, BEGINNING)


def test_old_points_go_also_while_another_mirror_publishes_into_the_same_table(spark: SparkSession) -> None:
    target = f"lake.points_{uuid.uuid4().hex[:12]}.points"
    busy = BusySink(spark, Points(spark, IcebergSink(spark), target, "theirs"), times=3)
    ours = Points(spark, busy, target, "ours")
    for offset in (1, 2, 3):
        ours.publish(moment(offset), {"public.orders": Coverage(offset, covered=True)})
    ours.prune(keep_s=0)
    left = spark.table(target).select("log_id", "offset").collect()
    assert sorted(map(tuple, left)) == [("ours", 3), ("theirs", 98), ("theirs", 99), ("theirs", 100)]
    assert ours.versions() == {"public.orders": {3}}


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
    with mirrored.running():
        with not_writable(metadata_folder(mirrored.spark, POINTS_NAMESPACE, POINTS_TABLE)):
            end = mirrored.log.commit(insert(ORDERS, id=2))
            wait_for(lambda: mirrored.progress().get("point_error"), limit_s=60, what="the error to be told")
            assert mirrored.has_reached(ORDERS, end)
            assert mirrored.states() == {"public.orders": "streaming"}
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


def test_points_of_other_logs_in_the_same_table_hold_up_points_at_most_and_are_not_ours(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror of another log publishes whenever this one has looked at what is published, for a while."""
    target = points_target(mirrored.config)
    other = Points(mirrored.spark, IcebergSink(mirrored.spark), target, f"beside {mirrored.config.mirror.namespace}")
    far_ahead, busy = itertools.count(1_000_000), threading.Event()
    busy.set()

    class WithAnother(IcebergSink):
        def evolve(self, version: Version, *arguments: Any) -> Version:
            if version.target == target and busy.is_set():
                assert other.publish(Moment(next(far_ahead), 1_000_000, datetime.now(UTC)), {})
            return super().evolve(version, *arguments)

    monkeypatch.setattr("pgtide.spark.mirror.IcebergSink", WithAnother)
    monkeypatch.setattr("pgtide.spark.points._OPEN_ATTEMPTS", 2)
    assert other.publish(Moment(1, 1, None), {})  # a table to look at
    end = mirrored.log.commit(insert(ORDERS, id=1))
    with mirrored.running():
        wait_for(lambda: mirrored.progress().get("point_error"), what="the conflict to be told")
        assert "has moved" in mirrored.progress()["point_error"]
        wait_for(lambda: mirrored.has_reached(ORDERS, end), what="the change to arrive")
        assert mirrored.states() == {"public.orders": "streaming"}
        busy.clear()
        wait_for(lambda: (mirrored.progress()["point"] or {}).get("offset") == end, what="the point")
        assert mirrored.progress()["point_error"] is None
    assert [point.offset for point in points(mirrored.spark, mirrored.config, limit=10)] == [end]


def test_table_of_somebody_else_in_the_place_of_the_points_is_told_and_left_alone_and_tables_go_on(
    mirrored: Mirrored, tmp_path: Path
) -> None:
    target = in_a_lake_of_its_own(mirrored, tmp_path / "lake")
    mirrored.spark.sql(f"CREATE TABLE {target} (x int, y int) USING iceberg")
    mirrored.spark.sql(f"INSERT INTO {target} VALUES (1, 2)")
    end = mirrored.log.commit(insert(ORDERS, id=1))
    with mirrored.running():
        wait_for(lambda: mirrored.progress().get("point_error"), what="the error to be told")
        told = mirrored.progress()["point_error"]
        assert told.startswith(f"{target} is not a table of points")
        assert "[mirror] catalog" in told
        wait_for(lambda: mirrored.has_reached(ORDERS, end), what="the change to arrive")
        assert mirrored.states() == {"public.orders": "streaming"}
        assert [tuple(row) for row in mirrored.spark.table(target).collect()] == [(1, 2)]
        mirrored.spark.sql(f"DROP TABLE {target}")
        wait_for(lambda: (mirrored.progress()["point"] or {}).get("offset") == end, what="the point")
        assert mirrored.progress()["point_error"] is None


def test_points_that_are_dropped_under_a_running_mirror_begin_anew_with_all_tables(
    mirrored: Mirrored, tmp_path: Path
) -> None:
    target = in_a_lake_of_its_own(mirrored, tmp_path / "lake")
    end = mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    with mirrored.running():
        wait_for(lambda: (mirrored.progress().get("point") or {}).get("offset") == end, what="the first point")
        mirrored.spark.sql(f"DROP TABLE {target}")
        end = mirrored.log.commit(insert(ORDERS, id=2))
        wait_for(lambda: (mirrored.progress()["point"] or {}).get("offset") == end, what="the point")
    (point,) = points(mirrored.spark, mirrored.config, limit=10)
    assert (point.offset, list(point.versions), point.not_covered) == (end, ["public.items", "public.orders"], ())


def in_a_lake_of_its_own(mirrored: Mirrored, warehouse: Path) -> str:
    """Tells the mirror to use another catalog of the session, whose points are nobody else's; gives their table."""
    name = f"apart_{mirrored.config.mirror.namespace}"
    for option, value in catalog_options(mirrored.spark).items():
        mirrored.spark.conf.set(f"spark.sql.catalog.{name}{option}", value)
    mirrored.spark.conf.set(f"spark.sql.catalog.{name}.warehouse", str(warehouse))
    mirror = mirrored.config.mirror.model_copy(update={"catalog": name})
    mirrored.config = mirrored.config.model_copy(update={"mirror": mirror}).at(mirrored.config.file)
    mirrored.spark.sql(f"CREATE NAMESPACE {name}.{POINTS_NAMESPACE}")
    return points_target(mirrored.config)


def catalog_options(spark: SparkSession) -> dict[str, str]:
    names = ("", ".type", ".cache-enabled")
    return {name: spark.conf.get(f"spark.sql.catalog.lake{name}") or "" for name in names}

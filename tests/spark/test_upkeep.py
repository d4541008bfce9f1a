"""Upkeep: tables are compacted and old versions let go while the mirror goes on, and nothing that is kept is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

import pytest

from pgtide.config import Config
from pgtide.errors import PgtideError
from pgtide.log.control import record_upkeep
from pgtide.sinks import Conflict
from pgtide.spark import at
from pgtide.spark.at import points
from tests.arming import armed
from tests.spark.conftest import Mirrored
from tests.spark.logs import Change, insert, model, table_shape, update
from tests.spark.test_barriers import ask
from tests.waiting import wait_for

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500, key=("id", "region"))

AT_EACH_START_MINUTES = 1e-6
NOT_AT_ALL_HOURS = 1e-7
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def keeping(mirrored: Mirrored, **settings: float) -> Mirrored:
    """The same mirror with upkeep whenever it starts."""
    mirror = mirrored.config.mirror.model_copy(update={"compact_minutes": AT_EACH_START_MINUTES, **settings})
    config: Config = mirrored.config.model_copy(update={"mirror": mirror}).at(mirrored.config.file)
    return replace(mirrored, config=config)


def commit_in_batches(mirrored: Mirrored, rounds: Sequence[int]) -> list[tuple[int, list[Change]]]:
    """One transaction and one batch for each round; returns the LSN of each, and all changes of orders up to it."""
    made: list[tuple[int, list[Change]]] = []
    changes: list[Change] = []
    for number in rounds:
        new = [
            insert(ORDERS, id=number, amount=0, body="large"),
            update(ORDERS, unchanged=["body"], id=0, amount=number),
        ]
        mirrored.log.commit(*new, *([] if made else [insert(ITEMS, id=1, region="n")]))
        lsn = mirrored.log.writer.durable_lsn
        ask(mirrored, lsn)
        changes = [*changes, *new]
        made.append((lsn, changes))
    return made


def data_files(mirrored: Mirrored) -> int:
    """In the folder of the table, whether they still belong to it or not."""
    warehouse = urlparse(mirrored.spark.conf.get("spark.sql.catalog.lake.warehouse") or "").path
    return len(list((Path(warehouse) / mirrored.config.mirror.namespace / "orders" / "data").glob("*.parquet")))


def live_files(mirrored: Mirrored) -> int:
    return mirrored.spark.table(f"{mirrored.target(ORDERS)}.files").count()


def test_kept_points_stay_readable_and_others_are_refused(mirrored: Mirrored) -> None:
    made = commit_in_batches(mirrored, range(5))
    mirrored.run()
    before = live_files(mirrored), mirrored.mark(ORDERS), points(mirrored.spark, mirrored.config, 100)
    keeping(mirrored).run()
    assert live_files(mirrored) < before[0], "it was compacted"
    assert (mirrored.mark(ORDERS), points(mirrored.spark, mirrored.config, 100)) == before[1:]
    assert len(before[2]) == 10, "for each transaction that of its commit, and that of the barrier"
    held = at(mirrored.spark, made[0][0], mirrored.config)
    for lsn, changes in (made[0], made[3]):
        rows = at(mirrored.spark, lsn, mirrored.config).table("orders").collect()
        assert {(row["id"],): row.asDict() for row in rows} == model(ORDERS, changes)

    files = data_files(mirrored)
    brief = keeping(mirrored, keep_points_hours=NOT_AT_ALL_HOURS)
    brief.run()
    assert [point.offset for point in points(mirrored.spark, brief.config, 100)] == [mirrored.log.writer.end_offset]
    with pytest.raises(PgtideError, match=r"not kept any more(.|\n)*keep_points_hours"):
        at(mirrored.spark, made[3][0], brief.config)
    with pytest.raises(PgtideError, match="not kept any more"):
        held.table("orders")
    assert mirrored.mark(ORDERS) == before[1]
    assert mirrored.rows(ORDERS) == model(ORDERS, made[-1][1])

    last = update(ORDERS, unchanged=["body"], id=0, amount=99)
    mirrored.log.commit(last)
    brief.run()
    brief.run()  # the round that follows the point
    assert data_files(mirrored) < files, "files go with the versions that had them"
    assert mirrored.rows(ORDERS) == model(ORDERS, [*made[-1][1], last])
    latest = at(mirrored.spark, config=brief.config)
    assert (latest.offset, sorted(latest.versions)) == (
        mirrored.log.writer.end_offset,
        ["public.items", "public.orders"],
    )
    assert {row["id"]: row["amount"] for row in latest.table("orders").collect()}[0] == 99
    assert latest.table("items").count() == 1, "what was said of it by a point that went is still known"


def test_trouble_of_upkeep_is_told_and_stops_nothing(mirrored: Mirrored) -> None:
    mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))
    mirrored.run()
    with armed("mirror.upkeep.compacted=raise,mirror.points.pruned=raise"):
        mirrored.log.commit(insert(ORDERS, id=7, amount=7))
        keeping(mirrored).run()
    told = mirrored.progress()["upkeep"]["errors"]
    assert sorted(told) == ["`lake`.`pgtide`.`points`", "public.items", "public.orders"]
    assert set(mirrored.states().values()) == {"streaming"}
    assert (7,) in mirrored.rows(ORDERS)
    keeping(mirrored).run()
    assert mirrored.progress()["upkeep"]["errors"] == {}


def test_without_a_schedule_nothing_is_kept_up(mirrored: Mirrored) -> None:
    record_upkeep(mirrored.log.path, LONG_AGO)
    mirrored.log.commit(insert(ORDERS, id=1))
    keeping(mirrored, compact_minutes=0.0).run()
    assert mirrored.progress()["upkeep"] == {"finished_at": LONG_AGO.isoformat(), "errors": {}}


def test_compaction_by_somebody_else_loses_no_change_and_repeats_none(mirrored: Mirrored) -> None:
    changes = [insert(ORDERS, id=number, amount=0) for number in range(5)]
    mirrored.log.commit(*changes)
    stop = threading.Event()
    compacted: list[int] = []

    def compact() -> None:
        while not stop.is_set():
            try:
                mirrored.sink.compact(mirrored.target(ORDERS))
                compacted.append(1)
            except Conflict:
                pass

    with keeping(mirrored).running():
        wait_for(lambda: mirrored.mark(ORDERS) is not None, limit_s=60, what="the table")
        other = threading.Thread(target=compact)
        other.start()
        try:
            for number in range(8):
                made = [update(ORDERS, id=0, amount=number), insert(ORDERS, id=10 + number, amount=number)]
                changes += made
                end = mirrored.log.commit(*made)
                wait_for(partial(mirrored.has_reached, ORDERS, end), limit_s=60, what="the round to arrive")
        finally:
            stop.set()
            other.join()
    assert compacted
    assert mirrored.rows(ORDERS) == model(ORDERS, changes)
    version = mirrored.sink.recorded(mirrored.target(ORDERS))
    assert version is not None
    assert version.mark is not None
    assert version.mark.changes == len(changes)

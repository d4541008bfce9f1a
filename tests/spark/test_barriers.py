"""Barriers: the mirror publishes a point at exactly the LSN that somebody asks for, or says that it is too late."""

from __future__ import annotations

import secrets
import threading
from datetime import UTC, datetime, timedelta

import pytest

from pgtide.errors import TransientError
from pgtide.log.control import Barrier, BarrierState, barrier, barriers, put_barrier
from pgtide.spark import at
from pgtide.spark.request_point import Limits, publish_at
from pgtide.spark.targets import POINTS_NAMESPACE, POINTS_TABLE
from tests.spark.conftest import Mirrored
from tests.spark.lake_faults import metadata_folder, not_readable, not_writable
from tests.spark.logs import insert, table_shape, update
from tests.waiting import wait_for

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500, key=("id", "region"))


def ask(mirrored: Mirrored, lsn: int | None, seconds: float = 600) -> Barrier:
    asked = Barrier(secrets.token_hex(4), lsn, datetime.now(UTC) + timedelta(seconds=seconds))
    put_barrier(mirrored.log.path, asked)
    return asked


def state(mirrored: Mirrored, asked: Barrier) -> BarrierState | None:
    found = barrier(mirrored.log.path, asked.id)
    return found.state if found else None


def wait_for_state(mirrored: Mirrored, asked: Barrier, wanted: BarrierState | None) -> None:
    wait_for(lambda: state(mirrored, asked) == wanted, limit_s=60, what=f"the barrier to be {wanted}")


def test_a_batch_ends_at_the_barrier_and_a_point_is_published_there(mirrored: Mirrored) -> None:
    first_end = mirrored.log.commit(insert(ORDERS, id=1, amount=1), insert(ITEMS, id=1, region="n"))  # ends at LSN 200
    second_end = mirrored.log.commit(update(ORDERS, id=1, amount=2))  # 300
    last_end = mirrored.log.commit(update(ORDERS, id=1, amount=3))  # 400
    asked = [ask(mirrored, 250), ask(mirrored, 300), ask(mirrored, 350)]
    mirrored.run()
    assert [state(mirrored, one) for one in asked] == [BarrierState.PUBLISHED] * 3
    seen = {lsn: at(mirrored.spark, lsn, mirrored.config) for lsn in (250, 300, 350, 400)}
    assert {lsn: (point.lsn, point.offset) for lsn, point in seen.items()} == {
        250: (250, first_end),
        300: (300, second_end),
        350: (350, second_end),
        400: (392, last_end),  # the commit itself, eight bytes before its end
    }
    amounts = [point.table("orders").collect()[0]["amount"] for point in seen.values()]
    assert amounts == [1, 2, 2, 3]
    assert all(list(point.versions) == ["public.items", "public.orders"] for point in seen.values())


def test_a_running_mirror_answers_whatever_it_is_asked(mirrored: Mirrored) -> None:
    end = mirrored.log.commit(insert(ORDERS, id=1, amount=1))  # ends at LSN 200
    mirrored.log.commit(insert(ORDERS, id=2, amount=1))  # 300
    expired = ask(mirrored, 250, seconds=-1)
    with mirrored.running():
        greeting = ask(mirrored, None)
        wait_for_state(mirrored, greeting, BarrierState.SEEN)
        wait_for(lambda: mirrored.has_reached(ORDERS, mirrored.log.writer.end_offset), what="the changes to arrive")
        late = ask(mirrored, 250)
        wait_for_state(mirrored, late, BarrierState.PASSED)
        wait_for_state(mirrored, expired, None)

        early = ask(mirrored, 500)
        wait_for_state(mirrored, early, BarrierState.SEEN)
        mirrored.spark.sql(f"UPDATE {mirrored.target(ORDERS)} SET amount = 77 WHERE id = 1")
        mirrored.log.writer.advance(650)  # the server was idle up to there
        wait_for_state(mirrored, early, BarrierState.PUBLISHED)
        earlier = ask(mirrored, 450)
        wait_for_state(mirrored, earlier, BarrierState.PASSED)
    point = at(mirrored.spark, 500, mirrored.config)
    assert (point.lsn, point.offset) == (500, mirrored.log.writer.end_offset)
    amounts = {row["id"]: row["amount"] for row in point.table("orders").collect()}
    assert amounts == {1: 77, 2: 1}, "what somebody else wrote must not hide behind an older version"
    assert at(mirrored.spark, 499, mirrored.config).lsn == 292
    assert mirrored.progress()["point"]["lsn"] == "0/1F4"
    assert end < point.offset
    assert len(barriers(mirrored.log.path)) == 4, "answered ones stay until they are fetched or expire"


def test_who_asks_for_a_point_while_the_lake_cannot_be_written_waits_or_is_told_why_and_gets_it_afterwards(
    mirrored: Mirrored,
) -> None:
    def publish(lsn: int, limit_s: float) -> bool:
        limits = Limits(mirror_s=60, point_s=limit_s)
        return publish_at(mirrored.config, lsn, limits, threading.Event(), lambda _: None)

    end = mirrored.log.commit(insert(ORDERS, id=1))  # ends at LSN 200
    with mirrored.running():
        wait_for(lambda: (mirrored.progress().get("point") or {}).get("offset") == end, what="the first point")
        with not_writable(metadata_folder(mirrored.spark, POINTS_NAMESPACE, POINTS_TABLE)):
            mirrored.log.writer.advance(300)
            patient = ask(mirrored, 250)
            wait_for(lambda: mirrored.progress()["point_error"], what="the error to be told")
            with pytest.raises(
                TransientError, match="no point at 0/F5 within 1 s: the mirror cannot write it, and"
            ) as told:
                publish(245, limit_s=1.0)
            assert mirrored.progress()["point_error"] in told.value.what
            assert state(mirrored, patient) is BarrierState.SEEN
            assert mirrored.states() == {"public.orders": "streaming"}
        wait_for_state(mirrored, patient, BarrierState.PUBLISHED)
        assert publish(260, limit_s=120.0)
    assert [at(mirrored.spark, lsn, mirrored.config).lsn for lsn in (250, 259, 260)] == [250, 250, 260]


def test_point_that_is_asked_for_does_not_cover_a_table_that_cannot_be_read_and_the_next_one_does(
    mirrored: Mirrored,
) -> None:
    mirrored.log.commit(insert(ORDERS, id=1), insert(ITEMS, id=1, region="n"))  # ends at LSN 200
    namespace = mirrored.config.mirror.namespace
    with mirrored.running():
        wait_for(lambda: mirrored.progress().get("point"), what="the first point")
        mirrored.log.writer.advance(300)
        with not_readable(metadata_folder(mirrored.spark, namespace, "orders")):
            wait_for_state(mirrored, ask(mirrored, 250), BarrierState.PUBLISHED)
            first = at(mirrored.spark, 250, mirrored.config)
            assert (list(first.versions), first.not_covered) == (["public.items"], ("public.orders",))
            assert "Metadata file for version" in mirrored.progress()["tables"]["public.orders"]["error"]
        wait_for(lambda: mirrored.states()["public.orders"] == "streaming", what="the table to come back")
        wait_for_state(mirrored, ask(mirrored, 260), BarrierState.PUBLISHED)
    second = at(mirrored.spark, 260, mirrored.config)
    assert (second.lsn, list(second.versions), second.not_covered) == (260, ["public.items", "public.orders"], ())

"""Barriers: the mirror publishes a point at exactly the LSN that somebody asks for, or says that it is too late."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from pgtide.log.control import Barrier, BarrierState, barrier, barriers, put_barrier
from pgtide.spark import at
from tests.spark.conftest import Mirrored
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
    point = at(mirrored.spark, 500, mirrored.config)
    assert (point.lsn, point.offset) == (500, mirrored.log.writer.end_offset)
    amounts = {row["id"]: row["amount"] for row in point.table("orders").collect()}
    assert amounts == {1: 77, 2: 1}, "what somebody else wrote must not hide behind an older version"
    assert at(mirrored.spark, 499, mirrored.config).lsn == 292
    assert mirrored.progress()["point"]["lsn"] == "0/1F4"
    assert end < point.offset
    assert len(barriers(mirrored.log.path)) == 3, "answered ones stay until they are fetched or expire"

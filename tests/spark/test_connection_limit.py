"""Connections of a load: never more than the limit, and none of the tables takes all from the others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from pgtide.spark.connection_limit import ConnectionLimit
from tests.waiting import wait_for


def test_one_table_alone_gets_all() -> None:
    limit = ConnectionLimit(4)
    with limit.sharing(), limit.take(10) as taken:
        assert taken == 4
    with limit.take(2) as taken:
        assert taken == 2


def test_two_tables_get_half_each() -> None:
    limit = ConnectionLimit(4)
    with limit.sharing(), limit.sharing(), limit.take(10) as first, limit.take(10) as second:
        assert (first, second) == (2, 2)


def test_no_more_than_the_limit_are_out_whatever_is_asked_for() -> None:
    limit, lock, out, most = ConnectionLimit(3), threading.Lock(), [0], [0]

    def work(asked: int) -> None:
        with limit.sharing(), limit.take(asked) as taken:
            with lock:
                out[0] += taken
                most[0] = max(most[0], out[0])
            with lock:
                out[0] -= taken

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [number % 5 + 1 for number in range(500)]))
    assert most[0] <= 3
    assert out == [0]


def test_who_finds_none_free_waits() -> None:
    limit, got = ConnectionLimit(1), threading.Event()

    def ask() -> None:
        with limit.take():
            got.set()

    with limit.take():
        thread = threading.Thread(target=ask)
        thread.start()
        assert not got.is_set()
    wait_for(got.is_set, what="the one that waited to get its connection")
    thread.join()

"""A write load that is the same for the same seed: inserts, updates, deletes, new keys, TRUNCATE, large values."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.database import Database
from tests.spark.shop import beside

TABLES = (
    "CREATE TABLE moving (id int PRIMARY KEY, n int, note text)",
    "CREATE TABLE large (a int, b text, body text, n int, PRIMARY KEY (a, b))",
    "ALTER TABLE large ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE emptied (id int PRIMARY KEY, n int)",
    "CREATE TABLE visits (page text, n int)",
    "ALTER TABLE visits REPLICA IDENTITY FULL",
    "INSERT INTO moving SELECT i, i, repeat('x', i % 60) FROM generate_series(1, 3000) i",
    "INSERT INTO large SELECT i, 'b', repeat(md5(i::text), 200), i FROM generate_series(1, 60) i",
    "INSERT INTO emptied SELECT i, i FROM generate_series(1, 500) i",
    "INSERT INTO visits SELECT 'page ' || i % 4, i % 3 FROM generate_series(1, 500) i",
)
NAMES = ("public.moving", "public.large", "public.emptied", "public.visits")


def _statement(chance: random.Random) -> str:
    one, other, n = chance.randint(1, 4000), chance.randint(1, 4000), chance.randint(0, 999)
    kind = chance.randrange(100)
    if kind < 25:
        return f"INSERT INTO moving VALUES ({one}, {n}, 'new {n}') ON CONFLICT (id) DO UPDATE SET n = {n}"
    if kind < 45:
        return f"UPDATE moving SET n = {n}, note = repeat('y', {n % 200}) WHERE id BETWEEN {one} AND {one + 20}"
    if kind < 55:
        return f"DELETE FROM moving WHERE id BETWEEN {one} AND {one + 5}"
    if kind < 65:
        return f"UPDATE moving SET id = {other} WHERE id = {one} AND NOT EXISTS (SELECT FROM moving WHERE id = {other})"
    if kind < 75:
        return f"UPDATE large SET n = {n} WHERE a % 7 = {n % 7}"  # the large value is not sent
    if kind < 80:
        return f"UPDATE large SET body = repeat(md5('{n}'), 300) WHERE a = {n % 60}"
    if kind < 85:
        return f"UPDATE large SET b = 'b{n}' WHERE a = {n % 60}"  # another key, the same large value
    if kind < 92:
        return f"INSERT INTO visits VALUES ('page {n % 4}', {n % 3})"
    if kind < 96:
        return f"DELETE FROM visits WHERE n = {n % 3} AND page = 'page {n % 4}'"
    if kind < 97 and n < 100:
        return "TRUNCATE emptied"
    return f"INSERT INTO emptied VALUES ({one}, {n}) ON CONFLICT DO NOTHING"


@contextmanager
def writing(database: Database, seed: int, pause_s: float = 0.03) -> Iterator[None]:
    """Until the end of the block, also over restarts of the server."""
    chance = random.Random(seed)

    def write(stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                with database.connect() as connection:
                    connection.execute("SET lock_timeout = '1s'")
                    while not stop.wait(pause_s):
                        try:
                            with connection.transaction():
                                for _ in range(chance.randint(1, 4)):
                                    connection.execute(_statement(chance).encode())
                        except psycopg.errors.LockNotAvailable:
                            continue
            except psycopg.OperationalError:
                stop.wait(0.1)  # the server is being restarted

    with beside(write):
        yield

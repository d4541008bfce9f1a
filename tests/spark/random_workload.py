"""A random workload over five tables: everything that a source can do to rows, in transactions with savepoints.

The tables: large values that updates leave alone, a composite key whose rows change it and swap it, a column of every
type, no key at all, and a key that is an index of its own choosing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import psycopg

from tests.database import Database
from tests.decode.type_cases import CASES, TYPES

MEGABYTE = 1_000_000
KEYS = 60  # few, so that rows meet each other

TABLES = ("documents", "places", "typed", "visits", "codes")
_COLUMNS = [(f"c{number}", pg_type, values) for number, (pg_type, values) in enumerate(CASES.items())]


def create(database: Database) -> None:
    database.execute(
        *TYPES,
        "CREATE TABLE documents (id int PRIMARY KEY, title text, body text, attachment bytea, changed int)",
        "ALTER TABLE documents ALTER body SET STORAGE EXTERNAL",
        "CREATE TABLE places (x int, y text, what text, body text, PRIMARY KEY (x, y))",
        "ALTER TABLE places ALTER body SET STORAGE EXTERNAL",
        f"CREATE TABLE typed (id int PRIMARY KEY, {', '.join(f'{name} {kind}' for name, kind, _ in _COLUMNS)})",
        "CREATE TABLE visits (page text, n int, ratio float8)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "CREATE TABLE codes (code uuid NOT NULL, price numeric(12, 2), note text)",
        "CREATE UNIQUE INDEX codes_by_code ON codes (code)",
        "ALTER TABLE codes REPLICA IDENTITY USING INDEX codes_by_code",
    )


class RandomWorkload:
    """One connection that writes; the same seed makes the same statements."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._random = random.Random(seed)
        self._actions: dict[Callable[[], None], int] = {
            self._write_document: 8,
            self._touch_documents: 6,
            self._move_document: 3,
            self._delete_document: 3,
            self._write_place: 8,
            self._move_place: 4,
            self._swap_places: 5,
            self._delete_place: 2,
            self._write_typed: 6,
            self._change_typed: 8,
            self._delete_typed: 2,
            self._visit: 6,
            self._change_visits: 5,
            self._leave: 3,
            self._write_code: 6,
            self._change_codes: 6,
            self._truncate: 1,
        }

    def run(self, transactions: int) -> None:
        with self._database.connect(autocommit=False) as self._connection:
            for _ in range(transactions):
                self._transaction()

    def _transaction(self) -> None:
        for _ in range(self._random.randint(1, 8)):
            fate = self._random.random()
            if fate < 0.6:
                self._act()
                continue
            self._connection.execute("SAVEPOINT s")
            for _ in range(self._random.randint(1, 3)):
                self._act()
            self._connection.execute("RELEASE s" if fate < 0.8 else "ROLLBACK TO s")
        if self._random.random() < 0.9:
            self._connection.commit()
        else:
            self._connection.rollback()

    def _act(self) -> None:
        """A statement that a unique key refuses has happened too: it leaves a rolled-back part behind."""
        self._connection.execute("SAVEPOINT act")
        try:
            self._random.choices(list(self._actions), list(self._actions.values()))[0]()
        except psycopg.errors.UniqueViolation:
            self._connection.execute("ROLLBACK TO act")

    def _do(self, statement: str, *values: object) -> None:
        self._connection.execute(statement.encode(), values)

    def _key(self) -> int:
        return self._random.randrange(KEYS)

    def _text(self) -> str | None:
        """Short, large enough for TOAST, very large, empty or null."""
        length = self._random.choices([None, 0, 10, 5_000, 100_000, MEGABYTE], [10, 5, 50, 25, 8, 2])[0]
        return None if length is None else (f"{self._random.getrandbits(40):x} ä€𝄞" * length)[:length]

    def _write_document(self) -> None:
        self._do(
            "INSERT INTO documents VALUES (%s, %s, %s, %s, 0) "
            "ON CONFLICT (id) DO UPDATE SET body = excluded.body, title = excluded.title",
            self._key(), self._text(), self._text(), self._random.randbytes(self._random.choice([0, 9, 9_000])),
        )  # fmt: skip

    def _touch_documents(self) -> None:
        self._do("UPDATE documents SET changed = changed + 1 WHERE id %% 3 = %s", self._random.randrange(3))

    def _move_document(self) -> None:
        self._do("UPDATE documents SET id = %s, changed = -1 WHERE id = %s", self._key(), self._key())

    def _delete_document(self) -> None:
        self._do("DELETE FROM documents WHERE id = %s", self._key())

    def _write_place(self) -> None:
        self._do("INSERT INTO places VALUES (%s, 'y', %s, %s)", self._key(), self._text(), self._text())

    def _move_place(self) -> None:
        self._do("UPDATE places SET y = y || 'y' WHERE x = %s AND length(y) < 5", self._key())

    def _swap_places(self) -> None:
        """By way of a key that nobody has, as an application would: large values travel with their rows."""
        one, other = self._random.sample(range(KEYS), 2)
        for before, after in ((one, -1), (other, one), (-1, other)):
            self._do("UPDATE places SET x = %s WHERE x = %s", after, before)

    def _delete_place(self) -> None:
        self._do("DELETE FROM places WHERE x = %s", self._key())

    def _value(self, values: list[str]) -> str | None:
        return self._random.choice([None, *values])

    def _write_typed(self) -> None:
        names = ", ".join(name for name, _, _ in _COLUMNS)
        marks = ", ".join(f"%s::{kind}" for _, kind, _ in _COLUMNS)
        values = [self._value(values) for _, _, values in _COLUMNS]
        self._do(f"INSERT INTO typed (id, {names}) VALUES (%s, {marks})", self._key(), *values)

    def _change_typed(self) -> None:
        chosen = self._random.sample(_COLUMNS, 5)
        assigned = ", ".join(f"{name} = %s::{kind}" for name, kind, _ in chosen)
        values = [self._value(values) for _, _, values in chosen]
        self._do(f"UPDATE typed SET {assigned} WHERE id %% 10 = %s", *values, self._random.randrange(10))

    def _delete_typed(self) -> None:
        self._do("DELETE FROM typed WHERE id = %s", self._key())

    def _visit(self) -> None:
        ratio = self._random.choice([None, 0.0, -0.0, float("nan"), 1.5])
        count = self._random.randint(1, 5)
        for _ in range(count):
            self._do(
                "INSERT INTO visits VALUES (%s, %s, %s)", self._random.choice("abc"), self._random.randrange(4), ratio
            )

    def _change_visits(self) -> None:
        """One of several rows that are the same, then all of them."""
        row = "(SELECT ctid FROM visits WHERE page = %s LIMIT 1)"
        self._do(f"UPDATE visits SET n = n + 1 WHERE ctid = {row}", self._random.choice("abc"))
        self._do("UPDATE visits SET ratio = NULL WHERE page = %s AND n = %s", self._random.choice("abc"), 2)

    def _leave(self) -> None:
        row = "(SELECT ctid FROM visits WHERE page = %s LIMIT 2)"
        self._do(f"DELETE FROM visits WHERE ctid IN {row}", self._random.choice("abc"))

    def _code(self) -> str:
        return f"00000000-0000-0000-0000-{self._key():012d}"

    def _write_code(self) -> None:
        price = self._random.choice([None, 0, 12.34, -99999])
        self._do("INSERT INTO codes VALUES (%s, %s, %s)", self._code(), price, self._text())

    def _change_codes(self) -> None:
        self._do("UPDATE codes SET price = price + 1 WHERE code > %s", self._code())
        self._do("UPDATE codes SET code = %s WHERE code = %s", self._code(), self._code())

    def _truncate(self) -> None:
        if self._random.random() < 0.3:
            self._do(f"TRUNCATE {', '.join(self._random.sample(TABLES, self._random.randint(1, 2)))}")

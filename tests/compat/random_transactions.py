"""Random transactions on a real server, and beside them a plain model of what must come out.

Sessions take turns, so that their transactions interleave; each writes keys of its own, so that the model knows what
every statement does without asking the server.
"""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

from tests.database import Database

TABLES = ("a", "b")
ROW_BYTES = 400
DEEP = 80  # more savepoints than the server keeps at hand for a backend (64)

Change = tuple[str, str, int, str | None]  # table, operation, key, note
Statement = list[Change]  # by key: in which order the server finds the rows is its own business


class Session:
    """One connection: its open transaction, and the same in plain lists."""

    def __init__(
        self, database: Database, number: int, generator: random.Random, committed: list[list[Statement]]
    ) -> None:
        self._connection = database.connect(autocommit=False)
        self._random = generator
        self._next_key = number * 1_000_000
        self._committed = committed
        self._kept: dict[str, dict[int, str]] = {table: {} for table in TABLES}  # as of the last commit
        self._rows = deepcopy(self._kept)
        self._statements: list[Statement] = []
        self._savepoints: list[tuple[str, dict[str, dict[int, str]], int]] = []

    def step(self) -> None:
        actions = {
            self._insert: 10,
            self._update: 4,
            self._delete: 2,
            self._savepoint: 5,
            self._dive: 1,
            self._roll_back_to: 4,
            self._release: 1,
            self.commit: 2,
            self._roll_back: 1,
        }
        self._random.choices(list(actions), list(actions.values()))[0]()

    def commit(self) -> None:
        self._connection.commit()
        if any(self._statements):
            self._committed.append([statement for statement in self._statements if statement])
        self._kept = self._rows
        self._begin()

    def close(self) -> None:
        self._connection.close()

    def _begin(self) -> None:
        self._rows, self._statements, self._savepoints = deepcopy(self._kept), [], []

    def _roll_back(self) -> None:
        self._connection.rollback()
        self._begin()

    def _execute(self, statement: str, *values: Any) -> None:
        self._connection.execute(statement.encode(), values)

    def _insert(self, most: int = 400) -> None:
        table, note = self._random.choice(TABLES), self._random.choice("xyz") * ROW_BYTES
        first, self._next_key = self._next_key, self._next_key + self._random.randint(1, most)
        keys = range(first, self._next_key)
        self._execute(f"INSERT INTO {table} SELECT k, %s FROM unnest(%s::int[]) k", note, list(keys))
        self._rows[table] |= dict.fromkeys(keys, note)
        self._statements.append([(table, "INSERT", key, note) for key in keys])

    def _chosen(self, table: str) -> list[int]:
        keys = sorted(self._rows[table])
        return self._random.sample(keys, min(len(keys), self._random.randint(1, 200)))

    def _update(self) -> None:
        table = self._random.choice(TABLES)
        keys, note = sorted(self._chosen(table)), self._random.choice("uvw") * ROW_BYTES
        self._execute(f"UPDATE {table} SET note = %s WHERE id = ANY(%s)", note, keys)
        self._rows[table] |= dict.fromkeys(keys, note)
        self._statements.append([(table, "UPDATE", key, note) for key in keys])

    def _delete(self) -> None:
        table = self._random.choice(TABLES)
        keys = sorted(self._chosen(table))
        self._execute(f"DELETE FROM {table} WHERE id = ANY(%s)", keys)
        for key in keys:
            del self._rows[table][key]
        self._statements.append([(table, "DELETE", key, None) for key in keys])

    def _savepoint(self) -> None:
        name = f"s{len(self._savepoints)}"
        self._execute(f"SAVEPOINT {name}")
        self._savepoints.append((name, deepcopy(self._rows), len(self._statements)))

    def _dive(self) -> None:
        """A savepoint in a savepoint in a savepoint …, each with a few rows."""
        for _ in range(DEEP):
            self._savepoint()
            self._insert(most=3)

    def _roll_back_to(self) -> None:
        if self._savepoints:
            kept = self._random.randrange(len(self._savepoints))
            name, rows, statements = self._savepoints[kept]
            self._execute(f"ROLLBACK TO SAVEPOINT {name}")
            del self._savepoints[kept + 1 :]
            self._rows = deepcopy(rows)
            del self._statements[statements:]

    def _release(self) -> None:
        if self._savepoints:
            released = self._random.randrange(len(self._savepoints))
            self._execute(f"RELEASE SAVEPOINT {self._savepoints[released][0]}")
            del self._savepoints[released:]


def random_transactions(database: Database, seed: int, steps: int) -> list[list[Statement]]:
    """Runs them; the committed ones, in the order of their commits, with the changes of each statement by key."""
    generator = random.Random(seed)
    committed: list[list[Statement]] = []
    sessions = [Session(database, number, generator, committed) for number in range(1, 4)]
    for _ in range(steps):
        generator.choice(sessions).step()
    for session in sessions:
        session.commit()
        session.close()
    return committed

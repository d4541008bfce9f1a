"""Tables that change their shape while they are captured: every row is in the log under the shape it was written in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgtide.log.reader import LogReader
from pgtide.schema import TableShape
from tests.capture.running import capturing, configuration, wait_until_captured
from tests.database import Database
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY, a int, b text)"

# Each alters the table, and adds a row that fits the new shape.
ALTERATIONS = (
    ("ALTER TABLE t ADD COLUMN c date DEFAULT '2024-01-01'", "INSERT INTO t VALUES (2, 20, 'two', '2024-02-02')"),
    ("ALTER TABLE t RENAME COLUMN a TO renamed", "INSERT INTO t VALUES (3, 30, 'three', NULL)"),
    ("ALTER TABLE t ALTER COLUMN renamed TYPE bigint", "INSERT INTO t VALUES (4, 40000000000, 'four', NULL)"),
    ("ALTER TABLE t DROP COLUMN b", "INSERT INTO t VALUES (5, 50, '2024-05-05')"),
    ("ALTER TABLE t ADD COLUMN b int", "INSERT INTO t VALUES (6, 60, NULL, 66)"),
    ("ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (7, 70, NULL, 77)"),
)
# (attribute number, name, type) of the columns that each row was written with.
ID, B, C = (1, "id", "int4"), (3, "b", "text"), (4, "c", "date")
WRITTEN = [
    [ID, (2, "a", "int4"), B],
    [ID, (2, "a", "int4"), B, C],
    [ID, (2, "renamed", "int4"), B, C],
    [ID, (2, "renamed", "int8"), B, C],
    [ID, (2, "renamed", "int8"), C],
    [ID, (2, "renamed", "int8"), C, (5, "b", "int4")],
    [ID, (2, "renamed", "int8"), C, (5, "b", "int4")],
]


def written_shapes(reader: LogReader, relation_oid: int) -> list[tuple[TableShape, dict[str, Any]]]:
    """Each change with the shape under which the log has it."""
    found = []
    for piece in reader.plan(0, reader.end().end_offset, relation_oid):
        rows = reader.read(piece)
        found += [(row["_offset"], rows.shape, row) for row in rows.rows.to_pylist()]
    return [(shape, row) for _, shape, row in sorted(found, key=lambda each: int(each[0]))]


def columns(shape: TableShape) -> list[tuple[int, str, str]]:
    return [(column.attnum, column.name, column.type.name) for column in shape.columns]


WHERE = ["between transactions", "inside a transaction", "inside a streamed transaction", "while nothing captured"]


@pytest.mark.parametrize("where", WHERE)
def test_an_altered_table_keeps_every_row_in_the_shape_it_was_written_in(
    where: str, database: Database, tmp_path: Path
) -> None:
    database.execute(TABLE, "CREATE TABLE filler (n int, note text)")
    if where == "inside a streamed transaction":
        database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    config = configuration(database, tmp_path)
    if where == "while nothing captured":
        with capturing(config):
            pass
        alter(database, in_one_transaction=False)
    with capturing(config) as states:
        if where == "inside a streamed transaction":
            noticed = "has altered public.t"
            alter(
                database,
                in_one_transaction=True,
                before_commit=lambda: wait_for(
                    lambda: any(noticed in state.detail for state in states), what="the alteration to be noticed"
                ),
            )
        elif where != "while nothing captured":
            alter(database, in_one_transaction=where == "inside a transaction")
        reader = wait_until_captured(database, config)
    oid = database.rows("SELECT 'u'::regclass::oid")[0][0]
    found = written_shapes(reader, oid)
    assert [row["c1"] for _, row in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [columns(shape) for shape, _ in found] == WRITTEN
    assert [row["c2"] for _, row in found] == [10, 20, 30, 40_000_000_000, 50, 60, 70]
    assert [row.get("c3") for _, row in found] == ["one", "two", "three", "four", None, None, None]
    assert {shape.key_columns[0].name for shape, _ in found} == {"id"}


def alter(database: Database, *, in_one_transaction: bool, before_commit: Callable[[], object] = lambda: None) -> None:
    with database.connect(autocommit=not in_one_transaction) as connection:
        connection.execute("INSERT INTO t VALUES (1, 10, 'one')")
        for alteration, insert in ALTERATIONS:
            connection.execute(alteration.encode())
            connection.execute(insert.encode())
            connection.execute("INSERT INTO filler SELECT i, repeat('x', 400) FROM generate_series(1, 300) i")
        before_commit()
        if in_one_transaction:
            connection.commit()

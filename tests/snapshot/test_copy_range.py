"""Under a snapshot the table is read that was meant, also when its name goes to another while we wait for a lock."""

from __future__ import annotations

import threading

import pytest

from pgtide.replication.connect import connect
from pgtide.snapshot.copy_range import Rewritten, under_snapshot
from tests.database import Database
from tests.waiting import wait_for

WAITING = "SELECT 1 FROM pg_locks WHERE relation = {oid} AND NOT granted"


@pytest.mark.parametrize(
    "replaced",
    ["ALTER TABLE t RENAME TO old; CREATE TABLE t (id int)", "ALTER TABLE t RENAME TO old", "DROP TABLE t"],
)
def test_name_that_changes_hands_while_a_lock_is_waited_for_is_noticed(database: Database, replaced: str) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    raised: list[BaseException] = []

    def read(oid: int, snapshot: str) -> None:
        with connect(database.dsn, timeout_s=10) as reader:
            try:
                with under_snapshot(reader, [oid], snapshot):
                    raise AssertionError("another table would be read")
            except (Rewritten, AssertionError) as error:
                raised.append(error)

    with database.connect() as keeper, database.connect() as migration:
        keeper.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        [(snapshot, oid)] = keeper.execute("SELECT pg_export_snapshot(), 't'::regclass::oid::int8").fetchall()
        migration.execute("BEGIN")
        migration.execute("LOCK TABLE t")
        reading = threading.Thread(target=read, args=[oid, snapshot])
        reading.start()
        wait_for(lambda: database.rows(WAITING.format(oid=oid)), what="the reader to wait for the lock")
        migration.execute(replaced.encode())
        migration.execute("COMMIT")
        reading.join(30)
    assert [type(error) for error in raised] == [Rewritten], raised

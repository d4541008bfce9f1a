"""Under a snapshot the table is read that was meant, also when its name goes to another while we wait for a lock."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pgtide.errors import TransientError
from pgtide.replication.connect import connect
from pgtide.replication.slot import Snapshot
from pgtide.snapshot.copy_range import Rewritten, SnapshotGone, limit_waiting_for_locks, under_snapshot
from pgtide.snapshot.table_ranges import file_blocks
from tests.database import Database
from tests.snapshot.exported import exported_snapshot
from tests.waiting import wait_for

WAITING = "SELECT 1 FROM pg_locks WHERE relation = {oid} AND NOT granted"


@pytest.mark.parametrize(
    "replaced",
    ["ALTER TABLE t RENAME TO old; CREATE TABLE t (id int)", "ALTER TABLE t RENAME TO old", "DROP TABLE t"],
)
def test_name_that_changes_hands_while_a_lock_is_waited_for_is_noticed(database: Database, replaced: str) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    raised: list[BaseException] = []

    def read(oid: int, snapshot: Snapshot) -> None:
        with connect(database.dsn, timeout_s=10) as reader:
            try:
                with under_snapshot(reader, [oid], snapshot):
                    raise AssertionError("another table would be read")
            except (Rewritten, AssertionError) as error:
                raised.append(error)

    with exported_snapshot(database, "t") as (snapshot, oid), database.connect() as migration:
        migration.execute("BEGIN")
        migration.execute("LOCK TABLE t")
        reading = threading.Thread(target=read, args=[oid, snapshot])
        reading.start()
        wait_for(lambda: database.rows(WAITING.format(oid=oid)), what="the reader to wait for the lock")
        migration.execute(replaced.encode())
        migration.execute("COMMIT")
        reading.join(30)
    assert [type(error) for error in raised] == [Rewritten], raised


def test_snapshot_that_has_got_the_name_of_another_is_not_taken_for_it(database: Database) -> None:
    """Names begin again when the server has restarted after a crash of one of its processes."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with exported_snapshot(database, "t") as (snapshot, oid), connect(database.dsn, timeout_s=10) as reader:
        with under_snapshot(reader, [oid], snapshot) as names:
            assert names == {oid: "public.t"}
        with (
            pytest.raises(SnapshotGone, match=snapshot.name),
            under_snapshot(reader, [oid], replace(snapshot, contents="3:3:")),
        ):
            raise AssertionError("rows of another snapshot would be read")


def test_size_of_a_locked_table_is_not_waited_for_without_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.snapshot.copy_range._LOCK_TIMEOUT_MS", 50)
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    [(oid,)] = database.rows("SELECT 't'::regclass::oid::int8")
    with database.connect() as other, connect(database.dsn, timeout_s=10) as reader:
        other.execute("BEGIN")
        other.execute("LOCK TABLE t")
        limit_waiting_for_locks(reader)
        with pytest.raises(TransientError, match="lock timeout"):
            file_blocks(reader, oid)

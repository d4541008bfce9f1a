"""Whether a partition was created or attached is read from system columns of the catalog, on each version."""

from __future__ import annotations

import pytest

from pgtide.replication.rewrites import bring_rows, is_rewritten, new_branches, table_states
from tests.database import Database

COLUMNS = {
    "plain": "id int, n int",
    "keyed": "id int PRIMARY KEY, n int NOT NULL",
    "defaults": "id int NOT NULL DEFAULT 15 CHECK (id > 0), n int NOT NULL DEFAULT 2",
}
ATTACH = "ALTER TABLE parted ATTACH PARTITION leaf FOR VALUES FROM (10) TO (20)"
CREATED = [
    "CREATE TABLE leaf PARTITION OF parted FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE mid PARTITION OF parted DEFAULT PARTITION BY RANGE (id); CREATE TABLE leaf PARTITION OF mid DEFAULT",
    f"CREATE TABLE leaf (LIKE parted INCLUDING CONSTRAINTS); {ATTACH}",
]
FILLED = "CREATE TABLE leaf (LIKE parted INCLUDING CONSTRAINTS); INSERT INTO leaf VALUES (15, 1)"


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_only_partitions_that_are_attached_bring_rows(any_database: Database, columns: str) -> None:
    def made_by(*transactions: str) -> bool:
        any_database.execute("DROP TABLE IF EXISTS parted, leaf")
        any_database.execute(f"CREATE TABLE parted ({columns}) PARTITION BY RANGE (id)")
        with any_database.connect() as connection:
            oid = any_database.rows("SELECT 'parted'::regclass::oid::int8")[0][0]
            before = table_states(connection, [oid])[0][oid]
            any_database.execute(*transactions)
            now = table_states(connection, [oid])[0][oid]
            assert not is_rewritten(before, now)
            new = new_branches(before, now)
            assert new
            return bring_rows(connection, new)

    assert made_by(f"{FILLED}; {ATTACH}")
    assert made_by(FILLED, ATTACH)
    assert [made_by(created) for created in CREATED] == [False, False, False]
    assert [made_by(f"{created}; INSERT INTO parted VALUES (15, 1)") for created in CREATED] == [False, False, True]

"""Reads in the log on each version: under the slot's own snapshot, and under a later one in the midst of the stream."""

from __future__ import annotations

import threading
from pathlib import Path

from pgtide.change import Op
from tests.capture.running import capturing, configuration
from tests.capture.test_reads import check_equal, ops, wait_until_read
from tests.compat.random_transactions import TABLES, random_transactions
from tests.compat.test_capture import small_memory
from tests.database import Database

STEPS = 60


def test_tables_are_read_while_transactions_are_streamed_and_spooled(any_database: Database, tmp_path: Path) -> None:
    database, seed = any_database, any_database.server.version
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, note text)",
            f"INSERT INTO {table} SELECT -i, 'before' FROM generate_series(1, 2000) i",
        )
    first = configuration(database, tmp_path, reads_in_log=True, tables=(f"public.{TABLES[0]}",))
    writer = threading.Thread(target=random_transactions, args=[database, seed, STEPS])
    with capturing(small_memory(first)):
        wait_until_read(database, first, 1)
        writer.start()
    config = small_memory(configuration(database, tmp_path, reads_in_log=True))
    with capturing(config):
        writer.join()
        reader = wait_until_read(database, config, len(TABLES))
    check_equal(database, config, reader, *TABLES)
    assert ops(reader, TABLES[0])[Op.READ] == 2000
    assert [ops(reader, table)[Op.TRUNCATE] for table in TABLES[1:]] == [1] * len(TABLES[1:]), f"seed {seed}"

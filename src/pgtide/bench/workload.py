"""The server and the WAL that the benchmarks drain: a table of ten ordinary columns, written in several ways."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from psycopg import sql

from pgtide.local import LocalPostgres, postgres
from pgtide.lsn import parse_lsn

_TABLE = """
CREATE TABLE {} (id bigint PRIMARY KEY, customer int, status text, amount numeric(12,2), paid boolean,
                 created timestamptz, note text, reference uuid, score float8, quantity smallint)
"""
_IN_TRANSACTIONS = """
CREATE PROCEDURE write_rows(relation regclass, first bigint, last bigint, step bigint) LANGUAGE plpgsql AS $$
BEGIN
    WHILE first <= last LOOP
        EXECUTE format('INSERT INTO %s SELECT i, i %% 1000, ''status '' || i %% 7, (i %% 10000) / 100.0, i %% 2 = 0,
            now(), ''note number '' || i, gen_random_uuid(), i * 1.5, i %% 100
            FROM generate_series($1, $2) i', relation)
            USING first, least(first + step - 1, last);
        COMMIT;
        first := first + step;
    END LOOP;
END $$
"""

INTERLEAVED = ("orders", "items", "events")


class Workload:
    def __init__(self, server: LocalPostgres, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self._connection = server.connect()
        self._connection.execute("SET synchronous_commit = off")
        self._connection.execute(_IN_TRANSACTIONS)

    def create_tables(self, *names: str) -> None:
        for name in names:
            self._connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(name)))
            self._connection.execute(sql.SQL(_TABLE).format(sql.Identifier(name)))

    def insert(self, table: str, rows: int, per_transaction: int, first: int = 1) -> None:
        self._connection.execute("CALL write_rows(%s, %s, %s, %s)", [table, first, first + rows - 1, per_transaction])

    def insert_together(self, tables: Sequence[str], row: int) -> None:
        """One transaction that writes a row into each of these tables."""
        statements = [f'INSERT INTO "{table}" (id, status) VALUES ({row}, $$new$$)' for table in tables]
        self.execute(";".join(statements))

    def drop_tables(self) -> None:
        self.execute(
            "DO $$ DECLARE t name; BEGIN FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP "
            "EXECUTE format('DROP TABLE %I', t); END LOOP; END $$"
        )

    def execute(self, statement: str) -> None:
        self._connection.execute(statement.encode())

    def configuration(self, name: str, **capture: int) -> Path:
        """A configuration file of its own for the slot `name`."""
        folder = self.folder / name
        folder.mkdir()
        file = folder / "pgtide.toml"
        settings = "".join(f"{key} = {value}\n" for key, value in capture.items())
        file.write_text(
            f'[source]\ndsn = "{self.server.dsn}"\nslot = "{name}"\n[snapshot]\ninitial = "none"\n[capture]\n{settings}'
        )
        return file

    def create_slot(self, name: str) -> None:
        self._connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

    def drop_slots(self) -> None:
        self._connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active"
        )

    def wal_end_lsn(self) -> int:
        self._connection.execute("CHECKPOINT")
        row = self._connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])


def interleaved(work: Workload, changes: int, first: int = 1) -> None:
    """Three tables, inserts, updates and deletes, mixed within transactions of 60 changes."""
    work.execute(
        f"""
        DO $$ DECLARE k bigint; BEGIN
        FOR k IN {first}..{first + changes // 60 - 1} LOOP
            INSERT INTO orders SELECT i, 1, 'new', i % 100, true, now(), 'a note ' || i, gen_random_uuid(), i, 1
                FROM generate_series(k * 10, k * 10 + 9) i;
            INSERT INTO items SELECT i, 1, 'new', i % 100, true, now(), 'a note ' || i, gen_random_uuid(), i, 1
                FROM generate_series(k * 10, k * 10 + 9) i;
            UPDATE orders SET status = 'paid', amount = amount + 1 WHERE id BETWEEN k * 10 AND k * 10 + 9;
            INSERT INTO events SELECT i, 1, 'new', i % 100, true, now(), 'a note ' || i, gen_random_uuid(), i, 1
                FROM generate_series(k * 10, k * 10 + 9) i;
            UPDATE items SET quantity = quantity + 1 WHERE id BETWEEN k * 10 AND k * 10 + 9;
            DELETE FROM events WHERE id BETWEEN k * 10 AND k * 10 + 9;
            COMMIT;
        END LOOP; END $$"""
    )


@contextmanager
def workload(*, fsync: bool = False, shared_buffers: str = "256MB") -> Iterator[Workload]:
    with (
        postgres(max_wal_size="16GB", shared_buffers=shared_buffers, checkpoint_timeout="1h", fsync=fsync) as server,
        tempfile.TemporaryDirectory(prefix="pgtide-bench-") as folder,
    ):
        yield Workload(server, Path(folder))

"""The capture against each version: the options it asks for, and random transactions that equal a plain model."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import psycopg
import pytest

from pgtide.capture.pipeline import stream_options
from pgtide.change import Op
from pgtide.config import Capture, Config
from pgtide.log.reader import LogReader
from pgtide.replication.connect import connect
from tests.capture.running import capturing, changes, configuration, replayed, source_rows, wait_until_captured
from tests.compat.random_transactions import TABLES, Statement, random_transactions
from tests.database import Database

STEPS = 120


def captured(reader: LogReader) -> list[list[tuple[str, str, int, str | None]]]:
    """The changes of both tables, transaction by transaction."""
    rows = [
        (row["_offset"], row["_commit_lsn"], table, row)
        for table in TABLES
        for row in changes(reader, f"public.{table}")
    ]
    ordered = [
        (commit_lsn, (table, Op(row["_op"]).name, row["id"], row["note"]))
        for _, commit_lsn, table, row in sorted(rows, key=lambda each: each[0])
    ]
    return [[change for _, change in group] for _, group in groupby(ordered, key=lambda each: each[0])]


def by_statement(transaction: list[tuple[str, str, int, str | None]], expected: list[Statement]) -> list[Statement]:
    """A transaction cut as the model's is, each piece by key."""
    pieces, at = [], 0
    for statement in expected:
        pieces.append(sorted(transaction[at : at + len(statement)], key=lambda change: change[2]))
        at += len(statement)
    return [*pieces, transaction[at:]] if transaction[at:] else pieces


def small_memory(config: Config) -> Config:
    return config.model_copy(update={"capture": Capture(transaction_memory_bytes=1 << 16)}).at(config.file)


@pytest.mark.parametrize("run", range(3))
def test_interleaved_transactions_with_deep_savepoints_equal_the_model(
    any_database: Database, run: int, tmp_path: Path
) -> None:
    database, seed = any_database, 10 * any_database.server.version + run
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        *(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)" for table in TABLES),
    )
    config = small_memory(configuration(database, tmp_path))
    with capturing(config):
        expected = random_transactions(database, seed, STEPS)
        reader = wait_until_captured(database, config)
    found = captured(reader)
    assert len(found) == len(expected) > 3, f"seed {seed}"
    for number, (transaction, model) in enumerate(zip(found, expected, strict=True)):
        assert by_statement(transaction, model) == model, f"seed {seed}, transaction {number}"
    for table in TABLES:
        assert replayed(reader, f"public.{table}") == source_rows(database, table)
    assert list((config.log_path / "large").iterdir()), "some transaction should have been spooled"
    assert not list(config.spool_path.iterdir()), "nothing is open any more"
    query = f"SELECT stream_txns, stream_count FROM pg_stat_replication_slots WHERE slot_name = '{database.name}'"
    ((transactions, blocks),) = database.rows(query)
    assert blocks > transactions > 0, "the server should have streamed, in several blocks"


PROTOCOLS = {15: "3", 16: "4", 17: "4", 18: "4"}


def test_the_newest_protocol_of_the_server_is_asked_for(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with capturing(configuration(database, tmp_path)):
        ((command,),) = database.rows(
            "SELECT a.query FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid"
            f" WHERE s.slot_name = '{database.name}'"
        )
    asked = dict(re.findall(r"""\"(\w+)\" '([^']*)'""", command))
    wanted = {
        "proto_version": PROTOCOLS[database.server.version],
        "publication_names": '"pgtide","pgtide_insert_only"',
        "binary": "true",
        "messages": "true",
        "streaming": "on",
    }
    assert wanted.items() <= asked.items()


def test_a_newer_protocol_than_is_asked_for_does_not_exist(any_database: Database) -> None:
    database = any_database
    database.execute("CREATE PUBLICATION p")
    database.execute(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
    with connect(database.dsn, timeout_s=10) as connection:
        options = stream_options(connection.info.server_version, ("p",))
        query = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s)"

        def read(proto_version: int) -> None:
            given = options | {"proto_version": str(proto_version)}
            connection.execute(query, [database.name, [part for option in given.items() for part in option]])

        read(int(options["proto_version"]))
        with pytest.raises(psycopg.Error, match=r"only supports? protocol"):
            read(int(options["proto_version"]) + 1)

"""Tables that are published later: rows that the stream never carries, and the fence that waits for who has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgtide.capture.attend import CaptureState
from pgtide.config import Config
from pgtide.log.control import TableHistory, histories
from pgtide.lsn import parse_lsn
from tests.capture.running import (
    CaptureProcess,
    capturing,
    changes,
    configuration,
    wait_until_captured,
    wait_until_let_go,
)
from tests.cli.program import run
from tests.database import Database
from tests.waiting import wait_for

FIRST, BOTH = ("public.a",), ("public.a", "public.b")
KILL_POINTS = ("start.published", "capture.fence.noted", "capture.fence.opened")


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> Database:
    """A database whose table `a` is captured already, and whose table `b` is not yet."""
    database.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in "abc"))
    with capturing(configuration(database, tmp_path, tables=FIRST)):
        database.execute("INSERT INTO a VALUES (0)")
    wait_until_let_go(database)
    return database


@contextmanager
def writer(database: Database, *statements: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A session whose transaction has done this and is still open."""
    dsn = make_conninfo(database.dsn, application_name="nightly")
    with psycopg.connect(dsn) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection


def history(config: Config, table: str) -> TableHistory:
    return next(found for found in histories(config.log_path).values() if found.table == table)


def wait_until_open(config: Config, table: str = "public.b") -> int:
    lsn = wait_for(lambda: history(config, table).complete_lsn, what=f"the fence of {table} to open")
    assert lsn is not None
    return lsn


def ids(reader: Any, table: str) -> list[int]:
    return [row["id"] for row in changes(reader, table)]


def said(states: list[CaptureState], text: str) -> bool:
    return any(text in state.detail for state in states)


def test_a_table_that_is_there_at_the_first_start_has_all_its_history(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path, tables=FIRST)
    with capturing(config):
        reader = wait_until_captured(shop, config)
    assert history(config, "public.a").complete_lsn == reader.identity.start_lsn


def test_rows_from_before_never_arrive_and_the_fence_waits_for_their_transaction(
    shop: Database, tmp_path: Path
) -> None:
    config = configuration(shop, tmp_path, tables=BOTH)
    with writer(shop, "INSERT INTO b VALUES (1)") as session, capturing(config) as states:
        who = f"server process {session.info.backend_pid} (user postgres, application 'nightly', since "
        wait_for(lambda: said(states, who), what="the session to be named")
        shop.execute("INSERT INTO a VALUES (1)")
        reader = wait_until_captured(shop, config)
        assert ids(reader, "public.a") == [0, 1], "the other table goes on"
        assert history(config, "public.b").complete_lsn is None
        session.commit()
        commit_lsn = parse_lsn(shop.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        complete_lsn = wait_until_open(config)
        wait_for(lambda: said(states, "public.b: its history is complete from "), what="it to be said")
        shop.execute("INSERT INTO b VALUES (2)")
        reader = wait_until_captured(shop, config)
    assert complete_lsn >= commit_lsn
    assert shop.rows("SELECT id FROM b ORDER BY id") == [(1,), (2,)]
    (row,) = changes(reader, "public.b")
    assert row["id"] == 2, "row 1 was written before the table was published"
    assert row["_commit_lsn"] >= complete_lsn


def test_status_names_the_session_that_is_waited_for(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path, tables=BOTH)
    (tmp_path / "pgtide.toml").write_text(
        f'[source]\ndsn = {json.dumps(shop.dsn)}\nslot = "{shop.name}"\n[log]\npath = "log"\n'
    )
    with capturing(config):
        wait_until_open(config)
    wide = configuration(shop, tmp_path, tables=(*BOTH, "public.c"))
    with writer(shop, "INSERT INTO c VALUES (1)") as session, capturing(wide) as states:
        wait_for(lambda: said(states, "public.c: its history begins when"), what="the capture to wait")
        found = json.loads(run("status", "--json", folder=tmp_path).stdout)["history"]
        shown = run("status", folder=tmp_path).stdout
        pid = session.info.backend_pid
    (waiting,) = found["public.c"]["waiting_for"]
    assert found["public.c"]["complete_from_lsn"] is None
    assert (waiting["pid"], waiting["application"], waiting["user"]) == (pid, "nightly", "postgres")
    assert waiting["since"]
    assert found["public.b"]["complete_from_lsn"]
    assert found["public.b"]["waiting_for"] == []
    assert f"public.c: its history begins when this has ended: server process {pid} " in shown


def test_a_transaction_that_wrote_elsewhere_is_not_waited_for(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path, tables=BOTH)
    with writer(shop, "INSERT INTO a VALUES (7)", "SELECT * FROM b") as session, capturing(config):
        wait_until_open(config)
        session.execute("INSERT INTO b VALUES (1)")  # after the publication: this the stream does carry
        session.commit()
        reader = wait_until_captured(shop, config)
    assert ids(reader, "public.b") == [1]


def test_a_prepared_transaction_is_waited_for(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path, tables=BOTH)
    with writer(shop, "INSERT INTO b VALUES (1)", "PREPARE TRANSACTION 'half'") as session, capturing(config) as states:
        wait_for(lambda: said(states, "prepared transaction 'half', since "), what="it to be named")
        session.rollback()
        session.autocommit = True
        session.execute("COMMIT PREPARED 'half'")
        wait_until_open(config)


def test_a_writer_of_a_partition_is_waited_for(shop: Database, tmp_path: Path) -> None:
    shop.execute(
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE TABLE events_all PARTITION OF events DEFAULT",
    )
    config = configuration(shop, tmp_path, tables=("public.a", "public.events"))
    with writer(shop, "INSERT INTO events_all VALUES (1)") as session, capturing(config) as states:
        wait_for(lambda: said(states, "public.events: its history begins when"), what="the capture to wait")
        session.rollback()
        wait_until_open(config, "public.events")


def test_a_publication_that_its_owner_has_altered_is_fenced_too(shop: Database, tmp_path: Path) -> None:
    folder = tmp_path / "existing"
    folder.mkdir()
    shop.execute("CREATE PUBLICATION mine FOR TABLE a")
    options: dict[str, Any] = {"publication": "mine", "publication_mode": "existing", "slot_suffix": "_existing"}
    with capturing(configuration(shop, folder, tables=FIRST, **options)):
        pass
    with writer(shop, "INSERT INTO b VALUES (1)") as session:
        shop.execute("ALTER PUBLICATION mine ADD TABLE b")
        config = configuration(shop, folder, tables=BOTH, **options)
        with capturing(config) as states:
            wait_for(lambda: said(states, f"server process {session.info.backend_pid}"), what="the session to be named")
            session.commit()
            wait_until_open(config)


def test_a_table_that_was_left_out_for_a_while_is_fenced_anew(shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path, tables=BOTH)
    with capturing(config):
        first = wait_until_open(config)
    with capturing(configuration(shop, tmp_path, tables=FIRST)):
        shop.execute("INSERT INTO b VALUES (1)")
        wait_until_captured(shop, config)
        assert [found.table for found in histories(config.log_path).values()] == ["public.a"]
    with capturing(config):
        assert wait_until_open(config) > first


@pytest.mark.parametrize("point", KILL_POINTS)
def test_killed_on_the_way_it_still_waits_for_the_same_transaction(point: str, shop: Database, tmp_path: Path) -> None:
    config = configuration(shop, tmp_path, tables=BOTH)
    (tmp_path / "pgtide.toml").write_text(
        f'[source]\ndsn = {json.dumps(shop.dsn)}\nslot = "{shop.name}"\ntables = {json.dumps(BOTH)}\n'
        '[log]\npath = "log"\n[snapshot]\ninitial = "none"\n'
    )
    with writer(shop, "INSERT INTO b VALUES (1)") as session:
        if point != "capture.fence.opened":
            CaptureProcess(config, f"{point}=kill").wait_for_death()
        with capturing(config) as states:
            named = "public.b: its history begins when open transactions have ended: server process "
            wait_for(lambda: said(states, f"{named}{session.info.backend_pid}"), what="the session to be named")
        wait_until_let_go(shop)
        session.commit()
        if point == "capture.fence.opened":
            CaptureProcess(config, f"{point}=kill").wait_for_death()
    with capturing(config):
        complete_lsn = wait_until_open(config)
        shop.execute("INSERT INTO b VALUES (2)")
        reader = wait_until_captured(shop, config)
    ((lsn, row),) = [(row["_commit_lsn"], row["id"]) for row in changes(reader, "public.b")]
    assert row == 2
    assert lsn >= complete_lsn

"""Snapshots for loads: let go when they are too old, and made on a standby when loads read there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pgtide import local
from pgtide.change import Op
from pgtide.cli import snapshot, status
from pgtide.config import Config, Snapshot
from pgtide.errors import TransientError
from pgtide.log.control import SnapshotOffer, offered_snapshot, request_snapshot
from pgtide.log.presence import CapturePresence, capture_presence
from pgtide.replication.connect import connect, postgres_errors
from tests.capture.running import capturing, changes, configuration, wait_until_captured
from tests.database import Database, create_database
from tests.replication.roles import role
from tests.standby import standby_of
from tests.waiting import wait_for


def wait_for_offer(config: Config) -> SnapshotOffer:
    offer = wait_for(lambda: offered_snapshot(config.log_location), what="a snapshot to be offered")
    assert offer is not None
    return offer


def test_snapshot_that_is_too_old_is_let_go_and_another_one_made_when_asked(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = configuration(database, tmp_path, initial="bulk")
    config = config.model_copy(update={"snapshot": Snapshot(max_age_minutes=1 / 60)}).at(config.file)
    keeping = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    with capturing(config):
        wait_for(lambda: offered_snapshot(config.log_location) is None, what="the snapshot to be withdrawn")
        wait_for(lambda: not database.rows(keeping), what="the snapshot to be let go")
        request_snapshot(config.log_location, ("public.t",))
        offer = wait_for_offer(config)
        with database.connect() as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{offer.name}'".encode())


def test_transactions_that_a_new_snapshot_waits_for_are_named_until_it_is_made(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int)")
    config = configuration(database, tmp_path, "bulk")
    gid = f"orphan {database.name}"
    with capturing(config) as states, psycopg.connect(database.dsn, application_name="nightly") as session:
        first = wait_for_offer(config)
        session.execute("INSERT INTO other VALUES (1)")
        database.execute(f"BEGIN; INSERT INTO other VALUES (2); PREPARE TRANSACTION '{gid}'")
        request_snapshot(config.log_location, ("public.t",))
        who = f"server process {session.info.backend_pid} (user postgres, application 'nightly', since "
        both = ("the snapshot to load public.t is made when open transactions have ended", who, gid)
        wait_for(lambda: any(all(text in state.detail for text in both) for state in states), what="both to be named")
        found = status.gather(config)
        status.show(found, as_json=False)
        snapshot.show(config, as_json=False)
        shown = capsys.readouterr().out

        session.rollback()
        wait_for(lambda: who not in states[-1].detail and gid in states[-1].detail, what="only the other to be named")
        database.execute(f"ROLLBACK PREPARED '{gid}'")
        wait_for(lambda: offered_snapshot(config.log_location) not in (None, first), what="the snapshot")
        wait_for(lambda: presence(config).snapshot_trouble == "", what="nothing to be left to tell")
    assert found.capture.state == "streaming"
    assert all(text in (found.capture.snapshot_trouble or "") for text in both)
    assert shown.lower().count("snapshots for loads: the snapshot to load public.t is made when") == 2


def test_snapshot_for_which_no_slot_is_free_is_told_with_what_to_do_and_made_when_one_is(tmp_path: Path) -> None:
    with local.postgres(max_replication_slots=2) as server:
        database = create_database(server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)", "SELECT pg_create_physical_replication_slot('other')")
        config = configuration(database, tmp_path, "bulk")
        with capturing(config) as states:
            spare = "a load that needs another snapshot takes one more"
            wait_for(lambda: any(spare in state.detail for state in states), what="the missing slot to be told")
            first = wait_for_offer(config)
            request_snapshot(config.log_location, ("public.t",))
            wait_for(lambda: presence(config).snapshot_trouble, what="trouble to be told")
            told = presence(config).snapshot_trouble
            database.execute("SELECT pg_drop_replication_slot('other')")
            wait_for(lambda: offered_snapshot(config.log_location) not in (None, first), what="the snapshot")
    assert "all replication slots are in use" in told
    assert "SELECT pg_drop_replication_slot" in told
    assert "max_replication_slots" in told


def presence(config: Config) -> CapturePresence:
    found = capture_presence(config.presence_path)
    assert found is not None
    return found


@contextmanager
def inserting(database: Database) -> Iterator[None]:
    over = threading.Event()

    def insert() -> None:
        with database.connect() as connection:
            number = 0
            while not over.is_set():
                connection.execute("INSERT INTO t VALUES (%s)", [number])
                number += 1

    threads = [threading.Thread(target=insert)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("may_ask", [True, False])
def test_snapshot_on_a_standby_agrees_with_the_log(tmp_path: Path, *, may_ask: bool) -> None:
    with local.postgres() as primary, standby_of(primary) as standby:
        database = create_database(primary)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        with role(database, "REPLICATION") as name:
            grants = ["EXECUTE ON FUNCTION pg_log_standby_snapshot()"] if may_ask else []
            for grant in ["SELECT ON t", *grants]:
                database.execute(f"GRANT {grant} TO {name}")
            database.execute("CREATE PUBLICATION pgtide FOR TABLE t")
            dsn = f"{database.dsn} user={name}"
            read_from = f"{standby.dsn_of(database.name)} user={name}"
            config = configuration(
                database, tmp_path, "bulk", dsn=dsn, read_from=read_from, publication_mode="existing"
            )
            with capturing(config), inserting(database):
                request_snapshot(config.log_location, ("public.t",))
                offer = wait_for_offer(config)
                with standby.connect(database.name) as connection:
                    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                    connection.execute(f"SET TRANSACTION SNAPSHOT '{offer.name}'".encode())
                    seen = connection.execute("SELECT count(*) FROM t").fetchone()
                reader = wait_until_captured(database, config)
            position = reader.position_after(offer.lsn)
            before = [
                row for row in changes(reader, "public.t") if row["_offset"] < position and row["_op"] == Op.INSERT
            ]
            assert offer.standby
            assert seen == (len(before),)


def test_standby_that_is_behind_or_ends_its_readers_is_told_with_what_to_set(tmp_path: Path) -> None:
    with local.postgres() as primary, standby_of(primary, hot_standby_feedback=False) as standby:
        database = create_database(primary)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        read_from = standby.dsn_of(database.name)
        config = configuration(database, tmp_path, "bulk", read_from=read_from)
        with capturing(config) as states:
            [(lsn,)] = database.rows("SELECT pg_current_wal_lsn()::text")
            with standby.connect() as connection:
                replayed = f"SELECT FROM pg_last_wal_replay_lsn() lsn WHERE lsn >= '{lsn}'"
                wait_for(lambda: connection.execute(replayed.encode()).fetchone() is not None, what="the table there")
                connection.execute("SELECT pg_wal_replay_pause()")
                paused = "SELECT FROM pg_get_wal_replay_pause_state() state WHERE state = 'paused'"
                wait_for(lambda: connection.execute(paused).fetchone() is not None, what="the standby to wait")
                database.execute("INSERT INTO t VALUES (2)")
                request_snapshot(config.log_location, ("public.t",))
                wait_for(lambda: "the standby is behind" in presence(config).snapshot_trouble, what="that to be told")
                connection.execute("SELECT pg_wal_replay_resume()")
            wait_for_offer(config)
            wait_for(lambda: "hot_standby_feedback" in presence(config).snapshot_trouble, what="the setting to be told")
            told = presence(config).snapshot_trouble
            wait_for(lambda: told == states[-1].detail, what="the capture to say it as well")

        with connect(read_from, timeout_s=10) as reader, connect(read_from, timeout_s=10) as looking:
            reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            assert reader.execute("SELECT count(*) FROM public.t").fetchone() == (2,)
            busy = f"SELECT FROM pg_stat_activity WHERE pid = {reader.info.backend_pid} AND wait_event = 'PgSleep'"

            def vacuum() -> None:
                wait_for(lambda: looking.execute(busy.encode()).fetchone() is not None, what="the reader to be busy")
                database.execute("DELETE FROM t", "VACUUM t")

            threading.Thread(target=vacuum).start()
            with pytest.raises(TransientError) as caught, postgres_errors("reading t"):
                reader.execute("SELECT pg_sleep(60)")
    assert "ALTER SYSTEM SET hot_standby_feedback = on" in told
    assert "conflict with recovery" in caught.value.what
    assert "hot_standby_feedback = on" in caught.value.remedy


def test_something_else_than_a_standby_is_refused(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    config = configuration(database, tmp_path, "bulk", read_from=database.dsn)
    with capturing(config) as states:
        request_snapshot(config.log_location, ("public.t",))
        wait_for(lambda: any("not a standby of" in state.detail for state in states), what="the refusal to be told")

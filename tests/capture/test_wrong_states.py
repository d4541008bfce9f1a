"""Every wrong state of slot, publication and server has its own error and remedy.

Others are tried where they arise: a slot of somebody else, one that is gone or was moved, a second capture
(test_capture.py), a wal_level that is not logical, no free slot (tests/replication/test_preflight.py), a publication
that lacks something in existing mode (tests/replication/test_publication.py), the WAL limit near (test_metrics.py),
another system behind the same hosts (test_several_hosts.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pgtide import local
from pgtide.config import Capture, Config
from pgtide.errors import ConfigurationError, LogError, PgtideError, SlotError
from pgtide.replication.connect import connect
from tests.capture.running import capturing, configuration, replayed, wait_until_captured, wait_until_let_go
from tests.capture.test_stopping import Running
from tests.cli.program import run
from tests.database import Database, create_database, drop_database
from tests.standby import standby_of
from tests.waiting import wait_for

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgtide.capture.watch.INTERVAL_S", 0.05)


def begun(database: Database, folder: Path) -> Config:
    """The configuration of a capture that has run and let its slot go."""
    config = configuration(database, folder)
    with capturing(config):
        wait_until_captured(database, config)
    wait_until_let_go(database)
    return config


def stopped_at_start(config: Config) -> PgtideError:
    running = Running(config)
    wait_for(running.ended, what="the start to be refused")
    return told(running)


def stopped_while_running(config: Config, trouble: Callable[[], None]) -> PgtideError:
    running = Running(config)
    wait_for(lambda: running.capture.streaming.is_set() or running.ended(), what="the capture to stream")
    trouble()
    wait_for(running.ended, what="the capture to stop")
    return told(running)


def told(running: Running) -> PgtideError:
    assert isinstance(running.failure, PgtideError), running.failure
    assert running.failure.exit_code == 1
    assert running.failure.remedy
    return running.failure


def exhaust_the_wal_limit(database: Database) -> None:
    """A round makes a segment of WAL; the checkpoint finds that the slot is too far behind."""
    lost = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{database.name}' AND wal_status = 'lost'"

    def is_lost() -> bool:
        database.execute("SELECT pg_logical_emit_message(false, 'x', 'x')", "SELECT pg_switch_wal()", "CHECKPOINT")
        return bool(database.rows(lost))

    wait_for(is_lost, what="the slot to be lost")


@pytest.mark.parametrize("version", [16, 18])
def test_a_slot_whose_wal_was_removed_says_so_and_names_the_limit(version: int, tmp_path: Path) -> None:
    with local.postgres(version, max_slot_wal_keep_size="1MB") as server:
        database = create_database(server)
        database.execute(TABLE)
        config = begun(database, tmp_path)
        exhaust_the_wal_limit(database)
        error = stopped_at_start(config)
        (tmp_path / "pgtide.toml").write_text(
            f'[source]\ndsn = {json.dumps(database.dsn)}\nslot = "{database.name}"\n[log]\npath = "log"\n'
        )
        status = run("status", "--json", folder=tmp_path)
    assert isinstance(error, SlotError)
    assert f'"{database.name}" was invalidated by the server (wal_removed): the log was behind' in error.what
    assert "raise max_slot_wal_keep_size" in error.remedy
    assert status.returncode == 1
    found = json.loads(status.stdout)["source"]
    assert (found["slot_state"], found["invalidation_reason"]) == ("lost", "wal_removed")


def test_a_slot_that_is_lost_while_it_is_read_stops_the_capture(tmp_path: Path) -> None:
    with local.postgres(max_slot_wal_keep_size="1MB") as server:
        database = create_database(server)
        database.execute(TABLE)
        with database.connect(autocommit=False) as holder:

            def lose_it() -> None:
                holder.execute("INSERT INTO t VALUES (1)")  # open: the server needs all WAL since then
                exhaust_the_wal_limit(database)

            error = stopped_while_running(configuration(database, tmp_path), lose_it)
    assert "(wal_removed)" in error.what


def test_a_slot_that_nobody_has_read_for_too_long_says_so(tmp_path: Path) -> None:
    with local.postgres(18, idle_replication_slot_timeout="1s") as server:
        database = create_database(server)
        database.execute(TABLE)
        config = begun(database, tmp_path)
        reason = f"SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = '{database.name}'"

        def is_lost() -> bool:
            database.execute("CHECKPOINT")
            return database.rows(reason) == [("idle_timeout",)]

        wait_for(is_lost, what="the slot to be lost")
        error = stopped_at_start(config)
    assert "(idle_timeout): nobody has read it for longer than the server allows" in error.what
    assert "idle_replication_slot_timeout" in error.remedy


@contextmanager
def captured_from_standby(
    primary: local.LocalPostgres, standby: local.LocalPostgres, folder: Path
) -> Iterator[tuple[Database, Config, Running]]:
    """A capture that streams from the standby; making its slot waits for the primary to log what is running."""
    on_primary = create_database(primary)
    on_primary.execute(TABLE, "CREATE PUBLICATION mine FOR TABLE t")
    database = Database(standby, on_primary.name)
    with standby.connect() as connection:
        query = "SELECT 1 FROM pg_database WHERE datname = %s"
        wait_for(
            lambda: connection.execute(query, [on_primary.name]).fetchone(), what="the standby to have the database"
        )
    wait_for(lambda: database.rows("SELECT 1 FROM pg_publication"), what="the standby to have the publication")
    config = configuration(database, folder, publication="mine", publication_mode="existing")
    running = Running(config)

    def streams() -> bool:
        on_primary.execute("SELECT pg_log_standby_snapshot()")
        return running.capture.streaming.is_set() or running.ended()

    wait_for(streams, what="the capture to stream from the standby")
    try:
        yield on_primary, config, running
    finally:
        running.stop()


@pytest.mark.parametrize(("version", "reason"), [(16, "conflict"), (18, "rows_removed")])
def test_a_slot_in_conflict_on_a_standby_says_what_to_set(version: int, reason: str, tmp_path: Path) -> None:
    with (
        local.postgres(version) as primary,
        standby_of(primary, hot_standby_feedback=False) as standby,
        captured_from_standby(primary, standby, tmp_path) as (on_primary, _, running),
    ):

        def conflicts() -> bool:
            on_primary.execute("CREATE TABLE passing ()", "DROP TABLE passing", "VACUUM pg_class")
            return running.ended()

        wait_for(conflicts, what="the capture to stop")
        error = told(running)
    assert f"was invalidated by the server ({reason})" in error.what
    assert "hot_standby_feedback = on" in error.remedy


def test_a_primary_whose_wal_level_was_lowered_says_so(tmp_path: Path) -> None:
    with (
        local.postgres(18) as primary,
        standby_of(primary) as standby,
        captured_from_standby(primary, standby, tmp_path) as (_, _, running),
    ):
        primary.stop()
        primary.settings["wal_level"] = "replica"
        primary.start()
        wait_for(running.ended, what="the capture to stop")
        error = told(running)
    assert "(wal_level_insufficient): the primary's wal_level is not logical any more" in error.what
    assert "set wal_level = logical on the primary" in error.remedy


def test_a_standby_that_is_promoted_while_it_streams_is_not_followed(tmp_path: Path) -> None:
    with local.postgres() as primary, standby_of(primary) as standby:
        with captured_from_standby(primary, standby, tmp_path) as (_, config, running):
            with standby.connect() as connection:
                connection.execute("SELECT pg_promote()")
            wait_for(running.ended, what="the capture to stop")
            error = told(running)
        assert isinstance(error, LogError)
        assert "the server is now on timeline 2, the log follows 1" in error.what
        assert "new log" in error.remedy
        again = stopped_at_start(config)
    assert isinstance(again, LogError)
    assert "the server is on timeline 2" in again.what


def test_a_slot_that_is_dropped_while_it_is_read_stops_the_capture(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)

    def drop_it() -> None:
        with database.server.connect() as connection:

            def dropped() -> bool:
                connection.execute(
                    "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
                    " WHERE slot_name = %s AND active_pid IS NOT NULL",
                    [database.name],
                )
                query = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
                return bool(connection.execute(query + " AND NOT active", [database.name]).rowcount)

            wait_for(dropped, what="the slot to be dropped")

    error = stopped_while_running(configuration(database, tmp_path), drop_it)
    assert f'replication slot "{database.name}" does not exist any more' in error.what
    assert "start again with a new slot" in error.remedy


def test_a_slot_that_another_client_reads_names_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgtide.capture.start._SLOT_FREE_LIMIT_S", 0.5)
    database.execute(TABLE)
    config = begun(database, tmp_path)
    with connect(f"{database.dsn} application_name=intruder", replication=True, timeout_s=5) as other:
        options = "(proto_version '1', publication_names 'pgtide')"
        other.pgconn.exec_(f"START_REPLICATION SLOT {database.name} LOGICAL 0/0 {options}".encode())
        active = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{database.name}' AND active"
        wait_for(lambda: database.rows(active), what="the other client to read")
        error = stopped_at_start(config)
        pid = other.info.backend_pid
        other.close()
    who = f"server process {pid} (user postgres, application 'intruder', client 127.0.0.1/32)"
    assert f'replication slot "{database.name}" is in use by {who}' in error.what
    assert f"SELECT pg_terminate_backend({pid})" in error.remedy


def test_a_slot_of_the_same_name_in_another_database_is_not_taken(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = begun(database, tmp_path)
    database.rows(f"SELECT pg_drop_replication_slot('{database.name}')")
    other = create_database(database.server)
    try:
        other.rows(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
        error = stopped_at_start(config)
    finally:
        drop_database(other)
    assert f"belongs to database '{other.name}' with plugin 'pgoutput'" in error.what
    assert "another name for source.slot" in error.remedy


def test_a_log_of_another_system_is_refused(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = begun(database, tmp_path)
    with local.postgres(own_identity=True) as other:
        with other.connect() as connection:
            connection.execute(f"CREATE DATABASE {database.name}".encode())
        elsewhere = Database(other, database.name)
        elsewhere.execute(TABLE)
        source = config.source.model_copy(update={"dsn": elsewhere.dsn})
        error = stopped_at_start(config.model_copy(update={"source": source}).at(config.file))
        assert elsewhere.rows("SELECT FROM pg_publication") == [], "nothing is altered there"
    assert isinstance(error, LogError)
    assert "belongs to system identifier" in error.what
    assert "another log.path" in error.remedy


def test_a_table_that_is_taken_out_of_the_publication_stops_the_capture(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE, "CREATE TABLE u (id int PRIMARY KEY)", "CREATE TABLE gone (id int PRIMARY KEY)")
    config = configuration(database, tmp_path)

    def take_it_out() -> None:
        database.execute("DROP TABLE gone", "ALTER PUBLICATION pgtide DROP TABLE u")

    for error in (stopped_while_running(config, take_it_out), stopped_at_start(config)):
        assert error.what.startswith("public.u: taken out of the publication pgtide")
        assert "for one start" in error.remedy
    with capturing(configuration(database, tmp_path, tables=("public.t",))):
        pass
    with capturing(config):
        assert database.rows(
            "SELECT tablename::text FROM pg_publication_tables WHERE pubname = 'pgtide' ORDER BY 1"
        ) == [
            ("t",),
            ("u",),
        ]


@pytest.mark.parametrize("while_running", [False, True])
def test_a_table_that_was_out_of_the_publication_for_a_moment_is_not_taken_for_complete(
    database: Database, tmp_path: Path, while_running: bool
) -> None:
    database.execute(TABLE, "CREATE TABLE u (id int PRIMARY KEY)")
    config = begun(database, tmp_path)

    def out_and_back() -> None:
        database.execute(
            "ALTER PUBLICATION pgtide DROP TABLE u", "INSERT INTO u VALUES (1)", "ALTER PUBLICATION pgtide ADD TABLE u"
        )

    if while_running:  # which may look in the very moment
        error = stopped_while_running(config, out_and_back)
        assert error.what.startswith("public.u: taken out of the publication pgtide ")
    else:
        out_and_back()
        error = stopped_at_start(config)
        assert error.what.startswith("public.u: taken out of the publication pgtide and put back")
    assert "for one start" in error.remedy


def test_a_table_that_its_schema_kept_in_the_publication_is_complete(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE, "CREATE PUBLICATION one FOR TABLE t, TABLES IN SCHEMA public")
    config = configuration(database, tmp_path, publication="one", publication_mode="existing")
    with capturing(config):
        pass
    wait_until_let_go(database)
    database.execute(
        "ALTER PUBLICATION one DROP TABLE t", "INSERT INTO t VALUES (1)", "ALTER PUBLICATION one ADD TABLE t"
    )
    with capturing(config):
        assert replayed(wait_until_captured(database, config), "public.t").keys() == {1}


def test_a_publication_that_was_dropped_in_the_meantime_is_not_made_again(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    config = begun(database, tmp_path)
    database.execute("DROP PUBLICATION pgtide")
    error = stopped_at_start(config)
    assert "publication pgtide was dropped while changes are captured" in error.what
    assert "new log" in error.remedy
    assert database.rows("SELECT pubname::text FROM pg_publication") == [("pgtide_insert_only",)]


@pytest.mark.parametrize("known", [True, False])
def test_changes_from_a_time_without_publication_cannot_be_passed(
    database: Database, tmp_path: Path, known: bool
) -> None:
    database.execute(TABLE)
    config = begun(database, tmp_path)
    database.execute(
        "DROP PUBLICATION pgtide",
        "INSERT INTO t VALUES (1)",
        "CREATE PUBLICATION pgtide FOR TABLE t WITH (publish_via_partition_root = true)",
        "COMMENT ON PUBLICATION pgtide IS 'managed by pgtide'",
    )
    if not known:
        (config.log_path / "control" / "histories.json").unlink()
    error = stopped_at_start(config)
    what = "publication of public.t was dropped and made again" if known else "changes from a time without publication"
    assert what in error.what
    assert "new log" in error.remedy


def test_a_spool_of_another_log_is_refused_and_left_alone(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    spool = tmp_path / "spool"
    spooling = Capture(spool_path=str(spool))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    config = configuration(database, first).model_copy(update={"capture": spooling}).at(first / "pgtide.toml")
    for _ in range(2):  # its own log may come back
        with capturing(config):
            pass
    kept = spool / "0000000001.prepared"
    kept.touch()
    other = configuration(database, second, slot_suffix="2", publication="other")
    other = other.model_copy(update={"capture": spooling}).at(second / "pgtide.toml")
    with pytest.raises(ConfigurationError, match="the spool of another log") as told, capturing(other):
        pass
    assert "choose another capture.spool_path" in told.value.remedy
    assert kept.exists()


def test_a_spool_that_cannot_be_written_is_said_and_waited_for(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    blocked = tmp_path / "spool"
    blocked.write_text("a file where the folder shall be")
    config = configuration(database, tmp_path).model_copy(update={"capture": Capture(spool_path=str(blocked))})
    running = Running(config.at(tmp_path / "pgtide.toml"))
    try:
        wait_for(lambda: any("the spool in" in state.detail for state in running.states), what="the trouble to be said")
        blocked.unlink()
        wait_for(running.capture.streaming.is_set, what="the capture to go on by itself")
    finally:
        running.stop()
    assert running.failure is None

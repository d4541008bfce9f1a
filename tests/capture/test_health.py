"""Health of a capture inside another program, whose end does not end the process."""

from __future__ import annotations

from pathlib import Path

from pgtide.capture.endpoint import verdict
from tests.capture.running import configuration
from tests.capture.test_stopping import Running
from tests.database import Database
from tests.waiting import wait_for


def test_a_capture_that_has_died_is_unhealthy_and_says_why(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.rows(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
    running = Running(configuration(database, tmp_path))
    wait_for(running.ended, what="the start to be refused")
    illness = running.capture.health.illness()
    assert illness is not None
    assert illness.startswith(f'the capture has stopped: replication slot "{database.name}" exists already')
    assert running.capture.health.unreadiness(0) == illness
    assert verdict("healthy", illness).status == 503


def test_a_capture_that_was_stopped_is_not_ready(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    running = Running(configuration(database, tmp_path))
    wait_for(lambda: running.capture.health.unreadiness(running.capture.durable_lsn) is None, what="it to be ready")
    running.stop()
    assert running.capture.health.unreadiness(running.capture.durable_lsn) == "the capture has stopped: it was asked to"

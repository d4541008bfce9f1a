"""The origin filter: changes that were themselves replicated from elsewhere, with and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgtide import local
from tests.capture.running import capturing, changes, configuration, wait_until_captured
from tests.cli.program import run
from tests.database import Database, create_database

TABLE = "CREATE TABLE t (id int PRIMARY KEY, note text)"


@contextmanager
def replicating(database: Database) -> Iterator[tuple[str, psycopg.Connection[tuple[Any, ...]]]]:
    """A session whose transactions come from elsewhere, as those of a subscription do, and the origin's name."""
    origin = f"elsewhere_{database.name}"
    with database.connect() as connection:
        connection.execute("SELECT pg_replication_origin_create(%s)", [origin])
        connection.execute("SELECT pg_replication_origin_session_setup(%s)", [origin])
        yield origin, connection
        connection.execute("SELECT pg_replication_origin_session_reset()")
        connection.execute("SELECT pg_replication_origin_drop(%s)", [origin])


@pytest.mark.parametrize("wanted", ["any", "none"])
def test_replicated_changes_arrive_only_if_any_origin_is_wanted(
    database: Database, tmp_path: Path, wanted: str
) -> None:
    database.execute(TABLE)
    config = configuration(database, tmp_path, origin=wanted)
    with capturing(config), replicating(database) as (origin, session):
        database.execute("INSERT INTO t VALUES (1, 'own')")
        session.execute("INSERT INTO t VALUES (2, 'replicated')")
        session.execute("INSERT INTO t SELECT i, repeat('x', 2000) FROM generate_series(100, 599) i")
        database.execute("UPDATE t SET note = 'own again' WHERE id = 2")
        reader = wait_until_captured(database, config)
    own = [row["note"] for row in changes(reader, "public.t") if row["id"] < 100]
    origins = reader.transactions(0, reader.end().end_offset)["origin"].to_pylist()
    if wanted == "any":
        assert own == ["own", "replicated", "own again"]
        assert len(changes(reader, "public.t")) == 503
        assert origins == [None, origin, origin, None]
    else:
        assert own == ["own", "own again"]
        assert len(changes(reader, "public.t")) == 2
        assert origins == [None, None]


def test_a_server_without_the_filter_refuses_it_and_works_without(tmp_path: Path) -> None:
    with local.postgres(15) as server:
        database = create_database(server)
        database.execute(TABLE)
        refused = tmp_path / "refused"
        refused.mkdir()
        (refused / "pgtide.toml").write_text(f'[source]\ndsn = {json.dumps(database.dsn)}\norigin = "none"\n')
        done = run("capture", folder=refused)
        assert done.returncode == 2
        assert 'pgtide.toml: source.origin: found "none", which Postgres 15 does not know' in done.stderr
        assert 'Set source.origin = "any"' in done.stderr
        assert database.rows("SELECT FROM pg_publication") == []
        assert database.rows("SELECT FROM pg_replication_slots") == []
        assert [path.name for path in refused.iterdir()] == ["pgtide.toml"]
        config = configuration(database, tmp_path, origin="any")
        with capturing(config), replicating(database) as (origin, session):
            session.execute("INSERT INTO t VALUES (1, 'replicated')")
            reader = wait_until_captured(database, config)
    assert reader.transactions(0, 1)["origin"].to_pylist() == [origin]

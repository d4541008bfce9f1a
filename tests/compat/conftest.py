"""Every test here runs on Postgres 15, 16, 17 and 18: one server of each for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pgtide.local import VERSIONS, LocalPostgres
from tests.database import Database, create_database, drop_database


@pytest.fixture(scope="session", params=VERSIONS)
def any_server(request: pytest.FixtureRequest, server_of: Callable[[int], LocalPostgres]) -> LocalPostgres:
    return server_of(request.param)


@pytest.fixture
def any_database(any_server: LocalPostgres) -> Iterator[Database]:
    created = create_database(any_server)
    yield created
    drop_database(created)

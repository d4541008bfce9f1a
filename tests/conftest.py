"""What all tests share: one Postgres, one S3 server, one Spark session, a database per test; and what was left out.

A skipped test is a claim that was not checked.  Each run names them at its end, and with `CI=true` they fail it.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from pgtide import local
from pgtide.local.jars import postgres_jdbc_jars
from tests.database import Database, create_database, drop_database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A JVM that lives for a minute spends more on compiling well than it gains: this is for all that tests start, whoever
# starts it.  With one tier the JVM keeps 48 MB for code, which the queries of all tests together have filled.
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
if _QUICK_JVM not in os.environ.get("JAVA_TOOL_OPTIONS", ""):
    os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {_QUICK_JVM}".strip()

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

hypothesis.settings.register_profile("local", deadline=None, max_examples=100)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "local"))


# Files that a writer of the log, or of the spool, keeps open.
_WRITERS_FILE = re.compile(r"/(segments/[^/]+\.seg|control/[^/]+|[^/]*lock)( \(deleted\))?$")


@pytest.fixture(autouse=True)
def no_files_of_the_dead() -> Iterator[None]:
    """A test that plays the death of a writer in its own process leaves files open, as a dead process would not; with
    a thousand of them, select() fails in whatever test comes then."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    for descriptor in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):
            if _WRITERS_FILE.search(os.readlink(f"/proc/self/fd/{descriptor}")):
                os.close(int(descriptor))


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[int], local.LocalPostgres]]:
    """The server of a version that tests share; one that stops or configures a server starts its own."""
    found: dict[int, local.LocalPostgres | str] = {}  # the server, or why there is none
    with ExitStack() as stack:

        def start(version: int) -> local.LocalPostgres:
            if version not in found:
                try:
                    found[version] = stack.enter_context(local.postgres(version))
                except local.PostgresUnavailableError as error:
                    found[version] = f"{error.what} {error.remedy}"
            server = found[version]
            if isinstance(server, str):
                pytest.skip(server)
            return server

        yield start


@pytest.fixture(scope="session")
def server(server_of: Callable[[int], local.LocalPostgres]) -> local.LocalPostgres:
    """The Postgres 16 that tests share."""
    return server_of(16)


@pytest.fixture
def database(server: local.LocalPostgres) -> Iterator[Database]:
    """An empty database; its slots go with it."""
    created = create_database(server)
    yield created
    drop_database(created)


@pytest.fixture(scope="session")
def object_store_to_be() -> Iterator[local.LocalS3]:
    """Where the S3 server will be, in the environment: Spark's workers have that of the session's beginning."""
    with local.LocalS3() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield store


@pytest.fixture(scope="session")
def object_store(object_store_to_be: local.LocalS3) -> local.LocalS3:
    """The S3 server that tests share; one that stops it starts it again."""
    object_store_to_be.start()
    return object_store_to_be


@pytest.fixture
def bucket(object_store: local.LocalS3) -> str:
    """The URL of an empty bucket."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    object_store.create_bucket(name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, object_store_to_be: local.LocalS3) -> Iterator[SparkSession]:
    """The Spark session that tests share; each test uses names of its own in the catalog `lake`."""
    with pytest.MonkeyPatch.context() as patch:
        # The driver of JDBC catalogs, behind all other jars: so the archive of classes still fits.
        patch.setenv("SPARK_DIST_CLASSPATH", os.pathsep.join(map(str, postgres_jdbc_jars())))
        session = local.spark(warehouse=tmp_path_factory.mktemp("lake"))
    yield session
    session.stop()


# Tests that need Spark, in two groups that take about as long: two cores can bear two sessions, each shared by a group.
# They take longest, and begin; the rest mostly waits, and goes file by file to who is free.
_SPARK_GROUPS = {
    "spark with postgres": (
        *("tests/chaos", "tests/demo", "tests/docs", "tests/bench", "tests/examples"),
        *("tests/cli/test_verify", "tests/local/test_spark", "tests/redo/test_reader"),
        *("tests/spark/test_alterations", "tests/spark/test_joining", "tests/spark/test_load"),
        *("tests/spark/test_new_pair", "tests/spark/test_reads"),
    ),
    "spark": ("tests/spark", "tests/sinks"),
}


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((name for name, begins in _SPARK_GROUPS.items() if file.startswith(begins)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) and _group(item.nodeid) not in _SPARK_GROUPS:
            raise pytest.UsageError(
                f"{item.nodeid} needs Spark: name its file in _SPARK_GROUPS ({__file__}), or ever more sessions run"
            )
    items.sort(key=lambda item: _group(item.nodeid) not in _SPARK_GROUPS)


class _ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Which worker runs what (`make test` has three)."""
    return _ByGroup(config, log)


_heavy_left_out = pytest.StashKey[int]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    heavy = [item for item in items if item.get_closest_marker("heavy")]
    if heavy:
        config = heavy[0].config
        config.stash[_heavy_left_out] = config.stash.get(_heavy_left_out, 0) + len(heavy)


def _skipped(config: pytest.Config) -> list[tuple[str, str]]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    found: list[tuple[str, str]] = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found.append((report.nodeid, reason.removeprefix("Skipped: ")))
    return found


def _by_file(skipped: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for test, reason in skipped:
        found.setdefault((test.split("::")[0], reason), []).append(test)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, int] | None = getattr(session.config, "workeroutput", None)
    if told is not None:  # we are a worker: the run's summary is printed by the process that started us
        told["heavy"] = session.config.stash.get(_heavy_left_out, 0)
    if IN_CI and session.exitstatus == pytest.ExitCode.OK and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; all of them collect the same tests."""
    node.config.stash[_heavy_left_out] = getattr(node, "workeroutput", {}).get("heavy", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = _skipped(config)
    heavy = config.stash.get(_heavy_left_out, 0)
    if not skipped and not heavy:
        return
    terminalreporter.section("left out on this machine")
    for (file, reason), tests in _by_file(skipped).items():
        terminalreporter.line(f"{tests[0] if len(tests) == 1 else f'{len(tests)} tests of {file}'}: {reason}")
    if heavy:
        terminalreporter.line(f"{heavy} heavy tests: make heavy")
    if IN_CI and skipped:
        terminalreporter.line("CI is set: a test that was left out fails the run.", red=True)

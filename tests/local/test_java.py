"""Java: the first that fits is taken, one that does not is passed over."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pgtide.errors import PgtideError
from pgtide.local import java


def a_java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\n')
    return home


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any Java but what the test puts there: folder `system` holds the system's."""
    (tmp_path / "system").mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("PGTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tmp_path


def java_home(alone: Path) -> Path:
    return java.java_home(system_folders=[alone / "system"])


def started_by(home: Path) -> Path:
    """The home of the Java that `home`, a likeness, stands for."""
    return (home / "release").resolve().parent


def test_java_home_wins_over_the_path_and_the_path_over_the_system(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = a_java(alone / "system" / "java-17", "17.0.1")
    assert started_by(java_home(alone)) == system
    on_path = a_java(alone / "path", "21.0.2")
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert started_by(java_home(alone)) == on_path
    named = a_java(alone / "named", "17.0.3")
    monkeypatch.setenv("JAVA_HOME", str(named))
    assert started_by(java_home(alone)) == named


def test_java_of_another_version_is_passed_over(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(a_java(alone / "named", "25.0.1")))
    a_java(alone / "system" / "java-11", "11.0.20")
    fits = a_java(alone / "system" / "java-21", "21")
    assert started_by(java_home(alone)) == fits


def test_without_a_java_that_fits_the_error_names_what_was_found_and_a_remedy(alone: Path) -> None:
    a_java(alone / "system" / "java-11", "11.0.20")
    with pytest.raises(PgtideError, match="java-11 is 11") as raised:
        java_home(alone)
    assert "apt-get install" in raised.value.remedy


def test_java_is_started_without_the_module_that_spark_asks_for_and_with_all_else(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(a_java(alone / "with space", "21.0.8")))
    program = java_home(alone) / "bin" / "java"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Da=b c", "Main", ""]
    said = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["-Xmx1g", "-Da=b c", "Main", ""]


def test_a_home_that_was_handed_out_has_the_other_programs_and_is_handed_out_again(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = a_java(alone / "system" / "java-21", "21.0.8")
    (real / "bin" / "keytool").write_text("")
    (real / "lib").mkdir()
    home = java_home(alone)
    assert (home / "bin" / "keytool").resolve() == real / "bin" / "keytool"
    assert (home / "lib").resolve() == real / "lib"
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_home(alone) == home


def test_on_a_machine_without_java_the_wheel_s_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setenv("PGTIDE_CACHE", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    program = java.java_home(system_folders=()) / "bin" / "java"
    command = [str(program), "--add-modules=jdk.incubator.vector", "-version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert 'version "21' in said

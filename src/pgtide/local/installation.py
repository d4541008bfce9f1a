"""What an installation of Postgres is to us, and where one that we made ourselves is kept.

As root the server runs under another account, which must be able to reach its programs: what is copied or fetched goes
to pgtide's cache if that account can enter it, else to a folder that every account can enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.account import Account
from pgtide.local.cache import cache_folder

_SHARED_CACHE = Path("/var/cache/pgtide")  # root's only: reachable for every account, writable for none


@dataclass(frozen=True, slots=True)
class Installation:
    """The programs of one major version."""

    programs: Path  # the `bin` folder
    release: str  # tells builds apart: a template cluster is used only by the build that made it
    libraries: tuple[Path, ...] = ()  # folders of libraries that the machine lacks


class PostgresUnavailableError(PgtideError):
    """This version of Postgres is not on the machine and cannot be fetched."""


def reachable_cache(account: Account | None) -> Path:
    """A folder for what `account` is to run."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    return cache if account is None or account.can_enter(cache) else shared_cache()


def shared_cache() -> Path:
    """A folder of root's that every account can enter."""
    _SHARED_CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    return _SHARED_CACHE


def open_to_all(folder: Path) -> None:
    """Makes everything in `folder` readable: a strict umask would otherwise live on in what was made under it."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)

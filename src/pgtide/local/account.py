"""Under which account a Postgres server runs, and whether that account can reach a folder.

Postgres refuses to run as root.  As root, its programs are started under an unprivileged account: `postgres` where the
machine has it, else `nobody`.  Such an account cannot pass through folders that only root may enter (a checkout
below a 0700 home), so reachability is asked before anything is started there.
"""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from pgtide.errors import PgtideError

_UNPRIVILEGED = ("postgres", "nobody")


class Credentials(TypedDict, total=False):
    """The arguments of `subprocess` that change the account."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """An account other than our own, to which a program is dropped."""

    uid: int
    gid: int

    def can_enter(self, folder: Path) -> bool:
        """Whether the account may read `folder` and pass through every folder above it."""
        if not self._may(folder, "r"):
            return False
        return all(self._may(step, "x") for step in (folder, *folder.parents))

    def can_read(self, file: Path) -> bool:
        return self.can_enter(file.parent) and self._may(file, "r")

    def _may(self, path: Path, what: str) -> bool:
        status = path.stat()
        bits = {"r": (stat.S_IRUSR, stat.S_IRGRP, stat.S_IROTH), "x": (stat.S_IXUSR, stat.S_IXGRP, stat.S_IXOTH)}[what]
        if status.st_uid == self.uid:
            bit = bits[0]
        elif status.st_gid == self.gid:
            bit = bits[1]
        else:
            bit = bits[2]
        return bool(status.st_mode & bit)


def server_account() -> Account | None:
    """The account to drop to; None when we are not root and run the server as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise PgtideError(
        "Postgres does not run as root, and this machine has neither an account postgres nor nobody.",
        remedy="Create one (useradd --system postgres), or run as another user than root.",
    )


def credentials(account: Account | None) -> Credentials:
    """What to pass to `subprocess` so that the program runs under `account`."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def give(path: Path, account: Account | None) -> None:
    """Makes `account` the owner of a file, or of a folder and all that is in it."""
    if account is None:
        return
    for entry in (path, *path.rglob("*")):
        os.chown(entry, account.uid, account.gid, follow_symlinks=False)

"""A standby of a local server: a base backup of it that follows by streaming."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pgtide.local import LocalPostgres
from pgtide.local.account import give, server_account


@contextmanager
def standby_of(primary: LocalPostgres) -> Iterator[LocalPostgres]:
    standby = LocalPostgres(primary.version, {"hot_standby_feedback": True}, password=None, own_identity=False)
    with standby:
        shutil.rmtree(standby.data)
        subprocess.run(
            [
                primary.programs / "pg_basebackup",
                "-D",
                standby.data,
                "-d",
                primary.dsn,
                "-X",
                "stream",
                "-c",
                "fast",
                "-R",
            ],
            check=True,
            capture_output=True,
        )
        give(standby.data, server_account())
        standby.start()
        yield standby

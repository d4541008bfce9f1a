"""A standby of a local server: a base backup of it that follows by streaming."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pgtide.local import LocalPostgres
from pgtide.local.account import give, server_account


@contextmanager
def standby_of(primary: LocalPostgres, *, hot_standby_feedback: bool = True) -> Iterator[LocalPostgres]:
    settings: dict[str, str | int | float | bool] = {
        "hot_standby_feedback": hot_standby_feedback,
        "max_standby_streaming_delay": 0,
    }
    standby = LocalPostgres(primary.version, settings, password=None, own_identity=False)
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

"""The real product on the demo's database: `pgtide run` with a configuration file, as a user would start it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pgtide.config import Config, load_config
from pgtide.demo.child import Child

_CONFIGURATION = """\
# The demo's configuration. `pgtide init` writes one for your own database, with every key explained.
[source]
dsn = {dsn}
tables = ["public.*"]

[log]
path = "log"

[mirror]
format = "iceberg"
warehouse = "lake"
"""
_POLL_S = 0.02


class Pipeline:
    """Starts the product, kills it and brings it back; all it writes is below `folder`."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self._folder = folder
        self.config_file = folder / "pgtide.toml"
        self.config_file.write_text(_CONFIGURATION.format(dsn=json.dumps(dsn)))
        self.config: Config = load_config(self.config_file)
        self.output = folder / "pipeline.log"
        self._child: Child | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "pgtide", "run", "--config", str(self.config_file)]
        self._child = Child(command, short_lived(self._folder), self.output)

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it is doing."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def check(self) -> None:
        """Raises if it ended though nobody asked it to."""
        if self._child is not None and (code := self._child.exit_code()) is not None:
            raise self._child.failure(f"`pgtide run` ended by itself with exit code {code}")

    def end(self, limit_s: float) -> None:
        """SIGTERM, and waits for the clean end."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.terminate()
            limit = time.monotonic() + limit_s
            while (code := child.exit_code()) is None:
                if time.monotonic() > limit:
                    raise child.failure(f"`pgtide run` did not end within {limit_s:.0f} s of SIGTERM")
                time.sleep(_POLL_S)
            if code != 0:
                raise child.failure(f"`pgtide run` ended with exit code {code} after SIGTERM")
        finally:
            child.kill()


def short_lived(folder: Path) -> dict[str, str]:
    """Environment for a child with a JVM that lives for seconds and may be killed.

    Temporary files go to our folder, because a killed process cannot remove its own.  The JVM keeps to its first
    compiler: the second one pays only after minutes, and took half of the proof's CPU time (36 s against 18 s).
    """
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    java_options = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -XX:TieredStopAtLevel=1".strip()
    return {"TMPDIR": str(temporary), "JAVA_TOOL_OPTIONS": java_options}

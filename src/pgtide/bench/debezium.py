"""Debezium's embedded engine as a peer: it drains a slot of its own, and its records are counted and dropped.

Its start-up is left out: time runs from its first change to its last.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.java import java_home
from pgtide.local.maven import Wanted, jars_in_cache
from pgtide.local.postgres import LocalPostgres

_VERSION = "3.6.0.Final"
_LIMIT_S = 600
_PROGRAM = Path(__file__).with_name("DebeziumDrain.java")


class NotRunError(PgtideError):
    """The peer cannot be run here."""


def drain_seconds(server: LocalPostgres, slot: str, changes: int) -> float:
    """Seconds that Debezium takes for the `changes` that wait in the slot."""
    names = ("debezium-embedded", "debezium-connector-postgres")
    wanted = Wanted("Debezium's jars", tuple(f"io.debezium:{name}:{_VERSION}" for name in names))
    try:
        jars = jars_in_cache(f"debezium-{_VERSION}", wanted)
    except PgtideError as error:
        raise NotRunError(error.what) from error
    class_path = ":".join(map(str, jars))
    command = [str(java_home() / "bin" / "java"), "-Xmx2g", "-cp", class_path, str(_PROGRAM), str(changes)]
    with tempfile.TemporaryDirectory(prefix="pgtide-debezium-") as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            input=_settings(server, slot),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    if done.returncode:
        # A runtime without the compiler cannot start a program from its source.
        raise NotRunError(f"Debezium ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return float(done.stdout.strip().splitlines()[-1])


def _settings(server: LocalPostgres, slot: str) -> str:
    settings = {
        "name": slot,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "topic.prefix": "bench",
        "database.hostname": "127.0.0.1",
        "database.port": server.port,
        "database.user": "postgres",
        "database.password": "none",
        "database.dbname": "postgres",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": "pgtide",
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())

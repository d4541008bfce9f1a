"""An archive of the classes that a Spark session of this machine loads (Java's class data sharing).

With it a JVM gets to its first commit with half the CPU: classes are mapped into memory and not read from jars and
verified.  `make test` makes it, because it starts dozens of sessions; every local session that finds it uses it.  It is
for one Java, one Spark, one list of jars; a JVM that finds that it does not fit goes on without it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pgtide.local.cache import cache_folder

_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
_LIMIT_S = 300


def archive_options(home: Path, jars: Sequence[Path]) -> tuple[str, ...]:
    """Options for the JVM; none if there is no archive."""
    file = _archive(home, jars)
    try:
        has_classes = file.stat().st_size > 0
    except FileNotFoundError:
        has_classes = False
    return (f"-XX:SharedArchiveFile={file}", *_QUIET) if has_classes and " " not in str(file) else ()


def make_archive() -> None:
    """Has a session of its own load what a mirror needs, and keeps that; a Java that cannot do it leaves no classes."""
    from pgtide.local.jars import lakehouse_jars
    from pgtide.local.java import java_home

    home = java_home()
    file = _archive(home, lakehouse_jars())
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / "classes.jsa"
        script = "import sys; from pgtide.local.class_archive import load_classes; load_classes(sys.argv[1])"
        command = [sys.executable, "-c", script, str(made)]
        subprocess.run(command, env=os.environ | {"JAVA_HOME": str(home)}, timeout=_LIMIT_S, check=False)
        made.touch()  # empty: not to be tried again
        made.replace(file)


def _archive(home: Path, jars: Sequence[Path]) -> Path:
    release = home / "release"
    said = [
        str(home.resolve()),
        release.read_text(errors="replace") if release.is_file() else "",
        importlib.metadata.version("pyspark"),
        *(f"{jar.name} {jar.stat().st_size}" for jar in jars),
    ]
    return cache_folder() / f"classes-{hashlib.sha256(chr(10).join(said).encode()).hexdigest()[:16]}.jsa"


def load_classes(archive: str) -> None:
    """What a mirror does, in little, in a JVM that writes its classes down when it ends."""
    from pyspark import SparkContext

    from pgtide.local.spark import spark

    options = " ".join((f"-XX:ArchiveClassesAtExit={archive}", *_QUIET))
    session = spark(**{"spark.driver.defaultJavaOptions": options})
    session.sql("CREATE NAMESPACE lake.warm")
    session.sql("CREATE TABLE lake.warm.up (id bigint, at timestamp, note string) USING iceberg")
    rows = session.range(10).selectExpr("id", "current_timestamp() AS at", "string(id) AS note")
    rows.writeTo("lake.warm.up").append()
    rows.createOrReplaceTempView("changes")
    session.sql(
        "MERGE INTO lake.warm.up t USING changes c ON t.id = c.id WHEN MATCHED AND c.id > 5 THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    session.sql("SELECT count(*), max_by(note, id) FROM lake.warm.up GROUP BY id % 2").toArrow()
    gateway = SparkContext._gateway
    session.stop()
    if gateway is not None:
        gateway.proc.stdin.close()  # by which the JVM knows that it is to end
        gateway.proc.wait(_LIMIT_S)

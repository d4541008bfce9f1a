"""The one place that builds a Spark session: for the mirror, the tests, the demo and the benchmarks.

A session has the Iceberg and Delta jars and extensions, an Iceberg catalog of files at a warehouse folder, UTC, Arrow,
and nothing that touches the working folder or listens beyond loopback.  Whatever the caller configures wins.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pgtide.errors import PgtideError
from pgtide.local.class_archive import archive_options
from pgtide.local.jars import lakehouse_jars, postgres_jdbc_jars
from pgtide.local.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_EXTENSIONS = (
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "io.delta.sql.DeltaSparkSessionExtension",
)


def spark(
    *,
    warehouse: str | Path | None = None,
    catalog: str = "lake",
    master: str | None = None,
    **conf: str,
) -> SparkSession:
    """A local session with all defaults; `conf` holds Spark's own settings: `spark(**{"spark.ui.enabled": "true"})`.

    Without a warehouse, the catalog lives in a temporary folder that goes with the process.
    """
    return build_session(master=master or local_master(), conf=conf, warehouse=warehouse, catalog=catalog)


def local_master() -> str:
    """All cores, and at least two: a streaming query on one core waits for itself."""
    return f"local[{max(2, os.cpu_count() or 2)}]"


def build_session(
    *,
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
    warehouse: str | Path | None = None,
    catalog: str = "lake",
    jars: Sequence[Path] | None = None,
    app_name: str = "pgtide",
) -> SparkSession:
    """A session on `master`; `jars` are found or fetched when not given.

    The catalog is defined here only if `conf` does not define it (but for its cache, which is off unless `conf` says
    otherwise); one in a Postgres database gets its driver.  A session of this process that has the catalog is returned
    as it is: Spark would take the new settings in, and go on with the catalog as it was opened.
    """
    from pyspark.sql import SparkSession

    own = dict(conf or {})
    running = _running(catalog)
    if running is not None:
        if warehouse is not None and f"spark.sql.catalog.{catalog}" not in own:
            _check_warehouse(running, catalog, warehouse)
        return running
    folder = Path(tempfile.mkdtemp(prefix="pgtide-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    brings_jars = "spark.jars" in own or "spark.jars.packages" in own
    if jars is None:
        jars = [] if brings_jars else lakehouse_jars()
        if not brings_jars and own.get(f"spark.sql.catalog.{catalog}.uri", "").startswith("jdbc:postgresql:"):
            jars = [*jars, *postgres_jdbc_jars()]
    settings = {
        **_common_settings(folder),
        **_catalog_settings(catalog, warehouse or folder / "warehouse"),
        **(_local_settings(folder, master, jars) if master.startswith("local") else {}),
        **_jar_settings(jars, master),
    }
    if f"spark.sql.catalog.{catalog}" in own:
        cache = f"spark.sql.catalog.{catalog}.cache-enabled"
        settings = {name: value for name, value in settings.items() if name == cache or not _belongs_to(name, catalog)}

    # The JVM is started by PySpark from the environment, and Spark's workers inherit it.
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in (settings | own).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _running(catalog: str) -> SparkSession | None:
    from pyspark.sql import SparkSession

    session = SparkSession._instantiatedSession
    if session is None or session._sc._jsc is None or session.conf.get(f"spark.sql.catalog.{catalog}", None) is None:
        return None
    return session


def _check_warehouse(session: SparkSession, catalog: str, warehouse: str | Path) -> None:
    name = f"spark.sql.catalog.{catalog}.warehouse"
    wanted, found = _catalog_settings(catalog, warehouse)[name], session.conf.get(name, None)
    if found != wanted:
        raise PgtideError(
            f"This process has a Spark session already, whose catalog {catalog} is in {found}, not in {wanted}.",
            remedy="Stop it first: spark.stop()",
        )


def _common_settings(folder: Path) -> dict[str, str]:
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.extensions": ",".join(_EXTENSIONS),
        "spark.sql.catalogImplementation": "in-memory",
        # The lists of keys in the mirror's MERGE would otherwise become code of their own, compiled each time.
        "spark.sql.optimizer.inSetSwitchThreshold": "0",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
    }


def _catalog_settings(catalog: str, warehouse: str | Path) -> dict[str, str]:
    prefix = f"spark.sql.catalog.{catalog}"
    location = str(Path(warehouse).absolute()) if "://" not in str(warehouse) else str(warehouse)
    return {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        f"{prefix}.type": "hadoop",
        f"{prefix}.warehouse": location,
        # A cached table would hide what another process has committed, and the mirror must see that.
        f"{prefix}.cache-enabled": "false",
    }


def _belongs_to(name: str, catalog: str) -> bool:
    prefix = f"spark.sql.catalog.{catalog}"
    return name == prefix or name.startswith(f"{prefix}.")


def _local_settings(folder: Path, master: str, jars: Sequence[Path]) -> dict[str, str]:
    options = (
        *archive_options(java_home(), jars),
        f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}",
        f"-Dderby.system.home={folder}",
        f"-Djava.io.tmpdir={folder}",
        # Time zones of java.sql types follow the JVM's, not the session's.
        "-Duser.timezone=UTC",
    )
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": str(_cores(master)),
    }


def _cores(master: str) -> int:
    """Of `local`, `local[4]`, `local[*]` and `local[4,2]` (the second number is how often a task may fail)."""
    named = master.removeprefix("local").strip("[]").split(",")[0]
    if named == "*":
        return os.cpu_count() or 1
    return int(named) if named.isdigit() else 1


def _jar_settings(jars: Sequence[Path], master: str) -> dict[str, str]:
    if not jars:
        return {}
    paths = [str(jar) for jar in jars]
    # In one process the class path will do; spark.jars would first copy them all, for every session.
    if master.startswith("local"):
        return {"spark.driver.extraClassPath": os.pathsep.join(paths)}
    return {"spark.jars": ",".join(paths)}

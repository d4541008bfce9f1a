"""Jars by their Maven coordinates: fetched once into the cache, used by path afterwards.

They are resolved by Spark itself (Ivy, with whatever repositories and mirrors this machine has configured for it) and,
where that fails and Maven is set up, by Maven.  Both are told of the proxy that this machine names, and where Java does
not know who signed a repository's certificate, they are asked again with the authorities that Python and pip trust.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pgtide.errors import PgtideError
from pgtide.local.cache import cache_folder, made_once
from pgtide.local.java import java_home
from pgtide.local.proxy import proxy_options
from pgtide.local.trust import machine_certificates, trust_options, write_trust_store

_RESOLVE_LIMIT_S = 1800

# A certificate that leads to no authority of Java's list, and a list that is empty (a half-installed Debian package).
_DISTRUST = re.compile(r"PKIX path|trustAnchors parameter must be non-empty")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Artifacts with all that they depend on, but for some (`group:*`)."""

    what: str  # for messages: "the Iceberg and Delta jars"
    coordinates: tuple[str, ...]
    excluded: tuple[str, ...] = ()


def jars_in_cache(name: str, wanted: Wanted) -> list[Path]:
    """The jars, fetched into the cache folder's `jars/<name>` if they are not there yet."""
    folder = made_once(cache_folder() / "jars" / name, lambda aside: _fetch(wanted, aside))
    return sorted(folder.glob("*.jar"))


def _fetch(wanted: Wanted, aside: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pgtide-jars-") as work:
        failures: list[str] = []
        for resolve in (resolve_with_spark, _resolve_with_maven):
            try:
                found = resolve(wanted, Path(work))
            except PgtideError as error:
                failures.append(str(error))
                continue
            for jar in found:
                shutil.copy2(jar, aside / jar.name)
            return
    raise PgtideError(
        f"{wanted.what} could not be fetched.\n" + "\n".join(failures),
        remedy="Check the network and the repositories configured for Spark (spark.jars.ivySettings) or for Maven.",
    )


def resolve_with_spark(wanted: Wanted, work: Path) -> list[Path]:
    ivy, script = work / "ivy", work / "nothing.py"
    script.write_text("")
    command = [str(spark_home() / "bin" / "spark-submit"), "--packages", ",".join(wanted.coordinates)]
    if wanted.excluded:
        command += ["--exclude-packages", ",".join(wanted.excluded)]
    _run("Spark's resolver", [*command, "--conf", f"spark.jars.ivy={ivy}", str(script)], work)
    return list((ivy / "jars").glob("*.jar"))


def _resolve_with_maven(wanted: Wanted, work: Path) -> list[Path]:
    program = shutil.which("mvn")
    if program is None:
        raise PgtideError("Maven: there is no mvn on the PATH.")
    (work / "pom.xml").write_text(_pom(wanted))
    output = work / "maven"
    command = [program, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={output}"]
    _run("Maven", [*command, "-DincludeScope=runtime"], work)
    return list(output.glob("*.jar"))


def _pom(wanted: Wanted) -> str:
    excluded = "".join(
        f"<exclusion><groupId>{group}</groupId><artifactId>*</artifactId></exclusion>"
        for group in (entry.partition(":")[0] for entry in wanted.excluded)
    )
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        f"<exclusions>{excluded}</exclusions></dependency>"
        for group, artifact, version in (entry.split(":") for entry in wanted.coordinates)
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>pgtide</groupId><artifactId>jars</artifactId>"
        f"<version>1</version><dependencies>{dependencies}</dependencies></project>"
    )


def _run(who: str, command: list[str], work: Path) -> None:
    """Runs a resolver; a second time, with this machine's authorities in place of Java's, if it did not trust."""
    status, said = _attempt(who, command, work, proxy_options())
    if status and _DISTRUST.search(said):
        store = work / "authorities.jks"
        write_trust_store(store, machine_certificates())
        status, said = _attempt(who, command, work, [*proxy_options(), *trust_options(store)])
    if status:
        raise PgtideError(f"{who} failed ({status}):\n{said.strip()[-2000:]}")


def _attempt(who: str, command: list[str], work: Path, java_options: list[str]) -> tuple[int, str]:
    environment = os.environ | {
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(spark_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    if java_options:
        # Read by every `java`, Spark's and Maven's.  What the user has put there comes later, and wins.
        own = os.environ.get("JDK_JAVA_OPTIONS", "")
        environment["JDK_JAVA_OPTIONS"] = f'"@{_options_file(work, java_options)}" {own}'
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RESOLVE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PgtideError(f"{who} did not finish in {_RESOLVE_LIMIT_S} s.") from None
    return done.returncode, done.stdout


def _options_file(work: Path, java_options: list[str]) -> Path:
    """In a file, because Java prints what the variable holds, and a proxy's address may hold a password."""
    file = work / "java-options"
    escaped = (option.replace("\\", "\\\\").replace('"', '\\"') for option in java_options)
    file.write_text("".join(f'"{option}"\n' for option in escaped))
    return file


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent

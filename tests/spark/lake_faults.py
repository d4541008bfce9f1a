"""A lake in trouble, for real: files are where folders should be, or not there at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyspark.sql import SparkSession


def metadata_folder(spark: SparkSession, namespace: str, table: str) -> Path:
    """Where the files are that tell of a table in the session's lake."""
    return Path(spark.conf.get("spark.sql.catalog.lake.warehouse") or "") / namespace / table / "metadata"


@contextmanager
def not_writable(metadata: Path) -> Iterator[None]:
    """In the block nothing can be written into this folder: it is a file."""
    away = metadata.with_name("away")
    metadata.rename(away)
    metadata.touch()
    try:
        yield
    finally:
        metadata.unlink()
        away.rename(metadata)


@contextmanager
def not_readable(*metadata: Path) -> Iterator[None]:
    """In the block whoever looks at these tables finds that there is one, and gets an error."""
    with ExitStack() as mended:
        for file in [file for folder in metadata for file in folder.glob("v*.metadata.json")]:
            mended.callback(file.rename(file.with_name(f"away-{file.name}")).rename, file)
        yield

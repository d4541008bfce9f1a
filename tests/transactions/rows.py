"""Rows for the buffer, and what it hands out made durable in a log."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa

from pgtide.change import Committed, LargeTransaction, TableRows
from pgtide.log.writer import LogWriter
from pgtide.schema import TableShape, storage_schema
from pgtide.transactions.prepared import SpoolStep
from tests.log.building import shape

TABLES = (shape(1, "a"), shape(2, "b"))


def rows_of(table: TableShape, places: list[int], keys: list[int], note: str) -> TableRows:
    columns = [
        pa.array([1] * len(places), pa.uint8()),
        pa.array(places, pa.int64()),
        pa.array([0] * len(places), pa.uint32()),
        pa.array(keys, pa.int64()),
        pa.array([note] * len(places)),
    ]
    return TableRows(table, pa.RecordBatch.from_arrays(columns, schema=storage_schema(table)))


def inserts(first_place: int, changes: Sequence[tuple[int, int]], note: str = "x" * 20) -> list[TableRows]:
    """Changes given as (key, number of the table), at consecutive places."""
    tables = []
    for number, table in enumerate(TABLES):
        mine = [(first_place + at, key) for at, (key, owner) in enumerate(changes) if owner == number]
        if mine:
            tables.append(rows_of(table, [place for place, _ in mine], [key for _, key in mine], note))
    return tables


def write(writer: LogWriter, work: Iterable[Committed | LargeTransaction | SpoolStep]) -> None:
    """Everything in order, each durable before the next."""
    pieces: list[Committed] = []
    for item in work:
        if isinstance(item, Committed):
            pieces.append(item)
            continue
        if pieces:
            writer.write(pieces)
            pieces = []
        if isinstance(item, LargeTransaction):
            writer.write_large(item)
        else:
            item.run()
    if pieces:
        writer.write(pieces)


@contextmanager
def quick_disk() -> Iterator[Path]:
    """A folder for a test in which processes die, but the machine does not: fsync may do nothing."""
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"), patch("os.fdatasync"):
        yield Path(folder)
        close_files_below(Path(folder))


def close_files_below(folder: Path) -> None:
    """What the system does for a process that has died: here the test itself plays it, and goes on."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
                os.close(int(descriptor))

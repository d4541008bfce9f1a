"""A source table as Spark reads it: rows of a ctid range with the lake's columns, in the driver or in an executor.

Executors get a reference to the source, not its credentials: they read the configuration themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import StructType

from pgtide.config import load_config
from pgtide.replication.connect import Connection
from pgtide.replication.server import Server
from pgtide.schema import TableShape
from pgtide.snapshot.copy_range import TableAsOf, stored_rows
from pgtide.snapshot.ctid_ranges import CtidRange
from pgtide.spark.keys import check_keys
from pgtide.spark.rows import DEFAULT_POLICY, arrow_schema, lake_column


@dataclass(frozen=True, slots=True)
class SourceReference:
    """Where to find the source's connection string; holds no secret itself."""

    config_file: str
    timeout_s: float
    server_started: str  # the server that has the snapshot
    standby: bool = False  # it is the one of source.read_from

    def open(self) -> Connection:
        dsn = load_config(Path(self.config_file)).source.read_dsn(standby=self.standby)
        return Server(dsn, self.server_started).connect(timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTable(TableAsOf):
    columns: StructType  # of the rows, as the lake has them


def read_range(connection: Connection, table: SourceTable, part: CtidRange) -> Iterator[pa.RecordBatch]:
    """The rows of a range with the lake's columns.  Complete only if the iterator ends without an error."""
    for rows in stored_rows(connection, table, part):
        check_keys(table.shape, rows, loading=True)
        yield mapped(table.shape, rows, table.columns)


def mapped(shape: TableShape, rows: pa.RecordBatch, schema: StructType) -> pa.RecordBatch:
    """Stored columns as the mirror table has them; columns that the source no longer has are null."""
    wanted = arrow_schema(schema)
    by_name = {column.name: column for column in shape.columns}
    arrays = []
    for field in wanted:
        column = by_name.get(field.name)
        array = pa.nulls(rows.num_rows) if column is None else lake_column(column, column, rows, DEFAULT_POLICY)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)

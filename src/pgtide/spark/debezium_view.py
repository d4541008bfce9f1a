"""Changes in the form of Debezium's value, for jobs that were written for it.

`before` and `after` are typed when one table is read, else JSON or VARIANT.  `source.name` is the log's id, where
Debezium has its topic prefix; `transaction.total_order` counts all changes of the transaction from 1.  `_offset` and
`_unchanged` are added: an unchanged TOAST value is null here and named there, not a text that looks like a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pgtide.change import Op
from pgtide.log.reader import LogRows
from pgtide.schema import TableShape
from pgtide.spark.images import Image, new_rows, old_rows
from pgtide.spark.rows import CHANGE_COLUMNS, arrow_batch, as_read, columns_then, table_schema, unchanged_names
from pgtide.spark.views import document, document_type
from pgtide.types import TypePolicy, lake_type

_OPS = {Op.INSERT: "c", Op.UPDATE: "u", Op.DELETE: "d", Op.READ: "r", Op.TRUNCATE: "t", Op.MESSAGE: "m"}
_LETTERS = pa.array([_OPS.get(Op(code)) if code in set(Op) else None for code in range(max(Op) + 1)])

_TEXTS = ("connector", "name", "db", "schema", "table")
_SOURCE = StructType(
    [
        StructField(name, StringType() if name in _TEXTS else LongType())
        for name in ("connector", "name", "ts_ms", "db", "schema", "table", "txId", "lsn")
    ]
)
_TRANSACTION = StructType([StructField("id", StringType()), StructField("total_order", LongType())])


@dataclass(frozen=True)
class DebeziumView:
    shape: TableShape | None  # None: all tables
    policy: TypePolicy
    database: str
    name: str

    def schema(self) -> StructType:
        row = table_schema(self.shape, self.policy) if self.shape is not None else document_type(self.policy)
        return StructType(
            [
                StructField("before", row),
                StructField("after", row),
                StructField("source", _SOURCE),
                StructField("op", StringType()),
                StructField("ts_ms", LongType()),
                StructField("transaction", _TRANSACTION),
                *(field for field in CHANGE_COLUMNS if field.name in ("_offset", "_unchanged")),
            ]
        )

    def rows(self, found: LogRows) -> pa.RecordBatch:
        rows, count = found.rows, found.rows.num_rows
        committed_ms = pc.divide(rows.column("_commit_timestamp").cast(pa.int64()), 1000)
        xids, lsns = rows.column("_xid").cast(pa.int64()), rows.column("_commit_lsn").cast(pa.int64())
        values = {
            "connector": "postgresql",
            "name": self.name,
            "ts_ms": committed_ms,
            "db": self.database,
            "schema": found.shape.namespace,
            "table": found.shape.name,
            "txId": xids,
            "lsn": lsns,
        }
        source = [pa.repeat(pa.scalar(value), count) if isinstance(value, str) else value for value in values.values()]
        transaction = [
            pc.binary_join_element_wise(xids.cast(pa.string()), lsns.cast(pa.string()), ":"),
            pc.add(rows.column("_place"), 1),
        ]
        arrays = [
            self._row(found.shape, old_rows(found, self.policy)),
            self._row(found.shape, new_rows(found, self.policy)),
            pa.StructArray.from_arrays(source, names=list(values)),
            _LETTERS.take(rows.column("_op")),
            committed_ms,
            # Rows that were read belong to no transaction, as in a snapshot of Debezium's.
            pa.StructArray.from_arrays(transaction, names=_TRANSACTION.names, mask=pc.equal(rows["_op"], Op.READ)),
            rows.column("_offset"),
            unchanged_names(self.shape or found.shape, found),
        ]
        return arrow_batch(arrays, self.schema())

    def _row(self, captured: TableShape, image: Image) -> pa.Array:
        if self.shape is None:
            return document(captured, image)
        places = {column.attnum: place for place, column in enumerate(captured.columns)}
        columns = []
        for column, then in zip(self.shape.columns, columns_then(self.shape, captured), strict=True):
            if then is None:
                columns.append(pa.nulls(len(image.present), lake_type(column.type, self.policy)))
                continue
            place = places[then.attnum]
            absent, values = image.absent[place], image.columns[place]
            if absent is not None and absent.any():
                values = values.take(pa.array(np.where(absent, -1, np.arange(len(absent))), mask=absent))
            columns.append(as_read(column, then, values, self.policy))
        names = [column.name for column in self.shape.columns]
        return pa.StructArray.from_arrays(columns, names=names, mask=pa.array(~image.present))

"""The shape of a table: what the stream said its columns were at one place in the order.

A shape is self-contained (types are resolved to the last composite field), because readers of the log
never talk to Postgres.  In the log columns are called `c<attribute number>`: a user's column may be
called anything, and a rename does not move data.  The fingerprint names a shape in the log.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from pgtide.types import PgType, storage_type


@dataclass(frozen=True, slots=True)
class Column:
    attnum: int
    name: str
    type: PgType
    key: bool = False  # part of the key by which rows are found again
    not_null: bool = False
    mask: str | None = None  # how the capture masked it: "sha256", "redact", "truncate:N"
    missing: str | None = None  # what rows from before the column have, as Postgres prints it: ADD COLUMN … DEFAULT

    @property
    def storage_name(self) -> str:
        return f"c{self.attnum}"


@dataclass(frozen=True)
class TableShape:
    relation_oid: int
    namespace: str
    name: str
    replica_identity: str  # d default, n nothing, f full, i index: as in pg_class.relreplident
    columns: tuple[Column, ...]

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}.{self.name}"

    @cached_property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.key)

    @cached_property
    def fingerprint(self) -> str:
        """Names this shape for ever: the same shape has the same fingerprint on every machine."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "relation_oid": self.relation_oid,
            "namespace": self.namespace,
            "name": self.name,
            "replica_identity": self.replica_identity,
            "columns": [
                {
                    "attnum": column.attnum,
                    "name": column.name,
                    "type": column.type.to_json(),
                    "key": column.key,
                    "not_null": column.not_null,
                    "mask": column.mask,
                    **({} if column.missing is None else {"missing": column.missing}),
                }
                for column in self.columns
            ],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> TableShape:
        return TableShape(
            data["relation_oid"],
            data["namespace"],
            data["name"],
            data["replica_identity"],
            tuple(
                Column(
                    c["attnum"],
                    c["name"],
                    PgType.from_json(c["type"]),
                    c["key"],
                    c["not_null"],
                    c["mask"],
                    c.get("missing"),
                )
                for c in data["columns"]
            ),
        )

    @cached_property
    def unchanged_width_bytes(self) -> int:
        """Width of `_unchanged`: one bit per column, by position in the shape, least significant first."""
        return -(-len(self.columns) // 8)


# The columns of a batch of changes, in this order; those marked optional are absent when no row needs them.
#   _op        uint8
#   _place     int64                place in the transaction, from 0
#   _txn       uint32               index of the transaction in the directory
#   _unchanged fixed binary         optional: which columns were sent as "unchanged TOAST"
#   _old       uint8                optional: OldImage per row
#   c<n>       storage_type         the new row; for a delete the row that went (key columns only, if _old says KEY)
#   _old.c<n>  storage_type         optional: old image of updates, for the columns in it
#   _text.c<n> string               optional: exact text where the storage type cannot hold the value
def storage_schema(
    shape: TableShape,
    *,
    unchanged: bool = False,
    old: tuple[Column, ...] | None = None,
    text: tuple[Column, ...] = (),
    old_text: tuple[Column, ...] = (),
) -> pa.Schema:
    """The Arrow schema of changes of this shape.  `old`: None without `_old`, else the columns of old images."""
    fields = [
        pa.field("_op", pa.uint8(), nullable=False),
        pa.field("_place", pa.int64(), nullable=False),
        pa.field("_txn", pa.uint32(), nullable=False),
    ]
    if unchanged:
        fields.append(pa.field("_unchanged", pa.binary(shape.unchanged_width_bytes), nullable=False))
    if old is not None:
        fields.append(pa.field("_old", pa.uint8(), nullable=False))
    fields += [pa.field(column.storage_name, storage_type(column.type)) for column in shape.columns]
    fields += [pa.field(f"_old.{column.storage_name}", storage_type(column.type)) for column in old or ()]
    fields += [pa.field(f"_text.{column.storage_name}", pa.string()) for column in text]
    fields += [pa.field(f"_old._text.{column.storage_name}", pa.string()) for column in old_text]
    return pa.schema(fields)


# Logical messages (pg_logical_emit_message) are changes of this "table"; it exists in no database.
MESSAGES = TableShape(
    0,
    "pgtide",
    "messages",
    "n",
    (
        Column(1, "prefix", PgType(25, "text"), not_null=True),
        Column(2, "content", PgType(17, "bytea"), not_null=True),
        Column(3, "transactional", PgType(16, "bool"), not_null=True),
        Column(4, "lsn", PgType(20, "int8"), not_null=True),
    ),
)

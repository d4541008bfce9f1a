"""Changes and transactions as columns: what travels from the decoder to the log and on to Spark.

A change is one row of an Arrow batch.  Besides the table's own columns (see `schema`) it has `_op`, its
`_place` in its transaction and `_txn`, the index of that transaction in the `transactions` batch that
travels with it.  The offset of a change is its transaction's `first_offset` plus its `_place`; it exists
only once the log has given the transaction its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import pyarrow as pa

from pgtide.schema import TableShape


class Op(IntEnum):
    """What happened to a row; the numbers are part of the log's format."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    READ = 4
    TRUNCATE = 5
    MESSAGE = 6
    NOTE = 7


class TransactionKind(IntEnum):
    """What a transaction of the log stands for; the numbers are part of the log's format."""

    COMMIT = 1
    READ = 2
    MESSAGE = 3
    GAP = 4
    FILL = 5
    RESNAPSHOT = 6
    TABLE_ADDED = 7
    TABLE_REMOVED = 8


class OldImage(IntEnum):
    """Which old image came with an update or delete, as REPLICA IDENTITY gave it."""

    NONE = 0
    KEY = 1
    FULL = 2


TIMESTAMP = pa.timestamp("us", "UTC")

# One row per transaction, in commit order.  `changes` counts the changes that this batch holds of it; `ends` is
# false while more of the same transaction follows in a later batch (`end_lsn` is 0 until it ends).  The log gives
# the offsets: `first_offset` is that of place 0, `end_offset` is exclusive: where the transaction stands after this
# batch.
TRANSACTIONS = pa.schema(
    [
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("xid", pa.uint32(), nullable=False),
        pa.field("commit_lsn", pa.uint64(), nullable=False),
        pa.field("end_lsn", pa.uint64(), nullable=False),
        pa.field("commit_timestamp", TIMESTAMP, nullable=False),
        pa.field("first_offset", pa.int64(), nullable=False),
        pa.field("end_offset", pa.int64(), nullable=False),
        pa.field("changes", pa.int64(), nullable=False),
        pa.field("ends", pa.bool_(), nullable=False),
        pa.field("origin", pa.string()),
        pa.field("extra", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Changes of one table in one shape: `rows` has the columns of `schema.storage_schema`."""

    shape: TableShape
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Committed:
    """Changes of committed transactions, in commit order; only the last one may still continue.

    `transactions` has the schema TRANSACTIONS (offsets are 0 until the log assigns them); every
    table's rows are in the order of (`_txn`, `_place`).
    """

    transactions: pa.RecordBatch
    tables: tuple[TableRows, ...]
    nbytes: int = field(init=False, compare=False)  # Arrow goes through all buffers for it: once is enough

    def __post_init__(self) -> None:
        size: int = self.transactions.nbytes + sum(table.rows.nbytes for table in self.tables)
        object.__setattr__(self, "nbytes", size)


@dataclass(frozen=True, slots=True)
class LargeTransaction:
    """A committed transaction whose rows are in files: blocks of the log's row format, places in `_place`.

    `gone`: ranges of places (from, to exclusive) that were rolled back by savepoints; their rows may be in the files
    and are not part of the transaction.  `kept`: the files must also stay where they are, for the source does not
    send the rows again; whoever made them removes them once the log has them.
    """

    transaction: pa.RecordBatch  # one row of the schema TRANSACTIONS, with `ends`
    places: int  # how many places it has, rolled-back ones included
    gone: tuple[tuple[int, int], ...]
    files: tuple[Path, ...]
    lengths_bytes: tuple[int, ...]  # how many bytes of each file count
    shapes: tuple[TableShape, ...]
    kept: bool = False

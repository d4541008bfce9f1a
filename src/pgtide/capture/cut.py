"""Where the stream has reached an LSN: what comes before it, and what after.

A transaction is in the database snapshot that belongs to an LSN if and only if it ends at or before it, that is, if its
commit record begins before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.capture.appender import Work
from pgtide.capture.whole import Idle
from pgtide.change import Committed, LargeTransaction, TableRows, TransactionKind


def split_at(work: Sequence[Work], lsn: int) -> tuple[list[Work], list[Work]] | None:
    """What was committed before the LSN and what after; None while nothing says that the stream has reached it."""
    for index, item in enumerate(work):
        if isinstance(item, Idle):
            if item.lsn >= lsn:
                return [*work[:index]], [*work[index:]]
        elif isinstance(item, Committed | LargeTransaction):
            transactions = item.transactions if isinstance(item, Committed) else item.transaction
            later = np.flatnonzero(_is_later(transactions, lsn))
            if not len(later):
                continue
            at = int(later[0])
            if at == 0 or isinstance(item, LargeTransaction):
                return [*work[:index]], [*work[index:]]
            before, after = _cut(item, at)
            return [*work[:index], before], [after, *work[index + 1 :]]
    return None


def _is_later(transactions: pa.RecordBatch, lsn: int) -> npt.NDArray[np.bool_]:
    """As those that are sent again are told from those that the log has: a message has one LSN, its end."""
    lsns = transactions["commit_lsn"].to_numpy()
    messages = transactions["kind"].to_numpy() == TransactionKind.MESSAGE
    return np.asarray(np.where(messages, lsns > lsn, lsns >= lsn), np.bool_)


def _cut(piece: Committed, at: int) -> tuple[Committed, Committed]:
    """The transactions before the one at this place, and those from it on."""
    before, after = [], []
    for table in piece.tables:
        index = table.rows.schema.get_field_index("_txn")
        numbers = table.rows.column(index).to_numpy()
        row = int(np.searchsorted(numbers, at))
        if row:
            before.append(TableRows(table.shape, table.rows.slice(0, row)))
        if row < len(numbers):
            renumbered = pa.array((numbers[row:] - at).astype(np.uint32))
            rows = table.rows.slice(row).set_column(index, table.rows.schema.field(index), renumbered)
            after.append(TableRows(table.shape, rows))
    return (
        Committed(piece.transactions.slice(0, at), tuple(before)),
        Committed(piece.transactions.slice(at), tuple(after)),
    )

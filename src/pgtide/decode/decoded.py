"""What a feed of messages decodes to: rows by table, and the messages that frame transactions, in order.

Changes are numbered over the decoder's whole life in the order of the stream, whatever table they belong to:
each Insert, Update and Delete is one change, each relation of a Truncate is one, each logical Message is one.
A control says which number comes next at its place, so rows and controls interleave exactly as they arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.schema import TableShape

# One element per message that is neither a change nor a description of a table or type, in stream order.
#   kind          the message's letter in the protocol: B C S E A c b P K r p O; k for a keepalive
#   change        number of the next change: rows with a smaller one came before
#   xid, subxid   where the message has them (A: both); else 0
#   commit_lsn    B: LSN of the commit to come; C, c, K: of the commit; b, P, p: of the prepare;
#                 r: end LSN of the prepare; O: of the commit on the origin
#   end_lsn       end LSN of the transaction; r: of the rollback; A: LSN of the abort (0 if not sent); k: WAL end
#   timestamp_us  microseconds since 1970 UTC; A: 0 if not sent; k: the server's clock
#   flags         as sent; S: 1 in the first block of a transaction; k: 1 if a reply is wanted
CONTROL = np.dtype(
    [
        ("kind", "u1"),
        ("change", "i8"),
        ("xid", "u4"),
        ("subxid", "u4"),
        ("commit_lsn", "u8"),
        ("end_lsn", "u8"),
        ("timestamp_us", "i8"),
        ("flags", "u1"),
    ]
)


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """Changes of one table in one shape.

    The columns are those of `schema.storage_schema`, but `_change` (int64, ascending) and `_subxid` (uint32,
    0 outside of stream blocks) stand for `_place` and `_txn`, which are known only when transactions are whole.
    """

    shape: TableShape
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Decoded:
    first_change: int  # number of the first change of this feed
    changes: int  # how many it has
    tables: tuple[ShapedRows, ...]
    controls: npt.NDArray[Any]  # of dtype CONTROL
    origins: dict[int, str]  # index into controls → name of the origin
    gids: dict[int, str]  # index into controls → global identifier of a two-phase transaction
    wal_end: int  # greatest WAL position in the feed's headers and keepalives; 0 if it had none

    @property
    def reply_wanted(self) -> bool:
        """Whether a keepalive asks for an answer at once: the server is about to take us for dead."""
        keepalives = self.controls["kind"] == ord("k")
        return bool(self.controls["flags"][keepalives].any())

"""Places in the log that a user can name: its ends, an offset, an LSN, a moment.

An LSN stands for what came after it: the first transaction whose end LSN is greater.  A moment stands for the first
transaction committed at that moment or later; two moments thus enclose what was committed from the one up to the other.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn

POSITIONS = (
    'earliest, latest, an offset such as 1200, an LSN such as "16/B374D848", '
    'or a time such as "2026-01-31T08:00:00Z" (UTC where no zone is given)'
)


@dataclass(frozen=True, slots=True)
class Position:
    kind: Literal["earliest", "latest", "offset", "lsn", "time"]
    value: int = 0  # of a time: microseconds since 1970


EARLIEST, LATEST = Position("earliest"), Position("latest")


def parse_position(text: str) -> Position:
    """ValueError for what is none of them."""
    if text == "earliest":
        return EARLIEST
    if text == "latest":
        return LATEST
    if text.isascii() and text.isdecimal():
        return Position("offset", int(text))
    if "/" in text:
        return Position("lsn", parse_lsn(text))
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return Position("time", (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


def resolve_position(reader: LogReader, position: Position) -> int:
    """The offset that it stands for now."""
    match position.kind:
        case "earliest":
            return reader.first_offset()
        case "latest":
            return reader.end().end_offset
        case "lsn":
            return reader.position_after(position.value)
        case "time":
            return _position_at(reader, position.value)
        case "offset":
            return position.value


def _position_at(reader: LogReader, time_us: int) -> int:
    """First offset of the first transaction that was committed at `time_us` or later.

    Segments are searched by the commit time of their first transaction, so that few are opened.  Commit times of
    transactions that overlap may be out of order by moments: the segment before the one found is looked through too.
    Where the server's clock was set back further, the answer is one of the places that fit.
    """
    end_offset, extents = reader.end().end_offset, reader.extents()
    if not extents:
        return end_offset

    def begins_us(number: int) -> int:
        extent = extents[number]
        block = next(iter(reader.blocks(extent.name.first_offset, extent.end_offset)))
        return int(_commit_times(reader.directory(block).transactions)[0])

    found = bisect.bisect_left(range(len(extents)), time_us, key=begins_us)
    start = extents[max(found - 2, 0)].name.first_offset
    for block in reader.blocks(start, end_offset):
        transactions = reader.directory(block).transactions
        late = np.flatnonzero(_commit_times(transactions) >= time_us)
        if len(late):
            return max(int(transactions["first_offset"][int(late[0])].as_py()), start)
    return end_offset


def _commit_times(transactions: pa.RecordBatch) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = transactions["commit_timestamp"].cast(pa.int64()).to_numpy()
    return times

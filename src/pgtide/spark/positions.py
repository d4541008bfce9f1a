"""Places in the log that a user can name: its ends, an offset, an LSN, a moment.

An LSN stands for what came after it: the first transaction whose end LSN is greater.  The log must have come to it:
before that, transactions that end before it may still come, and it would stand for too early a place.  A moment stands
for the first transaction committed at that moment or later; two moments thus enclose what was committed from the one up
to the other.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgtide.errors import ConfigurationError, LogRangeError
from pgtide.log.control import removed
from pgtide.log.reader import LogReader
from pgtide.lsn import format_lsn, parse_lsn

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
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
    since = moment - _EPOCH
    return Position("time", (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


def resolve_position(reader: LogReader, option: str, position: Position) -> int:
    """The offset that the option's position stands for now.  LogRangeError if retention took what begins there."""
    match position.kind:
        case "earliest":
            return reader.first_offset()
        case "latest":
            return reader.end().end_offset
        case "lsn":
            _check_reached(reader, option, position.value)
            return reader.position_after(position.value)
        case "time":
            return _position_at(reader, position.value)
        case "offset":
            _check_not_beyond(reader, option, position.value)
            return position.value


def _check_not_beyond(reader: LogReader, option: str, offset: int) -> None:
    first, end = reader.first_offset(), reader.end().end_offset
    if offset > end:
        raise ConfigurationError(
            f"pgtide: {option} is {offset}, and the log in {reader.location} has offsets {first} to {end} (exclusive).",
            remedy=f'Give an offset from {first} to {end}: .option("{option}", "{end}") is its end now; or "latest".',
        )


def _check_reached(reader: LogReader, option: str, lsn: int) -> None:
    durable_lsn = reader.end().durable_lsn
    if lsn > durable_lsn:
        raise ConfigurationError(
            f"pgtide: {option} is {format_lsn(lsn)}, and the log in {reader.location} has only come to "
            f"{format_lsn(durable_lsn)}: what was committed before is still to come.",
            remedy=f'Wait until the capture is there (pgtide status), or give "latest", or an LSN up to '
            f"{format_lsn(durable_lsn)}.",
        )


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
            found_offset = max(int(transactions["first_offset"][int(late[0])].as_py()), start)
            if found_offset == extents[0].name.first_offset:
                _check_none_removed(reader, time_us, int(_commit_times(transactions)[int(late[0])]))
            return found_offset
    return end_offset


def _check_none_removed(reader: LogReader, time_us: int, kept_us: int) -> None:
    """The first transaction that is kept was committed at `kept_us`: was there one before it, not before `time_us`?"""
    if kept_us > time_us and removed(reader.storage).end_offset > 0:
        raise LogRangeError(
            f"transactions committed from {_moment(time_us)} on are no longer all in the log in {reader.location}: "
            "retention removed them",
            remedy=f"start from a later time (what is left begins at {_moment(kept_us)}), or take a new snapshot",
        )


def _moment(time_us: int) -> str:
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat().replace("+00:00", "Z")


def _commit_times(transactions: pa.RecordBatch) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = transactions["commit_timestamp"].cast(pa.int64()).to_numpy()
    return times

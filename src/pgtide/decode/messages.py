"""Logical replication messages as arrays: kinds, bodies, and the fields of those that frame transactions.

Names and layouts follow "Logical Replication Message Formats" in Postgres's manual.  Lengths are checked
here, so that the fields of a message that passed can be gathered without another look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pgtide.decode.cells import I64, U8, Bools, Views
from pgtide.decode.decoded import CONTROL
from pgtide.decode.frames import PAD, Frames
from pgtide.errors import DecodeError

EPOCH_US = 946_684_800_000_000  # 2000-01-01, where Postgres's clock begins

_XLOG_DATA, KEEPALIVE = ord("w"), ord("k")
_XLOG_HEADER_BYTES = 25  # w, start of the WAL data, its end, the server's clock
_KEEPALIVE_BYTES = 18  # k, WAL end, the server's clock, reply wanted

# Least length of a message's body (behind the kind; without the xid it has in a stream block); exact where marked.
_LEAST_BYTES = {
    "B": 20, "C": 25, "O": 9, "I": 7, "U": 7, "D": 7, "T": 5, "R": 9, "Y": 6, "M": 14, "S": 5, "E": 0, "c": 29,
    "A": 8, "b": 29, "P": 30, "K": 30, "r": 38, "p": 30,
}  # fmt: skip
_EXACT = "BCSEc"
_XID_IN_STREAM = "IUDTRYM"

_Fields = tuple[tuple[str, str, int], ...]


def _ended(at: int) -> _Fields:
    """How most messages go on that end a transaction."""
    return (
        ("flags", "u1", at),
        ("commit_lsn", "u8", at + 1),
        ("end_lsn", "u8", at + 9),
        ("timestamp_us", "i8", at + 17),
    )


# Fields of the controls: name, wire type, place in the body.
_FIELDS: dict[str, _Fields] = {
    "B": (("commit_lsn", "u8", 0), ("timestamp_us", "i8", 8), ("xid", "u4", 16)),
    "C": _ended(0),
    "O": (("commit_lsn", "u8", 0),),
    "S": (("xid", "u4", 0), ("flags", "u1", 4)),
    "E": (),
    "c": (("xid", "u4", 0), *_ended(4)),
    "A": (("xid", "u4", 0), ("subxid", "u4", 4)),
    "b": (("commit_lsn", "u8", 0), ("end_lsn", "u8", 8), ("timestamp_us", "i8", 16), ("xid", "u4", 24)),
    "P": (*_ended(0), ("xid", "u4", 25)),
    "K": (*_ended(0), ("xid", "u4", 25)),
    "r": (*_ended(0)[:3], ("timestamp_us", "i8", 25), ("xid", "u4", 33)),
    "p": (*_ended(0), ("xid", "u4", 25)),
    "k": (("end_lsn", "u8", 0), ("timestamp_us", "i8", 8), ("flags", "u1", 16)),
}
GID_AT = {"b": 28, "P": 29, "K": 29, "r": 37, "p": 29}
ORIGIN_NAME_AT = 8
PREPARED_XID_AT = 24  # in the message that begins a prepared transaction


def letters(kinds: str) -> Bools:
    """A table that says of each byte whether it is one of these letters."""
    return np.isin(np.arange(256), [ord(kind) for kind in kinds])


def _per_letter(values: dict[str, int], default: int) -> I64:
    table = np.full(256, default, np.int64)
    for kind, value in values.items():
        table[ord(kind)] = value
    return table


_UNKNOWN = 2**40  # more than any message can have
_LEAST = _per_letter(_LEAST_BYTES, _UNKNOWN)
_MOST = _per_letter({kind: _LEAST_BYTES[kind] for kind in _EXACT}, _UNKNOWN)
_HAS_XID_IN_STREAM = letters(_XID_IN_STREAM)
_IS_CONTROL = letters("".join(_FIELDS))


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a feed, in order, keepalives included."""

    views: Views
    kind: U8  # k for a keepalive
    body: I64  # behind the kind and, in a stream block, the xid
    end: I64
    subxid: npt.NDArray[np.uint32]  # 0 outside of stream blocks, and where the message names none
    wal_end: int
    stream_xid: int  # of the block that is still open at the end, or 0

    @staticmethod
    def read(frames: Frames, stream_xid: int) -> Messages:
        views, start, end = Views(frames.buffer), frames.starts, frames.ends
        if len(end) and int(end[-1]) + PAD > len(frames.buffer):
            raise ValueError(f"the buffer must go on for {PAD} bytes behind the last message")
        tag = views.u1[start]
        keepalive = tag == KEEPALIVE
        length = end - start
        if ((tag != _XLOG_DATA) & ~keepalive).any() or (
            length < np.where(keepalive, _KEEPALIVE_BYTES, _XLOG_HEADER_BYTES + 1)
        ).any():
            raise DecodeError("a replication message is neither WAL data nor a keepalive, or is cut short")
        kind = views.u1[start + _XLOG_HEADER_BYTES]
        kind[keepalive] = KEEPALIVE
        body = start + np.where(keepalive, 1, _XLOG_HEADER_BYTES + 1)
        top_xid, still_open = _stream_blocks(views, kind, body, end, stream_xid)
        has_xid = (top_xid != 0) & _HAS_XID_IN_STREAM[kind]
        subxid = np.zeros(len(kind), np.uint32)
        if has_xid.any():
            subxid[has_xid] = views.u4[body[has_xid]]
            body = body + 4 * has_xid
        wal_end = views.u8[start + np.where(keepalive, 1, 9)].max(initial=0)
        messages = Messages(views, kind, body, end, subxid, int(wal_end), still_open)
        messages._check_lengths(keepalive)
        return messages

    def _check_lengths(self, keepalive: Bools) -> None:
        length = self.end - self.body
        good = (length >= _LEAST[self.kind]) & (length <= _MOST[self.kind])
        if (good | keepalive).all():
            return
        bad = int(np.argmin(good | keepalive))
        kind = int(self.kind[bad])
        shown = f"{chr(kind)!r} ({kind})"
        if _LEAST[kind] == _UNKNOWN:
            raise DecodeError(
                f"a message is of an unknown kind: {shown}", remedy="Protocol versions 1 to 4 are understood."
            )
        raise DecodeError(f"a message of kind {shown} has {int(length[bad])} bytes, which cannot be")

    def controls(self, next_change: I64) -> tuple[I64, npt.NDArray[Any]]:
        """Indices of the messages that are controls, and their fields."""
        where = np.flatnonzero(_IS_CONTROL[self.kind])
        controls = np.zeros(len(where), CONTROL)
        kind, body = self.kind[where], self.body[where]
        controls["kind"], controls["change"] = kind, next_change[where]
        for letter in np.flatnonzero(np.bincount(kind, minlength=256)).tolist():
            rows = np.flatnonzero(kind == letter)
            for field, wire, place in _FIELDS[chr(letter)]:
                values = getattr(self.views, wire)[body[rows] + place]
                controls[field][rows] = values + EPOCH_US if field == "timestamp_us" else values
        self._abort_details(controls, kind, body, self.end[where])
        return where, controls

    def _abort_details(self, controls: npt.NDArray[Any], kind: U8, body: I64, end: I64) -> None:
        """LSN and time of an abort are there only with streaming = parallel."""
        aborts = kind == ord("A")
        if not aborts.any():
            return
        length = end - body
        if (aborts & (length != 8) & (length != 24)).any():
            raise DecodeError("a stream abort has a length that it cannot have")
        rows = np.flatnonzero(aborts & (length == 24))
        controls["end_lsn"][rows] = self.views.u8[body[rows] + 8]
        controls["timestamp_us"][rows] = self.views.i8[body[rows] + 16] + EPOCH_US

    def text_at(self, index: int, place: int) -> str:
        """The null-terminated string at that place of a message's body."""
        start, end = int(self.body[index]) + place, int(self.end[index])
        stop = self.views.buffer.find(0, start, end)
        if stop < 0:
            raise DecodeError(f"a name in a message of kind {chr(int(self.kind[index]))!r} has no end")
        try:
            return bytes(self.views.buffer[start:stop]).decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"a name in a message is not valid UTF-8: {error}") from error


def _stream_blocks(views: Views, kind: U8, body: I64, end: I64, open_xid: int) -> tuple[npt.NDArray[np.uint32], int]:
    """For each message the top xid of the stream block that it lies in, 0 outside; and of the last, still open one."""
    edges = np.flatnonzero((kind == ord("S")) | (kind == ord("E")))
    if not len(edges):
        return np.full(len(kind), open_xid, np.uint32), open_xid
    begins = kind[edges] == ord("S")
    if (begins & (end[edges] - body[edges] < 4)).any():
        raise DecodeError("a stream start is cut short")
    xids = np.empty(len(edges) + 1, np.uint32)
    xids[0] = open_xid
    xids[1:] = np.where(begins, views.u4[body[edges]], 0)
    return np.repeat(xids, np.diff(edges, prepend=0, append=len(kind))), int(xids[-1])

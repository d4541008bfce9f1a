"""Logical messages (pg_logical_emit_message) as rows of the table that stands for them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgtide.change import Op
from pgtide.decode.cells import I64, Cells, primitive, varlen
from pgtide.decode.decoded import ShapedRows
from pgtide.decode.messages import Messages
from pgtide.errors import DecodeError
from pgtide.schema import MESSAGES, storage_schema

_PREFIX_AT = 9  # behind flags and LSN
_TRANSACTIONAL = 1


def _schema() -> pa.Schema:
    stored = storage_schema(MESSAGES).set(1, pa.field("_change", pa.int64(), nullable=False))
    return stored.set(2, pa.field("_subxid", pa.uint32(), nullable=False))


_SCHEMA = _schema()


def decode_messages(messages: Messages, where: I64, change: I64) -> ShapedRows:
    """Message: flags, LSN, prefix with a null behind it, length of the content, content."""
    views, body, end = messages.views, messages.body[where], messages.end[where]
    rest = varlen(pa.binary(), Cells(views, body + _PREFIX_AT, end - body - _PREFIX_AT, None))
    prefix_length = pc.find_substring(rest, b"\0").to_numpy(zero_copy_only=False).astype(np.int64)
    content = body + _PREFIX_AT + prefix_length + 5
    if (prefix_length < 0).any() or (content > end).any() or (views.i4[content - 4] != end - content).any():
        raise DecodeError("a logical message has another length than it says")
    arrays = [
        primitive(pa.uint8(), np.full(len(where), Op.MESSAGE, np.uint8), None),
        primitive(pa.int64(), change, None),
        primitive(pa.uint32(), messages.subxid[where], None),
        varlen(pa.string(), Cells(views, body + _PREFIX_AT, prefix_length, None)),
        varlen(pa.binary(), Cells(views, content, end - content, None)),
        pa.array((views.u1[body] & _TRANSACTIONAL).astype(np.bool_)),
        primitive(pa.int64(), views.i8[body + 1].astype(np.int64), None),
    ]
    return ShapedRows(MESSAGES, pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))

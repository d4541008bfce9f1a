"""Bytes from Postgres → Arrow columns.  Pure: no sockets, no files, no clock."""

from __future__ import annotations

from pgtide.decode.codecs import needs_text
from pgtide.decode.copy import copied_as_text, decode_copy
from pgtide.decode.decoded import CONTROL, Decoded, ShapedRows
from pgtide.decode.frames import PAD, Frames
from pgtide.decode.pgoutput import Decoder
from pgtide.decode.relation import RelationColumn, RelationMessage
from pgtide.decode.single import decode_text

__all__ = [
    "CONTROL",
    "PAD",
    "Decoded",
    "Decoder",
    "Frames",
    "RelationColumn",
    "RelationMessage",
    "ShapedRows",
    "copied_as_text",
    "decode_copy",
    "decode_text",
    "needs_text",
]

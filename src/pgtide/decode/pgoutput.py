"""pgoutput messages → Arrow columns: Postgres's logical replication protocol, versions 1 to 4.

All messages of a feed are handled together: transactions' frames by a few gathers per kind, rows by
relation and then column by column.  Python's own work is per relation and column, never per row or
transaction, also when tables, kinds and stream blocks interleave.  The result does not depend on how the
stream is cut into feeds, apart from the batches' bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pgtide.decode.cells import I64
from pgtide.decode.decoded import Decoded, ShapedRows
from pgtide.decode.frames import Frames
from pgtide.decode.logical_messages import decode_messages
from pgtide.decode.messages import GID_AT, ORIGIN_NAME_AT, PREPARED_XID_AT, Messages, letters
from pgtide.decode.relation import Relation, RelationMessage, parse_relation
from pgtide.decode.rows import RowMessages, Truncates, decode_rows, with_truncates
from pgtide.errors import DecodeError
from pgtide.schema import TableShape

_IS_ROW = letters("IUD")
_IS_ONE_CHANGE = letters("IUDM")
_DESCRIBES = letters("RbP")  # relations, and whose they are
_HAS_NAME = letters("O" + "".join(GID_AT))
_RELATION, _TRUNCATE, _MESSAGE, _ORIGIN = ord("R"), ord("T"), ord("M"), ord("O")
_BEGIN_PREPARE = ord("b")


@dataclass(slots=True)
class _Group:
    """Changes of one relation while it kept its shape."""

    relation: Relation
    rows: I64 | None = None  # indices of its Insert, Update and Delete messages
    truncated: list[tuple[int, int]] = field(default_factory=list)  # change, subxid


class Decoder:
    """Keeps what later messages refer to: relations, the open stream block, the number of the next change.

    `shape_of` is asked once for every Relation message.  After an error the decoder is of no further use.
    """

    def __init__(self, shape_of: Callable[[RelationMessage], TableShape]) -> None:
        self._shape_of = shape_of
        self._relations: dict[int, Relation] = {}
        self._stream_xid = 0
        self._prepared_xid = 0  # of the prepared transaction whose changes are coming
        self._next_change = 0

    def feed(self, frames: Frames) -> Decoded:
        """Decode whole messages, in the order of their arrival."""
        messages = Messages.read(frames, self._stream_xid)
        truncates = np.flatnonzero(messages.kind == _TRUNCATE)
        targets = {index: _truncated_oids(messages, index) for index in truncates.tolist()}
        counts = _IS_ONE_CHANGE[messages.kind].astype(np.int64)
        counts[truncates] = [len(oids) for oids in targets.values()]
        after = self._next_change + np.cumsum(counts)
        next_change = after - counts
        where, controls = messages.controls(next_change)
        origins, gids = _names(messages, where)
        versions = self._relation_versions(messages)
        tables = [
            ShapedRows(group.relation.shape, _decode_group(messages, next_change, group))
            for group in self._groups(messages, next_change, targets, versions)
        ]
        logical = np.flatnonzero(messages.kind == _MESSAGE)
        if len(logical):
            tables.append(decode_messages(messages, logical, next_change[logical]))
        first, self._next_change = self._next_change, int(after[-1]) if len(after) else self._next_change
        self._stream_xid = messages.stream_xid
        return Decoded(first, self._next_change - first, tuple(tables), controls, origins, gids, messages.wal_end)

    def reshape(self, shape: TableShape) -> None:
        """From the next feed on, the relation's changes have this shape: the columns that they had, and another key."""
        self._relations[shape.relation_oid] = Relation(self._relations[shape.relation_oid].message, shape)

    def _relation_versions(self, messages: Messages) -> dict[int, list[tuple[int, Relation]]]:
        """Relations described in this feed: oid → (index of the message from which it counts, relation)."""
        versions: dict[int, list[tuple[int, Relation]]] = {}
        for index in np.flatnonzero(_DESCRIBES[messages.kind]).tolist():
            if messages.kind[index] != _RELATION:
                begins = messages.kind[index] == _BEGIN_PREPARE
                self._prepared_xid = int(messages.views.u4[messages.body[index] + PREPARED_XID_AT]) if begins else 0
                continue
            raw = bytes(messages.views.buffer[int(messages.body[index]) : int(messages.end[index])])
            message = parse_relation(raw, in_progress=bool(messages.subxid[index]), prepared_xid=self._prepared_xid)
            shape = self._shape_of(message)
            known = self._relations.get(message.relation_oid)
            if known is not None and known.message == message and known.shape == shape:
                continue
            relation = Relation(message, shape)
            before = [] if known is None else [(-1, known)]
            versions.setdefault(message.relation_oid, before).append((index, relation))
            self._relations[message.relation_oid] = relation
        return versions

    def _groups(
        self,
        messages: Messages,
        next_change: I64,
        targets: dict[int, list[int]],
        versions: dict[int, list[tuple[int, Relation]]],
    ) -> list[_Group]:
        """Changes by relation; those of one that changed its shape within this feed, by shape."""
        groups: dict[tuple[int, int], _Group] = {}

        def group_of(oid: int, version: int) -> _Group:
            if (oid, version) not in groups:
                described = versions.get(oid) or ([(-1, self._relations[oid])] if oid in self._relations else [])
                if version >= len(described) or version < 0:
                    raise DecodeError(
                        f"changes of the relation with oid {oid} came before its description",
                        remedy="The stream was not read from its beginning: reconnect.",
                    )
                groups[oid, version] = _Group(described[version][1])
            return groups[oid, version]

        for oid, rows in _by_relation(messages):
            firsts = [first for first, _ in versions.get(oid, [(-1, None)])]
            if len(firsts) == 1 and rows[0] > firsts[0]:
                group_of(oid, 0).rows = rows
                continue
            version = np.searchsorted(firsts, rows) - 1
            for each in np.unique(version).tolist():
                group_of(oid, each).rows = rows[version == each]
        for index, oids in targets.items():
            for place, oid in enumerate(oids):
                firsts = [first for first, _ in versions.get(oid, [(-1, None)])]
                group = group_of(oid, int(np.searchsorted(firsts, index)) - 1)
                group.truncated.append((int(next_change[index]) + place, int(messages.subxid[index])))
        return list(groups.values())


def _by_relation(messages: Messages) -> list[tuple[int, I64]]:
    """Indices of the row messages of each relation, in the order of the stream."""
    rows = np.flatnonzero(_IS_ROW[messages.kind])
    if not len(rows):
        return []
    oid = messages.views.u4[messages.body[rows]].astype(np.uint32)
    if (oid == oid[0]).all():
        return [(int(oid[0]), rows)]
    oids = np.unique(oid)
    number = np.searchsorted(oids, oid).astype(np.uint16 if len(oids) < 2**16 else np.uint32)
    order = np.argsort(number, kind="stable")  # by radix for 16 bits: 17 ns a row, whatever the number of tables
    bounds = np.searchsorted(number[order], np.arange(1, len(oids)))
    return list(zip(oids.tolist(), np.split(rows[order], bounds), strict=True))


def _decode_group(messages: Messages, next_change: I64, group: _Group) -> pa.RecordBatch:
    batch = None
    if group.rows is not None:
        rows = group.rows
        chosen = RowMessages(
            messages.kind[rows], messages.body[rows] + 4, messages.end[rows], next_change[rows], messages.subxid[rows]
        )
        batch = decode_rows(group.relation, messages.views, chosen)
    if group.truncated:
        changes, subxids = zip(*group.truncated, strict=True)
        batch = with_truncates(group.relation, batch, Truncates(changes, subxids))
    assert batch is not None
    return batch


def _truncated_oids(messages: Messages, index: int) -> list[int]:
    at, end = int(messages.body[index]), int(messages.end[index])
    count = int(messages.views.u4[at])
    if at + 5 + 4 * count != end:
        raise DecodeError(f"a truncate message says that it names {count} relations, and does not")
    oids: list[int] = messages.views.u4[at + 5 + 4 * np.arange(count)].tolist()
    return oids


def _names(messages: Messages, where: I64) -> tuple[dict[int, str], dict[int, str]]:
    """Names of origins and identifiers of prepared transactions, by place among the controls."""
    origins: dict[int, str] = {}
    gids: dict[int, str] = {}
    for place in np.flatnonzero(_HAS_NAME[messages.kind[where]]).tolist():
        index = int(where[place])
        kind = int(messages.kind[index])
        if kind == _ORIGIN:
            origins[place] = messages.text_at(index, ORIGIN_NAME_AT)
        else:
            gids[place] = messages.text_at(index, GID_AT[chr(kind)])
    return origins, gids

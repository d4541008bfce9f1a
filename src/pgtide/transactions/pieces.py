"""What comes out of the buffer: a transaction's rows as pieces of about a block each, with the entry that tells of it.

A piece is what arrived together: one `TableRows` per table, each row with its place in the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pgtide.change import TRANSACTIONS, Committed, TableRows, TransactionKind
from pgtide.log.block import outside
from pgtide.transactions.places import Range, dense

Piece = tuple[TableRows, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """What the source says of a transaction when it commits."""

    commit_lsn: int
    end_lsn: int
    commit_timestamp_us: int
    kind: TransactionKind = TransactionKind.COMMIT
    origin: str | None = None
    extra: bytes | None = None  # what else the source says, kept with the transaction


UNKNOWN = Commit(0, 0, 0)  # of a transaction that has not ended


def entry(xid: int, commit: Commit, changes: int, *, ends: bool) -> pa.RecordBatch:
    """A transaction's row of the schema TRANSACTIONS; while it goes on its end LSN is not told."""
    values = {
        "kind": int(commit.kind),
        "xid": xid & 0xFFFFFFFF,  # of a source with longer ones the end, which tells neighbours apart
        "commit_lsn": commit.commit_lsn,
        "end_lsn": commit.end_lsn if ends else 0,
        "commit_timestamp": commit.commit_timestamp_us,
        "first_offset": 0,
        "end_offset": 0,
        "changes": changes,
        "ends": ends,
        "origin": commit.origin,
        "extra": commit.extra,
    }
    return pa.RecordBatch.from_pylist([values], schema=TRANSACTIONS)


def committed(xid: int, pieces: Iterable[Piece], gone: Sequence[Range], commit: Commit) -> list[Committed]:
    """The whole transaction: rows at the places in `gone` are left out, the others are numbered without gaps."""
    kept = [piece for piece in (without(piece, gone) for piece in pieces) if piece]
    result = []
    for number, piece in enumerate(kept, 1):
        tables = tuple(_renumbered(table, gone) for table in piece)
        result.append(Committed(entry(xid, commit, row_count(piece), ends=number == len(kept)), tables))
    return result


def groups(pieces: Iterable[Piece], group_bytes: int) -> Iterator[list[Piece]]:
    """Consecutive pieces of about a block together."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += row_bytes(piece)
        if size >= group_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def row_count(piece: Piece) -> int:
    return sum(table.rows.num_rows for table in piece)


def row_bytes(piece: Sequence[TableRows]) -> int:
    return sum(table.rows.nbytes for table in piece)


def without(piece: Piece, gone: Sequence[Range]) -> Piece:
    """The piece without the rows at these places; tables of which nothing is left are left out too."""
    if not gone:
        return piece
    kept = []
    for table in piece:
        stays = outside(table.rows["_place"].to_numpy(), gone)
        if stays.all():
            kept.append(table)
        elif stays.any():
            kept.append(replace(table, rows=table.rows.filter(pa.array(stays))))
    return tuple(kept)


def _renumbered(table: TableRows, gone: Sequence[Range]) -> TableRows:
    if not gone:
        return table
    index = table.rows.schema.get_field_index("_place")
    places = dense(table.rows.column(index).to_numpy(), gone)
    rows = table.rows.set_column(index, table.rows.schema.field(index), pa.array(places))
    return TableRows(table.shape, rows)

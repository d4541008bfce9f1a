"""Builds committed transactions and reads logs back, for tests of the log alone."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pyarrow as pa

from pgtide.change import TRANSACTIONS, Committed, Op, TableRows, TransactionKind
from pgtide.log.identity import LogIdentity, create_identity
from pgtide.log.reader import LogReader
from pgtide.log.storage import Location
from pgtide.schema import Column, TableShape, storage_schema
from pgtide.types import PgType

INT8 = PgType(20, "int8")
TEXT = PgType(25, "text")


def shape(relation_oid: int = 16384, name: str = "orders") -> TableShape:
    columns = (Column(1, "id", INT8, key=True, not_null=True), Column(2, "note", TEXT))
    return TableShape(relation_oid, "public", name, "d", columns)


def transaction(
    end_lsn: int,
    changes: list[tuple[TableShape, int, str]],
    *,
    xid: int = 7,
    first_place: int = 0,
    ends: bool = True,
    commit_lsn: int | None = None,
) -> Committed:
    """One transaction of inserts, in order; `first_place` and `ends` cut it into pieces."""
    tables = []
    for table in dict.fromkeys(shape for shape, _, _ in changes):
        mine = [(place, key, note) for place, (owner, key, note) in enumerate(changes, first_place) if owner == table]
        places, keys, notes = zip(*mine, strict=True)
        columns = [
            pa.array([int(Op.INSERT)] * len(mine), pa.uint8()),
            pa.array(places, pa.int64()),
            pa.array(np.zeros(len(mine), np.uint32)),
            pa.array(keys, pa.int64()),
            pa.array(notes, pa.string()),
        ]
        tables.append(TableRows(table, pa.RecordBatch.from_arrays(columns, schema=storage_schema(table))))
    entry = {
        "kind": int(TransactionKind.COMMIT),
        "xid": xid,
        "commit_lsn": end_lsn - 8 if commit_lsn is None else commit_lsn,
        "end_lsn": end_lsn if ends else 0,
        "commit_timestamp": 1_700_000_000_000_000 + end_lsn,
        "first_offset": 0,
        "end_offset": 0,
        "changes": len(changes),
        "ends": ends,
        "origin": None,
        "extra": None,
    }
    return Committed(pa.RecordBatch.from_pylist([entry], schema=TRANSACTIONS), tuple(tables))


L = TypeVar("L", bound=Location)


def new_log(location: L) -> L:
    create_identity(location, LogIdentity("7000", "shop", 1, "pgtide", start_lsn=100))
    return location


def contents(location: Location) -> list[tuple[int, int, str]]:
    """Everything a reader can see: (offset, key, note), by offset."""
    reader = LogReader(location)
    rows: list[tuple[int, int, str]] = []
    for piece in reader.plan(reader.first_offset(), reader.end().end_offset):
        batch = reader.read(piece).rows
        rows += zip(*(batch[name].to_pylist() for name in ("_offset", "c1", "c2")), strict=True)
    return sorted(rows)

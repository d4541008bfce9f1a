"""Whose present rows are in the log as `read` changes: `control/reads.json`, and the transactions themselves.

The last transaction of a table's rows says so in its `extra`: rows and progress are one write.  The note tells from
which offset on to look for it, and saves looking once it is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pgtide.change import TransactionKind
from pgtide.errors import LogCorruptError
from pgtide.log.reader import LogReader
from pgtide.log.storage import Location, storage_at

_NOTE = "control/reads.json"


@dataclass(frozen=True, slots=True)
class TableReads:
    table: str  # its qualified name, for people
    fence_xid: int  # of its history: one that was away for a while has another, and is read again
    from_offset: int  # where reading it was begun for the last time
    finished: bool = False


def record_reads(location: Location, reads: Mapping[int, TableReads]) -> None:
    """By relation oid; replaces what was there."""
    data = {
        str(oid): {
            "table": found.table,
            "fence_xid": found.fence_xid,
            "from_offset": found.from_offset,
            "finished": found.finished,
        }
        for oid, found in reads.items()
    }
    storage_at(location).write(_NOTE, json.dumps(data).encode())


def noted_reads(location: Location) -> dict[int, TableReads]:
    storage = storage_at(location)
    found = storage.versioned(_NOTE)
    if found is None:
        return {}
    try:
        return {int(oid): TableReads(**fields) for oid, fields in json.loads(found[0]).items()}
    except (ValueError, TypeError) as error:
        raise LogCorruptError(f"{storage.location}/{_NOTE}: it cannot be understood any more: {error}") from None


def read_extra(relation_oid: int, *, last: bool) -> bytes:
    """What a transaction of `read` changes says of itself: whose rows they are, and whether these are the last."""
    return json.dumps({"table": relation_oid, "last": last}).encode()


def finished_since(reader: LogReader, offset: int) -> set[int]:
    """The relations whose rows came to an end at or after `offset`."""
    end_offset = reader.end().end_offset
    transactions = reader.transactions(max(offset, reader.first_offset()), end_offset)
    said = [
        json.loads(extra)
        for kind, extra in zip(transactions["kind"].to_pylist(), transactions["extra"].to_pylist(), strict=True)
        if kind == TransactionKind.READ and extra
    ]
    return {entry["table"] for entry in said if entry["last"]}

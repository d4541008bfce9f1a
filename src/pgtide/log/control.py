"""Notes that capture, readers and retention leave for each other in the log's `control/` folder.

A first load needs a database snapshot that agrees with a place in the stream, and only the capture can make one.  It
offers it (`snapshot.json`); a load that finds none, or one that has died, asks for another (`snapshot-wanted.json`).

Who wants a table loaded anew says so (`load-wanted-<digest of its name>.json`); the mirror does it.

Who compares mirror and source needs a point at exactly the LSN of a snapshot, and only the mirror can publish one.  It
is asked for with a barrier (`barrier-<id>.json`), and writes into the same file what has become of the wish.

Of a table that is altered, or rewritten, the stream says nothing until a row of it changes, if at all: the capture
notes what it sees of that in the catalog (`alterations.json`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from pgtide.errors import LogCorruptError
from pgtide.log.storage import Location, storage_at
from pgtide.lsn import format_lsn, parse_lsn
from pgtide.schema import TableShape

_OFFER = "snapshot.json"
_REQUEST = "snapshot-wanted.json"
_REMOVED = "removed.json"
_HISTORIES = "histories.json"
_UPKEEP = "upkeep.json"
_RELOAD = "load-wanted-"
_ALTERATIONS = "alterations.json"
_SLOT_NOTE = "slot-being-made.json"


def note_slot(location: Location, slot: str, system_identifier: str) -> None:
    """Notes the intention to make the slot: a start that is killed in between knows by it that the slot is its own."""
    _write(location, _SLOT_NOTE, {"slot": slot, "system": system_identifier})


def slot_is_noted(location: Location, slot: str, system_identifier: str) -> bool:
    return _read(location, _SLOT_NOTE) == {"slot": slot, "system": system_identifier}


def forget_slot_note(location: Location) -> None:
    _remove(location, _SLOT_NOTE)


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A database snapshot to import: it holds exactly the transactions with end LSN at or below `lsn`."""

    name: str  # for SET TRANSACTION SNAPSHOT
    contents: str  # which transactions it sees: after a crash of a server process names come again
    lsn: int
    tables: tuple[str, ...]  # those that are to be loaded under it, by qualified name
    server_started: str  # which server has it: its standbys have snapshots of the same name
    standby: bool = False  # it is the one of source.read_from


def offer_snapshot(location: Location, offer: SnapshotOffer) -> None:
    data = {"snapshot": offer.name, "contents": offer.contents, "lsn": format_lsn(offer.lsn), "tables": offer.tables}
    _write(location, _OFFER, data | {"server_started": offer.server_started, "standby": offer.standby})


def offered_snapshot(location: Location) -> SnapshotOffer | None:
    data = _read(location, _OFFER)
    if data is None:
        return None
    return SnapshotOffer(
        data["snapshot"],
        data.get("contents", ""),
        parse_lsn(data["lsn"]),
        tuple(data["tables"]),
        data["server_started"],
        data.get("standby", False),
    )


def withdraw_snapshot(location: Location) -> None:
    _remove(location, _OFFER)


def request_snapshot(location: Location, tables: tuple[str, ...]) -> None:
    """Asks the capture for a new snapshot for these tables; it withdraws the request when it has made the offer."""
    _write(location, _REQUEST, {"tables": tables})


def requested_snapshot(location: Location) -> tuple[str, ...] | None:
    """The tables that somebody wants to load, None if nobody does."""
    data = _read(location, _REQUEST)
    return tuple(data["tables"]) if data else None


def withdraw_request(location: Location) -> None:
    _remove(location, _REQUEST)


def request_reload(location: Location, tables: Collection[str]) -> None:
    """Asks the mirror to load these tables anew.  A file for each: nobody writes what another is about to withdraw."""
    for table in tables:
        _write(location, _reload_name(table), {"table": table})


def requested_reloads(location: Location) -> tuple[str, ...]:
    found = (_read(location, name) for name in _names(location) if name.startswith(_RELOAD))
    return tuple(sorted(data["table"] for data in found if data is not None))


def withdraw_reloads(location: Location, tables: Collection[str]) -> None:
    """The mirror has begun with these, and goes on by itself."""
    for table in tables:
        _remove(location, _reload_name(table))


def _reload_name(table: str) -> str:
    return f"{_RELOAD}{hashlib.sha256(table.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, slots=True)
class TableHistory:
    """From where on the log has all of a table: every transaction that ends after `complete_lsn`."""

    table: str  # its qualified name
    fence_xid: int  # transactions below it that wrote to the table are waited for
    complete_lsn: int | None  # None: they are still open
    published_by: frozenset[str] = frozenset()  # entries of the server's catalog; none: not known


def record_histories(location: Location, histories: Mapping[int, TableHistory]) -> None:
    """By relation oid; replaces what was there."""
    data = {
        str(oid): {
            "table": history.table,
            "fence_xid": history.fence_xid,
            "complete_lsn": None if history.complete_lsn is None else format_lsn(history.complete_lsn),
            "published_by": sorted(history.published_by),
        }
        for oid, history in histories.items()
    }
    _write(location, _HISTORIES, data)


def histories(location: Location) -> dict[int, TableHistory]:
    return {
        int(oid): TableHistory(
            found["table"],
            found["fence_xid"],
            None if found["complete_lsn"] is None else parse_lsn(found["complete_lsn"]),
            frozenset(found.get("published_by", ())),
        )
        for oid, found in (_read(location, _HISTORIES) or {}).items()
    }


@dataclass(frozen=True, slots=True)
class Alteration:
    """What the catalog said of a table when it was looked at last."""

    state: dict[str, Any]  # files and attributes, to compare with
    seen_lsn: int = 0  # changes that commit from here on have this state; 0: it was never seen to change
    rewritten_lsn: int = 0  # before this its rows were rewritten with other values, for the last time; 0: never
    shape: TableShape | None = None  # the table's, once it is sure that it belongs to `seen_lsn`


def record_alterations(location: Location, alterations: Mapping[int, Alteration]) -> None:
    """By relation oid; replaces what was there."""
    data = {
        str(oid): {
            "state": found.state,
            "seen_lsn": format_lsn(found.seen_lsn),
            "rewritten_lsn": format_lsn(found.rewritten_lsn),
            "shape": found.shape.to_json() if found.shape else None,
        }
        for oid, found in alterations.items()
    }
    _write(location, _ALTERATIONS, data)


def alterations(location: Location) -> dict[int, Alteration]:
    return {
        int(oid): Alteration(
            found["state"],
            parse_lsn(found["seen_lsn"]),
            parse_lsn(found["rewritten_lsn"]),
            TableShape.from_json(found["shape"]) if found["shape"] else None,
        )
        for oid, found in (_read(location, _ALTERATIONS) or {}).items()
    }


@dataclass(frozen=True, slots=True)
class Removed:
    """What retention has taken: everything below `end_offset`; per relation the last offset of its changes there."""

    end_offset: int = 0
    last_offsets: Mapping[int, int] = field(default_factory=dict)
    end_lsn: int = 0  # of the last transaction that went
    without_reads: Mapping[int, int] = field(default_factory=dict)  # as `last_offsets`, for who passes over reads

    def last_offset(self, relation_oid: int, *, reads: bool) -> int:
        """The last of the relation's changes that is gone; -1 if none is."""
        return (self.last_offsets if reads else self.without_reads).get(relation_oid, -1)


def record_removed(location: Location, going: Removed) -> None:
    """Adds to what is recorded.  Two may do that at once (a capture and `prune`): neither may undo the other's."""
    storage, name = storage_at(location), f"control/{_REMOVED}"
    while True:
        found = storage.versioned(name)
        before = _parse_removed(_parsed(found[0], f"{storage.location}/{name}")) if found else Removed()
        content = {
            "end_offset": max(before.end_offset, going.end_offset),
            "tables": _later(before.last_offsets, going.last_offsets),
            "without_reads": _later(before.without_reads, going.without_reads),
            "end_lsn": max(before.end_lsn, going.end_lsn),
        }
        data = json.dumps(content).encode()
        if found and found[0] == data:
            return
        if (storage.replace(name, data, found[1]) if found else storage.create(name, data)) is not None:
            return


def _later(one: Mapping[int, int], other: Mapping[int, int]) -> dict[str, int]:
    return {str(oid): max(one.get(oid, -1), other.get(oid, -1)) for oid in sorted({*one, *other})}


def removed(location: Location) -> Removed:
    data = _read(location, _REMOVED)
    return Removed() if data is None else _parse_removed(data)


def _parse_removed(data: dict[str, Any]) -> Removed:
    tables = {int(oid): last for oid, last in data["tables"].items()}
    without_reads = {int(oid): last for oid, last in data.get("without_reads", data["tables"]).items()}
    return Removed(data["end_offset"], tables, data.get("end_lsn", 0), without_reads)


def record_upkeep(location: Location, finished_at: datetime) -> None:
    """When the mirror last went through all tables to compact and expire."""
    _write(location, _UPKEEP, {"finished_at": finished_at.isoformat()})


def last_upkeep(location: Location) -> datetime | None:
    data = _read(location, _UPKEEP)
    return datetime.fromisoformat(data["finished_at"]) if data else None


class BarrierState(StrEnum):
    ASKED = "asked"
    SEEN = "seen"  # a mirror runs, and has read it
    PUBLISHED = "published"
    PASSED = "passed"  # the mirror was already beyond it: ask again with a newer LSN


@dataclass(frozen=True, slots=True)
class Barrier:
    """The wish that the mirror stop at `lsn` and publish a point there; without an LSN, only to be seen."""

    id: str
    lsn: int | None
    expires_at: datetime  # whoever asked is gone by then
    state: BarrierState = BarrierState.ASKED


def put_barrier(location: Location, barrier: Barrier) -> None:
    lsn = None if barrier.lsn is None else format_lsn(barrier.lsn)
    content = {"lsn": lsn, "expires_at": barrier.expires_at.isoformat(), "state": barrier.state}
    _write(location, _barrier_name(barrier.id), content)


def barrier(location: Location, barrier_id: str) -> Barrier | None:
    data = _read(location, _barrier_name(barrier_id))
    if data is None:
        return None
    lsn = None if data["lsn"] is None else parse_lsn(data["lsn"])
    return Barrier(barrier_id, lsn, datetime.fromisoformat(data["expires_at"]), BarrierState(data["state"]))


def barriers(location: Location) -> list[Barrier]:
    names = [name for name in _names(location) if name.startswith("barrier-")]
    found = [barrier(location, name.removeprefix("barrier-").removesuffix(".json")) for name in names]
    return [one for one in found if one is not None]


def remove_barrier(location: Location, barrier_id: str) -> None:
    _remove(location, _barrier_name(barrier_id))


def _barrier_name(barrier_id: str) -> str:
    return f"barrier-{barrier_id}.json"


def _write(location: Location, name: str, data: dict[str, Any]) -> None:
    storage_at(location).write(f"control/{name}", json.dumps(data).encode())


def _names(location: Location) -> list[str]:
    return [entry.name.removeprefix("control/") for entry in storage_at(location).entries("control")]


def _read(location: Location, name: str) -> dict[str, Any] | None:
    storage = storage_at(location)
    found = storage.versioned(f"control/{name}")
    return None if found is None else _parsed(found[0], f"{storage.location}/control/{name}")


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise LogCorruptError(f"{where}: not JSON any more: {error}") from None
    return content


def _remove(location: Location, name: str) -> None:
    storage_at(location).delete(f"control/{name}")

"""Notes that capture, readers and retention leave for each other in the log's `control/` folder.

A first load needs a database snapshot that agrees with a place in the stream, and only the capture can make one.  It
offers it (`snapshot.json`); a load that finds none, or one that has died, asks for another (`snapshot-wanted.json`).

Who compares mirror and source needs a point at exactly the LSN of a snapshot, and only the mirror can publish one.  It
is asked for with a barrier (`barrier-<id>.json`), and writes into the same file what has become of the wish.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pgtide.errors import LogCorruptError
from pgtide.log.files import make_directory, replace_durably
from pgtide.lsn import format_lsn, parse_lsn

_OFFER = "snapshot.json"
_REQUEST = "snapshot-wanted.json"
_REMOVED = "removed.json"
_HISTORIES = "histories.json"
_UPKEEP = "upkeep.json"


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A database snapshot to import: it holds exactly the transactions with end LSN at or below `lsn`."""

    name: str  # for SET TRANSACTION SNAPSHOT
    lsn: int
    tables: tuple[str, ...]  # those that are to be loaded under it, by qualified name
    server_started: str  # which server has it: its standbys have snapshots of the same name


def offer_snapshot(log_path: Path, offer: SnapshotOffer) -> None:
    data = {"snapshot": offer.name, "lsn": format_lsn(offer.lsn), "tables": offer.tables}
    _write(log_path, _OFFER, data | {"server_started": offer.server_started})


def offered_snapshot(log_path: Path) -> SnapshotOffer | None:
    data = _read(log_path, _OFFER)
    if data is None:
        return None
    return SnapshotOffer(data["snapshot"], parse_lsn(data["lsn"]), tuple(data["tables"]), data["server_started"])


def withdraw_snapshot(log_path: Path) -> None:
    _remove(log_path, _OFFER)


def request_snapshot(log_path: Path, tables: tuple[str, ...]) -> None:
    """Asks the capture for a new snapshot for these tables; it withdraws the request when it has made the offer."""
    _write(log_path, _REQUEST, {"tables": tables})


def requested_snapshot(log_path: Path) -> tuple[str, ...] | None:
    """The tables that somebody wants to load, None if nobody does."""
    data = _read(log_path, _REQUEST)
    return tuple(data["tables"]) if data else None


def withdraw_request(log_path: Path) -> None:
    _remove(log_path, _REQUEST)


@dataclass(frozen=True, slots=True)
class TableHistory:
    """From where on the log has all of a table: every transaction that ends after `complete_lsn`."""

    table: str  # its qualified name
    fence_xid: int  # transactions below it that wrote to the table are waited for
    complete_lsn: int | None  # None: they are still open


def record_histories(log_path: Path, histories: Mapping[int, TableHistory]) -> None:
    """By relation oid; replaces what was there."""
    data = {
        str(oid): {
            "table": history.table,
            "fence_xid": history.fence_xid,
            "complete_lsn": None if history.complete_lsn is None else format_lsn(history.complete_lsn),
        }
        for oid, history in histories.items()
    }
    _write(log_path, _HISTORIES, data)


def histories(log_path: Path) -> dict[int, TableHistory]:
    return {
        int(oid): TableHistory(
            found["table"],
            found["fence_xid"],
            None if found["complete_lsn"] is None else parse_lsn(found["complete_lsn"]),
        )
        for oid, found in (_read(log_path, _HISTORIES) or {}).items()
    }


@dataclass(frozen=True, slots=True)
class Removed:
    """What retention has taken: everything below `end_offset`; per relation the last offset of its changes there."""

    end_offset: int = 0
    last_offsets: Mapping[int, int] = field(default_factory=dict)
    end_lsn: int = 0  # of the last transaction that went


def record_removed(log_path: Path, removed: Removed) -> None:
    tables = {str(oid): last for oid, last in removed.last_offsets.items()}
    _write(log_path, _REMOVED, {"end_offset": removed.end_offset, "tables": tables, "end_lsn": removed.end_lsn})


def removed(log_path: Path) -> Removed:
    data = _read(log_path, _REMOVED)
    if data is None:
        return Removed()
    tables = {int(oid): last for oid, last in data["tables"].items()}
    return Removed(data["end_offset"], tables, data.get("end_lsn", 0))


def record_upkeep(log_path: Path, finished_at: datetime) -> None:
    """When the mirror last went through all tables to compact and expire."""
    _write(log_path, _UPKEEP, {"finished_at": finished_at.isoformat()})


def last_upkeep(log_path: Path) -> datetime | None:
    data = _read(log_path, _UPKEEP)
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


def put_barrier(log_path: Path, barrier: Barrier) -> None:
    lsn = None if barrier.lsn is None else format_lsn(barrier.lsn)
    content = {"lsn": lsn, "expires_at": barrier.expires_at.isoformat(), "state": barrier.state}
    _write(log_path, _barrier_name(barrier.id), content)


def barrier(log_path: Path, barrier_id: str) -> Barrier | None:
    data = _read(log_path, _barrier_name(barrier_id))
    if data is None:
        return None
    lsn = None if data["lsn"] is None else parse_lsn(data["lsn"])
    return Barrier(barrier_id, lsn, datetime.fromisoformat(data["expires_at"]), BarrierState(data["state"]))


def barriers(log_path: Path) -> list[Barrier]:
    names = [file.name for file in (log_path / "control").glob(_barrier_name("*"))]
    found = [barrier(log_path, name.removeprefix("barrier-").removesuffix(".json")) for name in sorted(names)]
    return [one for one in found if one is not None]


def remove_barrier(log_path: Path, barrier_id: str) -> None:
    _remove(log_path, _barrier_name(barrier_id))


def _barrier_name(barrier_id: str) -> str:
    return f"barrier-{barrier_id}.json"


def _write(log_path: Path, name: str, data: dict[str, Any]) -> None:
    make_directory(log_path / "control")
    replace_durably(log_path / "control" / name, json.dumps(data).encode())


def _read(log_path: Path, name: str) -> dict[str, Any] | None:
    file = log_path / "control" / name
    try:
        data: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LogCorruptError(f"{file}: not JSON any more: {error}") from None
    return data


def _remove(log_path: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (log_path / "control" / name).unlink()

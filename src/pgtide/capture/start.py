"""What must hold before streaming begins: one capture per slot, and a slot and a log that belong together.

First start: publication, then slot, then `log.json` with the slot's start LSN; only that counts.  A note written
before the slot is made tells a start that was killed in between that the slot is our own and may be made again; a
slot that we did not make is never dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgtide.capture.read_pair import ReadPair, hold
from pgtide.capture.slot_wait import SlotWait
from pgtide.capture.watch import NEW_LOG, check_published
from pgtide.config import Config
from pgtide.errors import LogError, PgtideError, SlotError, TransientError
from pgtide.failpoints import declare, reach
from pgtide.log.control import (
    SnapshotOffer,
    TableHistory,
    forget_slot_note,
    histories,
    note_slot,
    offer_snapshot,
    record_histories,
    slot_is_noted,
)
from pgtide.log.identity import LogIdentity, create_identity, has_identity, read_identity
from pgtide.log.opening import Writer, open_writer
from pgtide.log.storage import storage_at
from pgtide.lsn import format_lsn
from pgtide.replication.attributes import KnownShapes
from pgtide.replication.catalog import Catalog, TableInfo
from pgtide.replication.connect import Connection, connect, postgres_errors, unless_stopped
from pgtide.replication.preflight import SourceFacts
from pgtide.replication.publication import ensure_publication, publication_names
from pgtide.replication.published import memberships
from pgtide.replication.server import Server, reached
from pgtide.replication.slot import (
    CreatedSlot,
    KeptSnapshot,
    SlotState,
    check_slot,
    create_slot,
    drop_slot,
    slot_exists,
    slot_state,
)

_NOTED = declare("start.slot.noted", "the intention to make the slot is noted, the slot not yet made")
_IDENTIFIED = declare("start.log.identified", "log.json is written, nothing else of the log")
_PUBLISHED = declare("start.published", "the publication is as configured, and nothing knows of it yet")
_OFFERED = declare("start.snapshot.offered", "the first snapshot is offered to the load")

_LOCK_CLASS = 0x70677469  # "pgti"
_RETRY_S = 0.1
_SLOT_FREE_LIMIT_S = 30.0


@dataclass(slots=True)
class Sides:
    """The two connections of a running capture: one to ask and to hold the lock, one that streams."""

    server: Server
    side: Connection
    replication: Connection
    catalog: Catalog
    publications: tuple[str, ...]

    def close(self) -> None:
        for connection in (self.side, self.replication):
            with contextlib.suppress(Exception):
                connection.close()


def open_sides(config: Config, facts: SourceFacts, stop: threading.Event, known_shapes: KnownShapes) -> Sides:
    """Connects, makes sure that this is the only capture of the slot, and brings the publication up to date."""
    timeout_s = config.source.connect_timeout_seconds
    with contextlib.ExitStack() as opened:
        replication = opened.enter_context(
            unless_stopped(stop, lambda: connect(config.source.dsn, replication=True, timeout_s=timeout_s))
        )
        _check_same_system(config, facts, replication)  # before anything is altered there
        location = config.log_location
        if has_identity(location, patience_s=0):
            _check_belongs(read_identity(location, patience_s=0), facts, config.source.slot, location)
        server = reached(config.source.dsn, replication)
        side = opened.enter_context(unless_stopped(stop, lambda: server.connect(timeout_s=timeout_s)))
        _lock(side, config.source.slot, timeout_s, stop)
        tables = _still_there(side, config, facts)
        _check_still_published(config, tables, side)
        publications = ensure_publication(side, config.source, tables)
        reach(_PUBLISHED)
        opened.pop_all()
    return Sides(server, side, replication, Catalog(side, known_shapes, config.source.slot), publications)


def _still_there(side: Connection, config: Config, facts: SourceFacts) -> list[TableInfo]:
    """The captured tables as they are now, under whatever name: one that was dropped must not stop a reconnect."""
    tables = Catalog(side).tables(config.source.tables)
    oids, names = {table.oid for table in facts.tables}, {table.qualified_name for table in facts.tables}
    return [table for table in tables if table.oid in oids or table.qualified_name in names]


def _check_still_published(config: Config, tables: list[TableInfo], side: Connection) -> None:
    """Before what is missing is published again: whatever happened in between is not sent."""
    if has_identity(config.log_location, patience_s=0):
        noted = histories(storage_at(config.log_location, patience_s=0))
        with postgres_errors("reading publications"):
            published_by = {table.oid: noted[table.oid].published_by for table in tables if table.oid in noted}
            check_published(side, publication_names(config.source), published_by)


@dataclass(frozen=True, slots=True)
class FirstSnapshots:
    """The snapshot that the slot's making has exported, kept for those who read under it."""

    for_load: KeptSnapshot | None = None
    for_reads: ReadPair | None = None


def open_log(
    config: Config, facts: SourceFacts, sides: Sides, stop: threading.Event, tell: Callable[[str], None]
) -> tuple[Writer, FirstSnapshots]:
    """The log's writer, and on a first start the snapshot from which the tables are loaded.

    `tell` is called, by another thread, with what is waited for.
    """
    location = config.log_location
    first = FirstSnapshots()
    if not has_identity(location, patience_s=0):
        first = _begin_log(config, facts, sides, stop, tell)
    writer = open_writer(location)
    for shape in writer.recorded_shapes():
        sides.catalog.known.remember(shape)
    for shape in sides.catalog.shapes([table.oid for table in facts.tables], sides.publications).values():
        writer.record_shape(shape)
    return writer, first


def _check_same_system(config: Config, facts: SourceFacts, replication: Connection) -> None:
    """Behind the same name there may be another server by now: a promoted standby, or a restored copy."""
    with postgres_errors("identifying the server"):
        # In this order: a standby that is being promoted still has the old timeline, a primary keeps the one it has.
        recovering = replication.execute("SELECT pg_is_in_recovery()").fetchone()
        row = replication.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None
    if recovering == (True,) and config.source.publication_mode == "managed":
        raise TransientError("the server is a standby now", remedy="Wait until it is promoted, or start the primary.")
    if (str(row[0]), int(row[1])) != (facts.system_identifier, facts.timeline):
        raise LogError(
            f"the server is now system {row[0]} on timeline {row[1]}; the log follows system "
            f"{facts.system_identifier} on timeline {facts.timeline}: it was promoted, restored or replaced",
            remedy=NEW_LOG,
        )


def check_can_go_on(
    config: Config, facts: SourceFacts, sides: Sides, durable_lsn: int, stop: threading.Event
) -> SlotState:
    """The slot, if it can deliver what comes after the log's end; waits a while for a dying predecessor to let go."""
    slot = config.source.slot
    deadline = time.monotonic() + _SLOT_FREE_LIMIT_S
    while True:
        with postgres_errors("looking at the replication slot"):
            state = slot_state(sides.side, slot)
        state = check_slot(state, slot, facts.database, durable_lsn)
        if state.active_pid is None:
            return state
        if stop.is_set():
            raise TransientError("stopped while the slot is in use")
        if time.monotonic() > deadline:
            who = _describe_backend(sides.side, state.active_pid)
            raise SlotError(
                f'replication slot "{slot}" is in use by {who}',
                remedy=f"stop that client, or: SELECT pg_terminate_backend({state.active_pid})",
            )
        stop.wait(_RETRY_S)


def new_snapshot(config: Config, server: Server, replication: Connection, tables: tuple[str, ...]) -> KeptSnapshot:
    """Another exact pair of snapshot and LSN, from a temporary slot, offered to the load."""
    with postgres_errors("making a snapshot"):
        created = create_slot(replication, f"pgtide_tmp_{replication.info.backend_pid}", temporary=True)
    return keep(config, server, created, tables)


def _begin_log(
    config: Config, facts: SourceFacts, sides: Sides, stop: threading.Event, tell: Callable[[str], None]
) -> FirstSnapshots:
    location, slot = config.log_location, config.source.slot
    with postgres_errors("looking at the replication slot"):
        exists = slot_state(sides.side, slot) is not None
    if exists:
        if not slot_is_noted(location, slot, facts.system_identifier):
            forget_slot_note(location)  # a note of ours must not outlive this: the slot is somebody else's
            raise slot_exists(slot)
        with postgres_errors("dropping the slot of an unfinished first start"):
            drop_slot(sides.side, slot)
    note_slot(location, slot, facts.system_identifier)
    reach(_NOTED)
    try:
        with postgres_errors("creating the replication slot"):
            two_phase = config.source.two_phase
            created = _until_stop(sides, stop, tell, lambda: create_slot(sides.replication, slot, two_phase=two_phase))
    except SlotError:
        forget_slot_note(location)  # made by somebody else in this moment: never ours to drop
        raise
    reads_here = config.snapshot.reads_in_log and not config.source.read_from
    for_reads = hold(config, sides.server, created, is_first=True) if reads_here else None
    kept = _keep_first(config, sides.server, created, facts)
    # Making the slot has waited for all open transactions: nobody has rows from before that the stream lacks.
    published = memberships(sides.side, sides.publications, [table.oid for table in facts.tables])
    complete = {
        table.oid: TableHistory(table.qualified_name, 0, created.consistent_lsn, published[table.oid].entries)
        for table in facts.tables
        if table.oid in published
    }
    record_histories(location, complete)
    create_identity(
        location,
        LogIdentity(facts.system_identifier, facts.database, facts.timeline, slot, start_lsn=created.consistent_lsn),
    )
    reach(_IDENTIFIED)
    forget_slot_note(location)
    return FirstSnapshots(kept, for_reads)


def _until_stop(
    sides: Sides, stop: threading.Event, tell: Callable[[str], None], command: Callable[[], CreatedSlot]
) -> CreatedSlot:
    """Making a slot waits for every open transaction: they are named, and `stop` cancels it."""
    over, wait = threading.Event(), SlotWait(time.monotonic())

    def watch() -> None:
        while not over.wait(_RETRY_S):
            if stop.is_set():
                sides.replication.cancel_safe(timeout=1.0)
                return
            with contextlib.suppress(PgtideError):  # whoever waits for the slot notices it as well
                named = wait.look(sides.side, time.monotonic())
                if named:
                    tell(f"the slot is made when open transactions have ended: {named}")

    thread = threading.Thread(target=watch, name="pgtide-slot-stop", daemon=True)
    thread.start()
    try:
        return command()
    finally:
        over.set()
        thread.join()


def _keep_first(config: Config, server: Server, created: CreatedSlot, facts: SourceFacts) -> KeptSnapshot | None:
    if config.snapshot.initial == "none" or config.source.read_from:
        return None  # a load that wants to read from a standby asks for a snapshot there
    kept = keep(config, server, created, tuple(table.qualified_name for table in facts.tables))
    reach(_OFFERED)
    return kept


def keep(
    config: Config, server: Server, created: CreatedSlot, tables: tuple[str, ...], *, standby: bool = False
) -> KeptSnapshot:
    """Imports the exported snapshot into a connection that keeps it, and offers it."""
    keeper = server.connect(timeout_s=config.source.connect_timeout_seconds)
    try:
        with postgres_errors("keeping the snapshot"):
            kept = KeptSnapshot(keeper, created.snapshot_name, server.started)
        found = kept.snapshot
        offer = SnapshotOffer(found.name, found.contents, created.consistent_lsn, tables, server.started, standby)
        offer_snapshot(config.log_location, offer)
    except BaseException:
        keeper.close()
        raise
    return kept


def _check_belongs(identity: LogIdentity, facts: SourceFacts, slot: str, location: str) -> None:
    """A log goes on only with the server, database and slot that it began with."""
    expected = {
        "system identifier": (identity.system_identifier, facts.system_identifier),
        "database": (identity.database, facts.database),
        "slot": (identity.slot, slot),
    }
    for what, (known, found) in expected.items():
        if known != found:
            raise LogError(
                f"the log in {location} belongs to {what} {known}, but the source has {found}",
                remedy="correct source.dsn or source.slot, or choose another log.path for this source",
            )
    if identity.timeline != facts.timeline:
        raise LogError(
            f"the server is on timeline {facts.timeline}, the log in {location} on {identity.timeline}: "
            f"the server was promoted or restored since {format_lsn(identity.start_lsn)}",
            remedy=NEW_LOG,
        )


def _lock(side: Connection, slot: str, timeout_s: float, stop: threading.Event) -> None:
    """One capture per slot: an advisory lock says who, for as long as the connection lives."""
    deadline = time.monotonic() + timeout_s
    with postgres_errors("taking the capture's lock"):
        while True:
            row = side.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", [_LOCK_CLASS, slot]).fetchone()
            if row and row[0]:
                return
            if stop.is_set():
                raise TransientError("stopped while another capture holds the lock")
            if time.monotonic() > deadline:
                break
            stop.wait(_RETRY_S)
        holder = side.execute(
            """SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = %s
               AND objid = (hashtext(%s)::bigint & 4294967295) AND granted""",
            [_LOCK_CLASS, slot],
        ).fetchone()
        who = _describe_backend(side, holder[0]) if holder else "another session"
    raise SlotError(f'another capture uses slot "{slot}": {who}', remedy="stop it, or choose another source.slot")


def _describe_backend(connection: Connection, pid: int) -> str:
    row = connection.execute(
        "SELECT usename::text, application_name, client_addr::text FROM pg_stat_activity WHERE pid = %s", [pid]
    ).fetchone()
    if row is None:
        return f"server process {pid}"
    return f"server process {pid} (user {row[0]}, application {row[1]!r}, client {row[2] or 'local socket'})"

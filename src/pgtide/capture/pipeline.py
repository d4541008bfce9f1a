"""The pipeline: socket → decoder → transactions → log, and "durable up to here" back to the server.

One thread reads, decodes and answers the server; the appender's thread writes and fsyncs.  Nothing is acknowledged
that is not durable.  A lost connection is opened again with growing pauses: the server then sends from the last
acknowledged position on, and what the log has already is skipped.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pgtide.capture import watch
from pgtide.capture.alterations import AlterationWatch
from pgtide.capture.appender import Appender, Reset, Work, newest_commit_s
from pgtide.capture.assemble import Assembler
from pgtide.capture.attend import STATUS_INTERVAL_S, Attendant, CaptureState, Charges
from pgtide.capture.cut import split_at
from pgtide.capture.endpoint import serving, verdict
from pgtide.capture.fence import Fence
from pgtide.capture.health import Health
from pgtide.capture.keeper import SnapshotKeeper
from pgtide.capture.read_round import ReadRound
from pgtide.capture.reads import Reads
from pgtide.capture.start import Sides, check_can_go_on, open_log, open_sides
from pgtide.capture.tidy import Tidier
from pgtide.capture.whole import HELD_BYTES, Idle
from pgtide.config import Config, is_url
from pgtide.decode import Decoder, Frames
from pgtide.errors import (
    DecodeError,
    LogNotWritableError,
    LogUnreachableError,
    PgtideError,
    SendWholeError,
    TransientError,
)
from pgtide.failpoints import declare, reach
from pgtide.log.files import make_directory
from pgtide.log.identity import has_identity, read_identity
from pgtide.log.presence import Presence
from pgtide.log.reader import LogReader
from pgtide.log.storage import storage_at
from pgtide.replication.attributes import KnownShapes
from pgtide.replication.connect import redact
from pgtide.replication.preflight import SourceFacts, check_source
from pgtide.replication.stream import ReplicationStream
from pgtide.transactions.buffer import TransactionBuffer
from pgtide.transactions.spool import Spool

_DECODED = declare("capture.decoded", "messages are decoded, none of their changes is in the log yet")

_IDLE_WAIT_MS = 500
_BATCH_WAIT_MAX_MS = 10  # an object store is written seldom, the socket is emptied often
_RETRY_FIRST_S, _RETRY_LAST_S = 0.2, 10.0
_SPOOL_RETRY_S = 0.5
_WHOLE_FIRST_S, _WHOLE_LAST_S = 10.0, 600.0  # each change between streamed and whole takes a new connection
_CLOSE_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class WholeTransactions:
    """A transaction could not be put together from what was streamed: for a while all are asked for as wholes."""

    until_lsn: int  # where that transaction ends; 0: it had not ended
    until_s: float

    def is_over(self, durable_lsn: int) -> bool:
        return durable_lsn >= self.until_lsn and time.monotonic() >= self.until_s


class Capture:
    """One run of the capture: `run` blocks until `stop` is set or something needs a person."""

    def __init__(self, config: Config, on_state: Callable[[CaptureState], None] = lambda state: None) -> None:
        self._config = config
        self._on_store = is_url(config.log_location)
        self._tell = on_state
        self._state = CaptureState("starting")
        self._presence = Presence(config.presence_path)
        self.health = Health(config.capture.unhealthy_after_seconds)
        self._keeper = SnapshotKeeper(config)
        self._reads = Reads(config, self._tell_reading, self._warn)
        self._fence = Fence(storage_at(config.log_location, patience_s=0))
        self._tidier = Tidier(config.log_location, config.log, self._warn)
        self._stream: ReplicationStream | None = None
        self._appender: Appender | None = None
        self._known_shapes = KnownShapes()
        self._source: watch.SourceWatch | None = None
        self._alterations: AlterationWatch | None = None
        self._attendant: Attendant | None = None
        self._binary = True
        self._whole: WholeTransactions | None = None  # while transactions are to come whole, not streamed in progress
        self._whole_for_s = _WHOLE_FIRST_S
        self.streaming = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Checks the source, then captures; a source that is not ready is told before anything is touched."""
        why = "it was asked to"
        try:
            if self._on_store:
                has_identity(self._config.log_location, patience_s=0)  # a store that cannot be used says so
            facts = check_source(self._config, stop)
            for warning in facts.warnings:
                self._warn(warning)
            if self._on_store:
                with contextlib.suppress(OSError):
                    make_directory(self._config.presence_path / "control")
            self._presence.say("starting")
            self._run(facts, stop)
        except BaseException as error:
            why = error.what if isinstance(error, PgtideError) else type(error).__name__
            raise
        finally:
            self.health.stopped(why)
            self.streaming.clear()
            self._keeper.close()
            self._reads.close()
            if self._appender is not None:
                self._appender.close(_CLOSE_LIMIT_S)
            self._presence.say("stopped", redact(why))
            self._presence.close()

    @property
    def durable_lsn(self) -> int:
        """How far the log is durable; 0 before it was opened."""
        return self._appender.durable_lsn if self._appender is not None else 0

    def serving(self) -> AbstractContextManager[None]:
        """Answers at the metrics port, if one is configured, before the run and until the end of the block."""
        health = self.health
        answers = {
            "/health": lambda: verdict("healthy", health.illness()),
            "/ready": lambda: verdict("ready", health.unreadiness(self.durable_lsn)),
        }
        return serving(self._config, "capture", answers)

    def _on_state(self, state: CaptureState) -> None:
        """Says it once, to whoever asked to be told, for `status` and for readiness."""
        if not self.streaming.is_set():
            self.health.connecting(f"{state.phase}: {state.detail}" if state.detail else state.phase)
        if state != self._state:
            self._state = state
            self._presence.say(state.phase, redact(state.detail))
            self._tell(state)

    def _keep_saying(self) -> None:
        self._presence.keep_saying(redact(self._keeper.trouble or ""))

    def wake(self) -> None:
        """Makes a run whose `stop` was set look at it now."""
        if self._stream is not None:
            self._stream.wake()

    def _run(self, facts: SourceFacts, stop: threading.Event) -> None:
        pause_s = _RETRY_FIRST_S
        while not stop.is_set():
            began = time.monotonic()
            try:
                self._connected(facts, stop)
            except DecodeError as error:
                # A value whose binary form is not to be had, or not understood, can be read as text.
                if not self._binary:
                    raise
                self._binary = False
                self._on_state(CaptureState("waiting", f"{error.what}; going on with values as text"))
            except SendWholeError as error:
                self._whole = WholeTransactions(error.end_lsn, time.monotonic() + self._whole_for_s)
                self._whole_for_s = min(2 * self._whole_for_s, _WHOLE_LAST_S)
                self._on_state(CaptureState("waiting", f"{error.what}; asking for whole transactions"))
            except KeyboardInterrupt:
                if not stop.is_set():
                    raise
            except (TransientError, LogUnreachableError) as error:
                if stop.is_set():
                    return
                if time.monotonic() - began > _RETRY_LAST_S:
                    pause_s = _RETRY_FIRST_S
                self.health.beat(error.what if isinstance(error, LogNotWritableError | LogUnreachableError) else None)
                self._on_state(CaptureState("waiting", error.what))
                watch.reconnects.inc()
                stop.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _RETRY_LAST_S)

    def _connected(self, facts: SourceFacts, stop: threading.Event) -> None:
        """From connecting to the loss of the connection, or to `stop`."""
        open_log_again = self._appender is None or self._appender.must_be_opened_again()
        sides = open_sides(self._config, facts, stop, self._known_shapes)
        try:
            if open_log_again:
                self._open_appender(facts, sides, stop)
            assert self._appender is not None
            self._fence.raise_around(sides.side, sides.publications, facts.tables)
            self._send([Reset()], self._appender, stop)
            while not self._appender.drained(STATUS_INTERVAL_S):  # the spool is about to be emptied
                self._wait_for(self._appender)
                if stop.is_set():
                    return
            self._appender.raise_failure()
            durable_lsn = self._appender.durable_lsn
            slot = check_can_go_on(self._config, facts, sides, durable_lsn, stop)
            reads = self._reads.begin(sides, facts.tables, durable_lsn, stop)
            two_phase = slot.two_phase or self._config.source.two_phase
            buffer = self._buffer(durable_lsn, stop, two_phase=two_phase)
            options = stream_options(
                facts.server_version,
                sides.publications,
                origin=self._config.source.origin,
                binary=self._binary,
                streaming=self._whole is None,
                two_phase=two_phase,
            )
            self._stream = ReplicationStream(
                sides.replication,
                self._config.source.slot,
                durable_lsn,
                options,
                min(self._config.log.flush_interval_ms, _BATCH_WAIT_MAX_MS),
                stop,
            )
            self.streaming.set()
            self.health.streaming(slot.wal_end_lsn)
            self._on_state(CaptureState("streaming"))
            watch.streaming.set(1)
            assembler = Assembler(durable_lsn, buffer, HELD_BYTES)
            attendant = self._attendant = Attendant(
                self._stream, sides, self._appender, self._charges(facts, sides), self._on_state, self._warn
            )
            self._pump(self._stream, self._appender, sides, assembler, attendant, reads, stop)
        finally:
            self.streaming.clear()
            self.health.connecting("connecting")
            watch.streaming.set(0)
            self._attendant = None
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            sides.close()

    def _open_appender(self, facts: SourceFacts, sides: Sides, stop: threading.Event) -> None:
        if self._appender is not None:
            self._appender.close(_CLOSE_LIMIT_S)
            self._appender = None
        try:
            writer, first = open_log(self._config, facts, sides, stop, self._tell_start)
        except OSError as error:
            reason = error.strerror or error
            raise LogNotWritableError(f"the log in {self._config.log_location} cannot be written: {reason}") from error
        if first.for_load is not None:
            self._keeper.keep(first.for_load)
        if first.for_reads is not None:
            self._reads.take(first.for_reads)
        self._appender = Appender(
            writer,
            self._on_durable,
            last_commit_s=_last_commit_s(self._config.log_location),
            # Where a flush is dear it is put off by the appender, not by reading less often.
            flush_interval_s=self._config.log.flush_interval_ms / 1000 if self._on_store else 0.0,
        )

    def _buffer(self, durable_lsn: int, stop: threading.Event, *, two_phase: bool) -> TransactionBuffer:
        capture, path = self._config.capture, self._config.spool_path
        owner = read_identity(self._config.log_location).log_id if capture.spool_path else ""

        def wait(error: OSError) -> None:
            """The spool cannot be written: reading stops, the server goes on being answered, then it is tried again."""
            assert self._attendant is not None
            self._attendant.spool_trouble = f"the spool in {path} cannot be written: {error.strerror or error}"
            self._attendant.attend()
            if stop.wait(_SPOOL_RETRY_S):
                raise TransientError(self._attendant.spool_trouble)

        try:
            spool = Spool(path, capture.spool_max_bytes, wait=wait, owner=owner)
            if not two_phase:
                spool.remove_all_but(())  # a slot that is not two-phase any more sends everything again at the commit
            return TransactionBuffer(spool, capture.transaction_memory_bytes, durable_lsn=durable_lsn)
        except OSError as error:
            raise LogNotWritableError(f"the spool in {path} cannot be written: {error.strerror or error}") from error

    def _wait_for(self, appender: Appender) -> None:
        """Says why it takes so long, where no attendant does."""
        self.health.beat(appender.trouble or appender.delay)
        if appender.trouble:
            self._on_state(CaptureState("waiting", appender.trouble))

    def _warn(self, text: str) -> None:
        """Says something that does not change what the capture is doing."""
        self._tell(CaptureState(self._state.phase, text))

    def _on_durable(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.wake()

    def _pump(
        self,
        stream: ReplicationStream,
        appender: Appender,
        sides: Sides,
        assembler: Assembler,
        attendant: Attendant,
        reads: ReadRound | None,
        stop: threading.Event,
    ) -> None:
        """The loop: read what came, decode it, hand it on, answer; where `reads` belong in the order, these first."""
        decoder = Decoder(sides.catalog.shape_for)
        if reads is not None and appender.durable_lsn == reads.pair.lsn:
            self._read_tables(reads, appender, attendant, stop)
            reads = None
        while not stop.is_set():
            received, asked = stream.read(min(_IDLE_WAIT_MS, attendant.answer_due_ms())), False
            if received is not None:
                decoded = decoder.feed(Frames(received.buffer, received.starts, received.ends))
                reach(_DECODED)
                for shape in sides.catalog.keys_certain_behind(decoded.wal_end):
                    decoder.reshape(shape)
                asked = decoded.reply_wanted
                watch.rows.inc(decoded.changes)
                watch.received_bytes.inc(received.nbytes)
                work: list[Work] = list(assembler.feed(decoded))
                attendant.spool_trouble = None
                cut = split_at(work, reads.pair.lsn) if reads is not None else None
                if cut is not None and reads is not None:
                    before, work = cut
                    self._send([*before, Idle(reads.pair.lsn)], appender, stop)
                    self._settle(appender, attendant, stop)
                    self._read_tables(reads, appender, attendant, stop)
                    reads = None
                self._send(work, appender, stop)
            attendant.attend(asked=asked)
            self._keep_saying()
            watch.prepared_transactions.set(assembler.prepared_transactions)
            if self._whole is not None and self._whole.is_over(appender.durable_lsn):
                self._whole = None
                self._on_state(CaptureState("waiting", "connecting again, to have transactions streamed in progress"))
                return
            if self._reads.is_due():
                self._on_state(CaptureState("waiting", "connecting again, to read tables into the log"))
                return
        if not appender.trouble and appender.drained(_CLOSE_LIMIT_S):
            stream.send_status(appender.durable_lsn)

    def _read_tables(self, reads: ReadRound, appender: Appender, attendant: Attendant, stop: threading.Event) -> None:
        """Nothing is received meanwhile: what the server has sent waits in the socket, and it is answered."""

        def attend() -> None:
            attendant.attend()
            self._keep_saying()

        self._reads.run(
            reads,
            lambda work: self._send(work, appender, stop),
            lambda: self._settle(appender, attendant, stop),
            attend,
            stop,
        )

    def _settle(self, appender: Appender, attendant: Attendant, stop: threading.Event) -> None:
        """Waits until all that was sent is durable."""
        while not stop.is_set() and not appender.drained(STATUS_INTERVAL_S):
            attendant.attend()
        appender.raise_failure()

    def _tell_start(self, what: str) -> None:
        self._on_state(CaptureState("starting", what))

    def _tell_reading(self, what: str) -> None:
        self._on_state(CaptureState("reading" if what else "streaming", what))

    def _charges(self, facts: SourceFacts, sides: Sides) -> Charges:
        if self._source is None:
            self._source = watch.SourceWatch(
                self._config.source.slot, facts.timeline, sides.publications, self._fence.published_by
            )
        if self._alterations is None:
            oids = [table.oid for table in facts.tables]
            storage = storage_at(self._config.log_location, patience_s=0)  # the stream is answered meanwhile
            self._alterations = AlterationWatch(storage, sides.publications, oids)
        return Charges(self._source, self._alterations, self._keeper, self._fence, self._tidier, self.health)

    def _send(self, work: list[Work], appender: Appender, stop: threading.Event) -> None:
        """Queues the work; while the queue takes nothing reading stops, and the server goes on being answered."""
        while work and not stop.is_set():
            work = appender.offer(work, STATUS_INTERVAL_S)
            if work and self._attendant is not None:
                self._attendant.attend()
            elif work:
                self._wait_for(appender)


def _last_commit_s(location: str) -> float:
    """When the last transaction of the log was committed; 0 if it has none."""
    reader = LogReader(location)
    end_offset = reader.end().end_offset
    if end_offset == reader.first_offset():
        return 0.0
    return newest_commit_s(reader.transactions(end_offset - 1, end_offset))


def stream_options(
    server_version: int,
    publications: tuple[str, ...],
    *,
    origin: str = "any",
    binary: bool = True,
    streaming: bool = True,
    two_phase: bool = False,
) -> dict[str, str]:
    """pgoutput's options for this server: large transactions come in blocks while they are in progress."""
    protocol = 4 if server_version >= 160000 else 3 if server_version >= 150000 else 2
    names = ",".join('"' + name.replace('"', '""') + '"' for name in publications)
    filtered = {"origin": "none"} if origin == "none" else {}  # "any" is the default, and 15 does not know the option
    options = filtered | {
        "proto_version": str(protocol),
        "publication_names": names,
        "binary": "true" if binary else "false",
        "messages": "true",
        "streaming": "on" if streaming else "off",
    }
    return options | {"two_phase": "on"} if two_phase else options

"""The demo from beginning to end: open the shop, mirror it, kill the pipeline, bring it back, prove what it did."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pgtide import local
from pgtide.demo import shop
from pgtide.demo.child import Child
from pgtide.demo.observe import CatchUp, Observer, Seen
from pgtide.demo.pipeline import Pipeline, short_lived
from pgtide.demo.proof import Proof, Request, proof_from_json
from pgtide.demo.settings import Settings
from pgtide.demo.traffic import Traffic
from pgtide.demo.view import View
from pgtide.errors import PgtideError
from pgtide.lsn import format_lsn

_LOOK_EVERY_S = 0.25
_CLEAN_LIMIT_S = 1.5
_POLL_S = 0.02
_DATABASE = "shop"


class Story:
    """One run; `close` ends everything that is under way and removes all files, within two seconds."""

    def __init__(self, settings: Settings, view: View) -> None:
        self._settings = settings
        self.view = view
        self._began_s = time.monotonic()
        self._open = ExitStack()
        self.restarts = 0
        self.transactions = 0
        self.folder = Path()
        self.dsn = ""
        self.psql = Path()

    def close(self) -> None:
        self._open.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def tell(self) -> Proof:
        """Everything up to the proof; afterwards source and mirror are at rest."""
        self._open_shop()
        self._mirror_it()
        earlier_lsn = self._kill()
        self._bring_back()
        prover = self._start_prover()
        self._come_to_rest()
        return self._ask(prover, earlier_lsn)

    def go_on(self) -> None:
        """Traffic and mirror again, until interrupted."""
        self._traffic.start()
        self._pipeline.start()
        self._watch("running", for_s=math.inf)

    def _open_shop(self) -> None:
        self.folder = self._open.enter_context(_temporary_folder())
        server = self._open.enter_context(local.postgres())
        with server.connect() as connection:
            connection.execute(f"CREATE DATABASE {_DATABASE}".encode())
        self.dsn = server.dsn_of(_DATABASE)
        self.psql = server.programs / "psql"
        with server.connect(_DATABASE) as connection:
            shop.open_shop(connection, self._settings)
            rows = sum(shop.counts(connection).values())
        self.view.milestone(f"A shop in Postgres {server.version}: {len(shop.TABLES)} tables, {rows:,} rows.")

    def _mirror_it(self) -> None:
        self._pipeline = Pipeline(self.folder, self.dsn)
        self._open.callback(self._pipeline.kill)
        self._traffic = Traffic(self.dsn, self._settings)
        self._observer = Observer(self.dsn, self._pipeline.config, self._traffic)
        self._open.callback(self._observer.close)
        self._open.callback(self._traffic.stop, limit_s=0.5)
        self._traffic.start()
        self._pipeline.start()
        self.view.milestone("Traffic starts, and `pgtide run` beside it: capture, first load, mirror.")
        seen = self._watch("loading", until=lambda seen: seen.loaded)
        mirrored = sum(rows or 0 for rows in seen.mirror_rows.values())
        self.view.milestone(f"Loaded under traffic: {mirrored:,} rows; from here on the mirror follows.")
        self._watch("following the traffic", until=CatchUp(seen.wal_lsn), for_s=self._settings.before_kill_s)

    def _kill(self) -> int:
        """Returns the LSN of the newest point from before the kill."""
        self._pipeline.kill()
        point = self._observer.look().point
        assert point is not None
        self.view.milestone(f"SIGKILL for the pipeline and its JVM, at point {format_lsn(point.lsn)}.", "bold red")
        self._watch("killed: traffic goes on, the mirror stands still", for_s=self._settings.dead_s)
        return point.lsn

    def _bring_back(self) -> None:
        missed_up_to_lsn = self._observer.look().wal_lsn
        self._pipeline.start()
        self.restarts += 1
        self.view.milestone("Started again, as it was.")
        self._watch("catching up after the kill", until=CatchUp(missed_up_to_lsn))
        self.view.milestone("All that was committed meanwhile is in the mirror.", "green")
        self._watch("following the traffic", for_s=self._settings.after_kill_s)

    def _come_to_rest(self) -> None:
        self._traffic.stop()
        seen = self._observer.look()
        self.transactions, rolled_back = seen.tally.committed, seen.tally.rolled_back
        self.view.milestone(f"Traffic stops after {self.transactions:,} transactions, {rolled_back:,} rolled back.")
        self._watch("catching up", until=CatchUp(seen.wal_lsn))
        self._pipeline.end(self._settings.limit_s)
        self.view.milestone("The mirror has caught up; the pipeline ended cleanly on SIGTERM.")

    def _start_prover(self) -> Child:
        command = [sys.executable, "-m", "pgtide.demo.prover", str(self._pipeline.config_file)]
        prover = Child(command, short_lived(self.folder), self.folder / "proof.log")
        self._open.callback(prover.kill)
        return prover

    def _ask(self, prover: Child, earlier_lsn: int) -> Proof:
        answer = self.folder / "proof.json"
        prover.tell(Request(earlier_lsn, shop.goods(self._settings), str(answer)).to_json())
        limit_s = time.monotonic() + self._settings.limit_s
        while not answer.exists():
            if prover.exit_code() is not None and not answer.exists():
                raise prover.failure("The proof ended without a result")
            if time.monotonic() > limit_s:
                raise prover.failure(f"The proof did not end within {self._settings.limit_s:.0f} s")
            self.view.show(self._observer.look(), "proving with Spark SQL")
            time.sleep(_LOOK_EVERY_S)
        prover.kill()
        return proof_from_json(answer.read_bytes())

    def _watch(self, doing: str, *, until: Callable[[Seen], bool] = lambda _: True, for_s: float = 0.0) -> Seen:
        """Shows what happens until the condition holds, at least for so long; returns what was seen last."""
        began_s = time.monotonic()
        while True:
            self._pipeline.check()
            seen = self._observer.look()
            self.view.show(seen, doing)
            took_s = time.monotonic() - began_s
            if took_s >= for_s and until(seen):
                return seen
            if took_s > for_s + self._settings.limit_s:
                troubles = "".join(f"\n  {trouble}" for trouble in seen.troubles)
                raise PgtideError(f"Gave up after {took_s:.0f} s of {doing}.{troubles}")
            time.sleep(_LOOK_EVERY_S)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pgtide-demo-"))
    try:
        yield folder
    finally:
        # Processes that were killed a moment ago may still be writing.
        limit_s = time.monotonic() + _CLEAN_LIMIT_S
        while folder.exists() and time.monotonic() < limit_s:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(_POLL_S)

"""Whether the capture works and whether it is up to date, for whoever watches the process.

*Healthy* is a capture that would get on if the server let it: waiting for a server that is down is healthy, and a
restart would not help.  *Ready* is one that streams and has made durable all that was there when it connected.
"""

from __future__ import annotations

import time

from pgtide.lsn import format_lsn


class Health:
    """Written by the capture's threads, read by any."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._doing = "starting"
        self._stopped: str | None = None
        self._streaming_to_lsn: int | None = None
        self._beat_s = 0.0
        self._log_trouble: str | None = None
        self._log_trouble_since_s = 0.0

    def connecting(self, doing: str) -> None:
        self._streaming_to_lsn = None
        self._doing = doing

    def streaming(self, wal_end_lsn: int) -> None:
        """The server streams; `wal_end_lsn` is where its WAL ended when it began to."""
        self.beat(None)
        self._streaming_to_lsn = wal_end_lsn

    def beat(self, log_trouble: str | None) -> None:
        """The reading thread goes on; `log_trouble` tells why the log cannot be written, if it cannot."""
        self._beat_s = time.monotonic()
        if log_trouble is not None and self._log_trouble is None:
            self._log_trouble_since_s = self._beat_s
        self._log_trouble = log_trouble

    def stopped(self, why: str) -> None:
        self._stopped = why

    def illness(self) -> str | None:
        """Why a restart, or a person, is called for; None if all is well."""
        now_s = time.monotonic()
        if self._stopped is not None:
            return f"the capture has stopped: {self._stopped}"
        if self._log_trouble is not None and now_s - self._log_trouble_since_s > self._patience_s:
            return f"for {now_s - self._log_trouble_since_s:.0f} s {self._log_trouble}"
        if self._streaming_to_lsn is not None and now_s - self._beat_s > self._patience_s:
            return f"the thread that reads changes has not gone on for {now_s - self._beat_s:.0f} s"
        return None

    def unreadiness(self, durable_lsn: int) -> str | None:
        """What is missing until the log is up to date; None if it is."""
        target_lsn = self._streaming_to_lsn
        if self._stopped is not None or target_lsn is None:
            return self.illness() or self._doing
        if durable_lsn < target_lsn:
            return f"catching up: the log is durable to {format_lsn(durable_lsn)} of {format_lsn(target_lsn)}"
        return None

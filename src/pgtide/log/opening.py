"""The writer that fits a log's storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pgtide.change import Committed, LargeTransaction
from pgtide.log.folder import Folder
from pgtide.log.objects.writer import ObjectLogWriter
from pgtide.log.storage import Location, storage_at
from pgtide.log.writer import LogWriter
from pgtide.schema import TableShape


class Writer(Protocol):
    """Appends committed transactions, makes them durable, then lets readers see them.  One per log, one thread.

    A method that fails with an OSError has changed nothing that readers see; `restart`, then call it again.
    """

    @property
    def location(self) -> str: ...

    @property
    def durable_lsn(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def last_commit_lsn(self) -> int: ...

    @property
    def unfinished(self) -> bool: ...

    def write(self, pieces: Sequence[Committed]) -> None: ...

    def write_large(self, large: LargeTransaction) -> None: ...

    def recorded_shapes(self) -> list[TableShape]: ...

    def record_shape(self, shape: TableShape) -> None: ...

    def advance(self, durable_lsn: int) -> None: ...

    def check_not_fenced(self) -> None: ...

    def forget_unfinished(self) -> None: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...


def open_writer(location: Location) -> Writer:
    """Takes the log; whoever wrote to it before is fenced off."""
    storage = storage_at(location, patience_s=0)
    return LogWriter(storage.path) if isinstance(storage, Folder) else ObjectLogWriter(storage)

"""A process with a buffer and a log that can die at any kill point, and what it must have left in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from pgtide.log.reader import LogReader
from pgtide.log.writer import LogWriter
from pgtide.transactions.spool import Spool
from tests.transactions.rows import close_files_below


class MortalProcess(ABC):
    def __init__(self, path: Path, memory_bytes: int, piece_bytes: int) -> None:
        self.path, self._memory_bytes, self._piece_bytes = path, memory_bytes, piece_bytes
        self.start()

    def start(self) -> None:
        close_files_below(self.path)  # of the one that has died
        self.writer = LogWriter(self.path)
        self.durable_lsn = self.writer.durable_lsn
        self.open_buffer(Spool(self.path / "spool", file_bytes=1000))

    @abstractmethod
    def open_buffer(self, spool: Spool) -> None: ...


def unused_large_files(path: Path) -> set[str]:
    """Rows of large transactions that no block of the log refers to."""
    reader = LogReader(path)
    used = {piece.segment for piece in reader.plan(0, reader.end().end_offset)}
    return {f"large/{file.name}" for file in (path / "large").glob("*")} - used

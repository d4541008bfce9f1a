"""What can go wrong, said so that a person can act: what happened, to what, and what to type next.

Three reactions: `TransientError` is retried, `TableError` parks one table, everything else stops the
process.  `ConfigurationError`, `SourceNotReadyError`, `NotRunningError` and `AlreadyRunningError` are found before
anything is touched: exit code 2.
All of them survive pickling, because some are raised in Spark's workers.
"""

from __future__ import annotations


class PgtideError(Exception):
    """Base of all errors that pgtide raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n{self.remedy}" if self.remedy else self.what

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.remedy)


def _rebuild(cls: type[PgtideError], what: str, remedy: str) -> PgtideError:
    return cls(what, remedy=remedy)


class ConfigurationError(PgtideError):
    """The configuration is wrong; nothing was touched."""

    exit_code = 2


class SourceNotReadyError(PgtideError):
    """The server cannot serve as a source as it is (unreachable, privileges, settings); nothing was touched."""

    exit_code = 2


class NotRunningError(PgtideError):
    """A part of pgtide that a command needs does not run; nothing was touched."""

    exit_code = 2


class AlreadyRunningError(PgtideError):
    """Another process does already what this one was started for; nothing was touched."""

    exit_code = 2


class TransientError(PgtideError):
    """It may go away by itself: retried with back-off."""


class SendWholeError(TransientError):
    """A transaction cannot be put together from what was streamed while it was in progress; the server can send it
    whole after its commit."""

    def __init__(self, what: str, *, remedy: str = "", end_lsn: int = 0) -> None:
        super().__init__(what, remedy=remedy)
        self.end_lsn = end_lsn  # where the transaction ends; 0: it goes on


class LogNotWritableError(TransientError):
    """The change log cannot be written just now (disk full, folder read-only); it goes on by itself when it can be."""


class SlotError(PgtideError):
    """The replication slot cannot be used: missing, lost, active elsewhere, or of another history."""


class LogError(PgtideError):
    """The change log cannot be read or written as it must."""


class LogCorruptError(LogError):
    """Bytes below the durable marker are not what was written, or a file of the log is missing."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy or _RESTORE)


_RESTORE = "restore it from a copy of the log; `pgtide log check` lists all that is damaged and who still needs it"


class LogRangeError(LogError):
    """A reader asked for offsets that retention removed, or that belong to another log."""


class LogUnreachableError(LogError, OSError):
    """The store that holds the log does not answer, or refuses.  To a writer that is what a full disk is: it waits
    and goes on by itself; to whoever only begins, the environment is wrong."""

    exit_code = 2


class FencedError(LogError):
    """Another writer has taken over this log."""


class DecodeError(PgtideError):
    """The server sent something that cannot be decoded."""


class NoBinaryFormError(DecodeError):
    """A value has no binary form; the stream can be read as text."""


class TableError(PgtideError):
    """Trouble of one table: it is parked, the others go on."""

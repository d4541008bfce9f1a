"""Where a log's files are: the few things that the log asks of a folder or an object store.

Names are relative to the log and have slashes: `segments/….seg`.  Two kinds of files, and nothing else:

    segments, large files, shapes, log.json    come into being once, whole, and never change
    the marker and the notes in `control/` and `readers/`    are replaced as a whole

(A segment in a folder grows at its end while it is written; only its writer knows that, see `writer`.)  What a method
has written is durable when it returns, and everybody who asks afterwards sees it.  Trouble is an OSError: a name
that is not there FileNotFoundError, a store that does not answer or refuses LogUnreachableError.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pgtide.config import is_url
from pgtide.errors import ConfigurationError

PATIENCE_S = 120.0  # of readers: how long a store that does not answer is asked again


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    nbytes: int
    modified_s: float


class OpenedFile(Protocol):
    """For reading here and there in one file."""

    def seek(self, position: int, whence: int = 0, /) -> int: ...

    def read(self, length: int, /) -> bytes: ...

    def __enter__(self) -> OpenedFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


class Storage(Protocol):
    @property
    def location(self) -> str:
        """The folder, or the URL without anything secret: for people, and for whoever opens the log elsewhere."""

    def entries(self, folder: str, after: str = "") -> list[Stored]:
        """Everything below the folder, also in folders of it, ascending; only names greater than `after`."""

    def read(self, name: str) -> bytes:
        """The whole of a file, as it is now."""

    def read_range(self, name: str, position: int, length: int) -> bytes:
        """Bytes of a file that does not change, fewer where it ends."""

    def open(self, name: str) -> OpenedFile:
        """A file that does not change."""

    def versioned(self, name: str) -> tuple[bytes, str] | None:
        """The whole of a file and what `replace` wants to know of it; None if it is not there."""

    def create(self, name: str, data: bytes) -> str | None:
        """Makes a file that is not there yet, and returns its version; None if it is there: nothing is changed then.

        After a lost answer and a second attempt None may mean that the first one succeeded.  So may it for `replace`.
        """

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        """Replaces a file that has not changed since that version was read; None if it has."""

    def write(self, name: str, data: bytes) -> None:
        """Makes or replaces a file, whatever was there."""

    def copy_in(self, name: str, file: Path) -> int:
        """Makes a copy of a local file, and returns its length.  The name is nobody else's: one that is there is it."""

    def delete(self, name: str) -> None:
        """Afterwards the file is not there; it need not have been."""


Location = str | os.PathLike[str] | Storage


def storage_at(location: Location, patience_s: float = PATIENCE_S) -> Storage:
    """What a path, a URL or a storage itself stands for.  `patience_s`: for a store that does not answer."""
    if not isinstance(location, str | os.PathLike):
        return location
    location = os.fspath(location)
    if not is_url(location):
        from pgtide.log.folder import Folder

        return Folder(Path(location))
    if not location.startswith("s3://"):
        raise ConfigurationError(
            f"{location}: a log can be in a folder or on S3.", remedy="Give a folder or s3://bucket/prefix."
        )
    from pgtide.log.s3 import s3_storage

    return s3_storage(location, patience_s)

"""The durable marker on an object store: `control/marker`, replaced only by whoever has seen its last version.

Every version differs from every other (epoch, writer, sequence), so a store's ETag, which may be a hash of the
content, names one version.  A writer that has been replaced finds that out at its next record, at the latest.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace

from pgtide.errors import FencedError, LogCorruptError, TransientError
from pgtide.log.marker import Marker
from pgtide.log.storage import Storage
from pgtide.lsn import format_lsn, parse_lsn

_NAME = "control/marker"


@dataclass(frozen=True, slots=True)
class Held:
    """What the marker says, and who says it."""

    epoch: int
    writer: str
    marker: Marker

    def encode(self) -> bytes:
        content = {
            "epoch": self.epoch,
            "writer": self.writer,
            "sequence": self.marker.sequence,
            "end_offset": self.marker.end_offset,
            "durable_lsn": format_lsn(self.marker.durable_lsn),
            "last_commit_lsn": format_lsn(self.marker.last_commit_lsn),
        }
        return json.dumps(content).encode()


_NOBODY = Held(0, "", Marker())


def read_held(storage: Storage) -> tuple[Held, str | None]:
    """Who holds the marker and what it says; without a version if there is none yet."""
    found = storage.versioned(_NAME)
    if found is None:
        return _NOBODY, None
    try:
        content = json.loads(found[0])
        marker = Marker(
            sequence=content["sequence"],
            end_offset=content["end_offset"],
            durable_lsn=parse_lsn(content["durable_lsn"]),
            last_commit_lsn=parse_lsn(content["last_commit_lsn"]),
        )
        return Held(content["epoch"], content["writer"], marker), found[1]
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorruptError(
            f"{storage.location}/{_NAME}: not a marker: {error}", remedy="restore the object from an earlier version"
        ) from error


class MarkerObject:
    """The marker of the writer that has taken the log."""

    def __init__(self, storage: Storage, held: Held, version: str) -> None:
        self._storage = storage
        self._held = held
        self._version = version

    @property
    def marker(self) -> Marker:
        return self._held.marker

    @property
    def epoch(self) -> int:
        return self._held.epoch

    @property
    def writer(self) -> str:
        return self._held.writer

    @staticmethod
    def take(storage: Storage, after: MarkerObject | None = None) -> MarkerObject:
        """Takes the log: from here on no other writer moves what readers see.

        `after`: what the same process held before; if somebody else has taken the log since, it is theirs.
        """
        while True:
            held, version = read_held(storage)
            if after is not None:
                after._check_still_ours(held)
            taking = Held(held.epoch + 1, uuid.uuid4().hex, replace(held.marker, sequence=held.marker.sequence + 1))
            taken = _put(storage, taking, version)
            if taken is not None:
                return MarkerObject(storage, taking, taken)

    def record(self, marker: Marker) -> None:
        """Moves the marker: readers may read up to here from now on."""
        moved = replace(self._held, marker=replace(marker, sequence=self._held.marker.sequence + 1))
        version = _put(self._storage, moved, self._version)
        if version is None:
            self.check_not_fenced()
            raise TransientError(f"{self._storage.location}/{_NAME} is not as this capture left it: it is read again")
        self._held, self._version = moved, version

    def is_protected(self) -> bool:
        """Whether the store keeps others from replacing the marker: tries to, with what changes nothing."""
        data = self._held.encode()
        return (
            self._storage.create(_NAME, data) is None
            and self._storage.replace(_NAME, data, '"00000000000000000000000000000000"') is None
        )

    def check_not_fenced(self) -> None:
        """Raises once another writer has taken the log."""
        self._check_still_ours(read_held(self._storage)[0])

    def _check_still_ours(self, held: Held) -> None:
        if held.writer != self.writer:
            raise FencedError(
                f"another capture has taken over the log in {self._storage.location}",
                remedy="run one capture per log; this one stops",
            )


def _put(storage: Storage, held: Held, version: str | None) -> str | None:
    """The new version; None if somebody else was faster.  An attempt whose answer was lost is found again."""
    data = held.encode()
    made = storage.create(_NAME, data) if version is None else storage.replace(_NAME, data, version)
    if made is not None:
        return made
    found = storage.versioned(_NAME)
    return found[1] if found is not None and found[0] == data else None

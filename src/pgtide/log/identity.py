"""Who a log belongs to: `log.json`, written before anything else counts."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, replace

from pgtide.errors import LogCorruptError, LogError
from pgtide.log.storage import PATIENCE_S, Location, storage_at
from pgtide.lsn import format_lsn, parse_lsn

FORMAT_VERSION = 1
FILE_NAME = "log.json"


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """What makes a log this log: offsets of another `log_id` mean nothing here."""

    system_identifier: str
    database: str
    timeline: int
    slot: str
    start_lsn: int  # the slot's consistent point: history begins here
    log_id: str = ""
    format_version: int = FORMAT_VERSION


def create_identity(location: Location, identity: LogIdentity) -> LogIdentity:
    """Writes log.json for a new log and gives it an id; a log that is there already is an error."""
    identity = replace(identity, log_id=str(uuid.uuid4()))
    data = asdict(identity) | {"start_lsn": format_lsn(identity.start_lsn)}
    storage = storage_at(location)
    made = storage.create(FILE_NAME, json.dumps(data, indent=1).encode())
    if made is None and read_identity(storage) != identity:
        raise LogError(f"there is a log in {storage.location} already", remedy="use it, or choose another log.path")
    return identity


def has_identity(location: Location, patience_s: float = PATIENCE_S) -> bool:
    """Whether there is a log."""
    return storage_at(location, patience_s).versioned(FILE_NAME) is not None


def read_identity(location: Location, patience_s: float = PATIENCE_S) -> LogIdentity:
    """The identity of an existing log; its absence and an unknown format are errors that say so."""
    storage = storage_at(location, patience_s)
    try:
        data = json.loads(storage.read(FILE_NAME))
    except FileNotFoundError:
        raise LogError(
            f"no change log in {storage.location} (it has no {FILE_NAME})",
            remedy="start the capture first (pgtide run), or check log.path / the option path",
        ) from None
    except ValueError as error:
        raise LogCorruptError(f"{storage.location}/{FILE_NAME}: not JSON any more: {error}") from None
    if data.get("format_version") != FORMAT_VERSION:
        raise LogError(
            f"the log in {storage.location} has format version {data.get('format_version')}; "
            f"this pgtide reads {FORMAT_VERSION}",
            remedy="use the pgtide version that wrote it, or a newer one",
        )
    return LogIdentity(**(data | {"start_lsn": parse_lsn(data["start_lsn"])}))

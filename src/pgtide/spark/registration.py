"""A user's own query as a reader of the log: `readers/<name>.json` says from where on retention must leave the rows."""

from __future__ import annotations

from datetime import UTC, datetime

from pgtide.errors import ConfigurationError
from pgtide.log.reader import LogReader
from pgtide.log.retention import report_reader


def register_reader(log: LogReader, name: str, offset: int) -> None:
    """Everything from `offset` on is still needed."""
    content = {
        "name": name,
        "log_id": log.identity.log_id,
        "offset": offset,
        "updated_at": datetime.now(UTC).isoformat(),
    }
    try:
        report_reader(log.storage, name, content)
    except OSError as error:
        raise ConfigurationError(
            f"pgtide: readerName is {name}, and {log.location}/readers/{name}.json cannot be written: "
            f"{error.strerror or error}.",
            remedy="Let the driver write to that folder, or leave readerName out: retention then does not wait for it.",
        ) from error

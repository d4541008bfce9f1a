"""A user's own query as a reader of the log: `readers/<name>.json` says from where on retention must leave the rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from pgtide.errors import ConfigurationError
from pgtide.log.files import make_directory, replace_durably
from pgtide.log.reader import LogReader


def register_reader(log: LogReader, name: str, offset: int) -> None:
    """Everything from `offset` on is still needed."""
    file = log.path / "readers" / f"{name}.json"
    content = {
        "name": name,
        "log_id": log.identity.log_id,
        "offset": offset,
        "updated_at": datetime.now(UTC).isoformat(),
    }
    try:
        make_directory(file.parent)
        replace_durably(file, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise ConfigurationError(
            f"pgtide: readerName is {name}, and {file} cannot be written: {error.strerror or error}.",
            remedy="Let the driver write to that folder, or leave readerName out: retention then does not wait for it.",
        ) from error

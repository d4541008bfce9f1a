"""The commented pgtide.toml of `pgtide init`, written from the model so that it cannot fall behind it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pgtide.config.model import Config

_HEAD = """\
# Configuration of pgtide.  What is set here are the defaults, but for source.dsn: a line may be left out.
# Environment variables override it, with two underscores between the levels: PGTIDE_SOURCE__DSN.
# Relative paths are relative to this file.
"""


def template() -> str:
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        lines = [f"# {field.description}", f"[{name}]"]
        for key, value in section.model_fields.items():
            # A default that depends on another key would, written down, hold whatever that key becomes.
            comment = "# " if value.json_schema_extra else ""
            lines += [f"# {value.description}", f"{comment}{key} = {_toml(_default(value))}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        assert field.examples, "a required key needs an example"
        return field.examples[0]
    return field.get_default()


def _toml(value: Any) -> str:
    """Strings, numbers and lists of them are written the same in JSON and TOML; tables only as an empty one."""
    if isinstance(value, dict):
        assert not value
        return "{}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)

"""Where values come from (command line, environment, file, default, in this order) and how mistakes are told.

All mistakes are told at once, each with where the value was given, its key, what was found and what was
expected.  Values of `source.dsn` and `spark.conf` are never repeated: they may hold secrets.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pgtide.config.model import Config
from pgtide.errors import ConfigurationError

DEFAULT_FILE = "pgtide.toml"
_PREFIX = "PGTIDE_"
_SHOWN_MAX_CHARACTERS = 60
_SECRET = {("source", "dsn"), ("spark", "conf")}
_INIT_REMEDY = "`pgtide init` writes a commented configuration file to start from."

_TYPE_NAMES = {str: "a string", bool: "a boolean", int: "a whole number", float: "a number", list: "a list"}

# What pydantic's error types mean, in words that go on after "expected".
_EXPECTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list of strings",
    "dict_type": "a table of settings",
    "model_type": "a section",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "something that is not empty",
    "finite_number": "a finite number",
}


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration, or a ConfigurationError that lists every mistake.

    `path`: a file that must exist; None takes pgtide.toml of the current folder, which may be absent if
    environment and overrides give what is needed.  `overrides`: values of the command line by dotted key.
    """
    file = Path(DEFAULT_FILE) if path is None else path
    values, absent = _read(file, may_be_absent=path is None)
    given = _Given(str(file), values)
    given.merge(_from_environment(os.environ))
    given.merge((f"--set {key}", tuple(key.split(".")), value) for key, value in (overrides or {}).items())
    given.values.setdefault("source", {})  # so that the missing key is told, not the missing section
    try:
        return Config.model_validate(given.values).at(file)
    except ValidationError as error:
        mistakes = [given.told(detail) for detail in error.errors(include_url=False)]
    if absent:
        mistakes.insert(0, f"{file}: there is no such file")
    raise ConfigurationError(_listed(mistakes), remedy=_INIT_REMEDY) from None


def _listed(mistakes: list[str]) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    return "\n".join([f"the configuration has {len(mistakes)} mistakes:", *(f"  {mistake}" for mistake in mistakes)])


def _read(file: Path, *, may_be_absent: bool) -> tuple[dict[str, Any], bool]:
    """The file's values, and whether it is absent."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")), False
    except FileNotFoundError:
        if may_be_absent:
            return {}, True
        raise ConfigurationError(f"{file}: there is no such file", remedy=_INIT_REMEDY) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file}: not valid TOML: {error}", remedy="See https://toml.io for it.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file}: not UTF-8 text: byte {error.start}", remedy="Save it as UTF-8.") from None
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}", remedy="Check path and mode.") from None


def _from_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, tuple[str, ...], str]]:
    """PGTIDE_SECTION__KEY; other PGTIDE_ variables have no double underscore."""
    for variable in sorted(environment):
        if variable.startswith(_PREFIX) and "__" in variable:
            yield variable, tuple(variable.removeprefix(_PREFIX).lower().split("__")), environment[variable]


def _model_at(location: Iterable[str | int]) -> type[BaseModel] | None:
    """The section's model that a key leads to, None if it leads to a value or nowhere."""
    model: Any = Config
    for step in location:
        field = model.model_fields.get(step)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return None
        model = field.annotation
    return model  # type: ignore[no-any-return]


def _from_text(key: tuple[str, ...], text: str) -> Any:
    """A value given as text (environment, --set) as the key's type wants it; unchanged if it does not fit."""
    model = _model_at(key[:-1])
    annotation: Any = model.model_fields[key[-1]].annotation if model and key[-1] in model.model_fields else str
    kind = get_origin(annotation) or annotation
    if kind is tuple and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind in (tuple, dict, int, float, bool):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


class _Given:
    """The values merged so far, and who gave each."""

    def __init__(self, file: str, values: dict[str, Any]) -> None:
        self._file = file
        self.values = values
        self._origins: dict[tuple[str | int, ...], str] = {}

    def merge(self, items: Iterable[tuple[str, tuple[str, ...], Any]]) -> None:
        for origin, key, value in items:
            section = self.values
            for step in key[:-1]:
                if not isinstance(section.get(step), dict):
                    section[step] = {}
                section = section[step]
            section[key[-1]] = _from_text(key, value) if isinstance(value, str) else value
            self._origins[key] = origin

    def told(self, detail: ErrorDetails) -> str:
        """One mistake as a sentence: where, which key, what was found, what was expected."""
        location = detail["loc"]
        where = f"{self._origin(location)}: {_dotted(location)}"
        if detail["type"] == "extra_forbidden":
            return f"{where}: unknown key{_did_you_mean(location)}"
        if detail["type"] == "missing":
            return f"{where}: missing, expected {_described(location)}"
        return f"{where}: found {_shown(location, detail['input'])}, expected {_expected(detail)}"

    def _origin(self, location: tuple[str | int, ...]) -> str:
        for length in range(len(location), 0, -1):
            if location[:length] in self._origins:
                return self._origins[location[:length]]
        return self._file


def _dotted(location: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).removeprefix(".")


def _did_you_mean(location: tuple[str | int, ...]) -> str:
    *section, key = location
    model = _model_at(section)
    known = list(model.model_fields) if model else []
    near = difflib.get_close_matches(str(key), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known here: {', '.join(known)}"


def _described(location: tuple[str | int, ...]) -> str:
    model = _model_at(location[:-1])
    assert model is not None
    description = model.model_fields[str(location[-1])].description or "a value"
    return description[:1].lower() + description[1:].removesuffix(".")


def _shown(location: tuple[str | int, ...], value: Any) -> str:
    kind = _TYPE_NAMES.get(type(value), "a section")
    if location[:2] in _SECRET or isinstance(value, dict) or (isinstance(value, str) and "@" in value):
        return kind  # what has an @ may be a URL with a password
    shown = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False, default=str)
    if len(location) == 1 or len(shown) > _SHOWN_MAX_CHARACTERS:  # in place of a section: could be a connection string
        return kind
    return shown


def _expected(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "value_error":
        return str(context["error"])
    if detail["type"] == "literal_error":
        return str(context["expected"]).replace("'", '"')
    return _EXPECTED.get(detail["type"], detail["msg"]).format(**context)

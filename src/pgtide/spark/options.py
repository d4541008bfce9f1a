"""The options of `format("pgtide")`: each is checked when it is given, and a mistake names what is valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pgtide.errors import ConfigurationError
from pgtide.log.reader import LogReader
from pgtide.lsn import parse_lsn

_NAMES = ("path", "table", "startingOffsets", "endingOffsets", "maxRowsPerTrigger", "includePreimage")
_POSITIONS = 'earliest, latest, an offset such as 1200, or an LSN such as "16/B374D848"'


@dataclass(frozen=True, slots=True)
class SourceOptions:
    path: str
    table: str
    starting_offsets: str = "earliest"
    ending_offsets: str = "latest"
    max_rows_per_trigger: int | None = None
    include_preimage: bool = False


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Spark hands option names on in lower case."""
    spelled = {name.lower(): name for name in _NAMES}
    values: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() not in spelled:
            raise ConfigurationError(f"pgtide: unknown option {name}.", remedy=f"Valid options: {', '.join(_NAMES)}.")
        values[spelled[name.lower()]] = value
    for required, example in (("path", "pgtide-data/log"), ("table", "public.orders")):
        if not values.get(required):
            raise ConfigurationError(
                f"pgtide: the option {required} is missing.", remedy=f'Give it: .option("{required}", "{example}").'
            )
    for name in ("startingOffsets", "endingOffsets"):
        if name in values:
            _check_position(name, values[name])
    return SourceOptions(
        path=values["path"],
        table=values["table"],
        starting_offsets=values.get("startingOffsets", "earliest"),
        ending_offsets=values.get("endingOffsets", "latest"),
        max_rows_per_trigger=_rows(values.get("maxRowsPerTrigger")),
        include_preimage=_flag("includePreimage", values.get("includePreimage", "false")),
    )


def resolve_position(reader: LogReader, position: str) -> int:
    """The offset that a value of startingOffsets or endingOffsets stands for now."""
    if position == "earliest":
        return reader.first_offset()
    if position == "latest":
        return reader.end().end_offset
    if "/" in position:
        return reader.position_after(parse_lsn(position))
    return int(position)


def _check_position(name: str, value: str) -> None:
    if value in ("earliest", "latest") or value.isdecimal():
        return
    try:
        parse_lsn(value)
    except ValueError:
        raise ConfigurationError(f"pgtide: {name} is {value!r}.", remedy=f"Valid values: {_POSITIONS}.") from None


def _rows(value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigurationError(f"pgtide: maxRowsPerTrigger is {value!r}.", remedy="Give a number of rows from 1 on.")
    return int(value)


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigurationError(f"pgtide: {name} is {value!r}.", remedy="Valid values: true, false.")
    return value.lower() == "true"

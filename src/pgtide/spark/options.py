"""The options of `format("pgtide")`: each is checked when it is given, and a mistake names what is valid."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pgtide.errors import ConfigurationError
from pgtide.spark.positions import EARLIEST, LATEST, POSITIONS, Position, parse_position
from pgtide.types import TypePolicy

_ENVELOPES = ("changes", "debezium")
_READER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_TYPE_POLICIES = {
    "decimals": ("null", "string", "decimal(p,s)"),
    "infinity": ("clamp", "null", "string"),
    "json": ("string", "variant"),
    "times": ("string", "micros"),
    "arrays": ("null", "string"),
}
_ONLY_IN_BATCHES = ("endingOffsets",)
_ONLY_IN_STREAMS = ("maxRowsPerTrigger", "maxBytesPerTrigger", "readerName")
NAMES = (
    "path",
    "table",
    "envelope",
    "startingOffsets",
    "endingOffsets",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includePreimage",
    "readerName",
    *_TYPE_POLICIES,
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    path: str
    table: str | None = None  # None: all tables
    envelope: str = "changes"
    starting_offsets: Position = EARLIEST
    ending_offsets: Position = LATEST
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_partitions: int = 1
    fail_on_data_loss: bool = True
    include_preimage: bool = False
    reader_name: str | None = None
    policy: TypePolicy = field(default_factory=TypePolicy)
    given: frozenset[str] = frozenset()  # names of the options that were given, whatever their values

    def check_for_batch(self) -> None:
        """An option that would do nothing is refused: whoever gave it counts on it."""
        self._refuse(_ONLY_IN_STREAMS, "belongs to streams (spark.readStream), and this is a batch read")

    def check_for_stream(self) -> None:
        self._refuse(_ONLY_IN_BATCHES, "belongs to batch reads (spark.read); a stream has no end")

    def _refuse(self, names: Sequence[str], why: str) -> None:
        for name in names:
            if name in self.given:
                raise ConfigurationError(f"pgtide: {name} {why}.", remedy=f"Leave {name} out.")


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Spark hands option names on in lower case."""
    values = _spelled(given)
    if not values.get("path"):
        raise ConfigurationError(
            "pgtide: the option path is missing.", remedy='Give it: .option("path", "pgtide-data/log").'
        )
    table, envelope = values.get("table") or None, values.get("envelope", "changes")
    if envelope not in _ENVELOPES:
        raise _invalid("envelope", envelope, ", ".join(_ENVELOPES))
    include_preimage = _flag("includePreimage", values.get("includePreimage", "false"))
    if include_preimage and (table is None or envelope != "changes"):
        raise ConfigurationError(
            "pgtide: includePreimage belongs to typed rows of one table; here `before` has the old row.",
            remedy="Leave includePreimage out, or give a table and no envelope.",
        )
    return SourceOptions(
        path=values["path"],
        table=table,
        envelope=envelope,
        starting_offsets=_position("startingOffsets", values.get("startingOffsets", "earliest")),
        ending_offsets=_position("endingOffsets", values.get("endingOffsets", "latest")),
        max_rows_per_trigger=_count("maxRowsPerTrigger", values.get("maxRowsPerTrigger"), "rows"),
        max_bytes_per_trigger=_count("maxBytesPerTrigger", values.get("maxBytesPerTrigger"), "bytes"),
        min_partitions=_count("minPartitions", values.get("minPartitions"), "partitions") or 1,
        fail_on_data_loss=_flag("failOnDataLoss", values.get("failOnDataLoss", "true")),
        include_preimage=include_preimage,
        reader_name=_reader_name(values.get("readerName")),
        policy=_policy(values),
        given=frozenset(values),
    )


def _spelled(given: Mapping[str, str]) -> dict[str, str]:
    spelled = {name.lower(): name for name in NAMES}
    for name in given:
        if name.lower() not in spelled:
            raise ConfigurationError(f"pgtide: unknown option {name}.", remedy=f"Valid options: {', '.join(NAMES)}.")
    return {spelled[name.lower()]: value for name, value in given.items()}


def _policy(values: Mapping[str, str]) -> TypePolicy:
    chosen: dict[str, Any] = {name: values[name] for name in _TYPE_POLICIES if name in values}
    for name, value in chosen.items():
        valid = _TYPE_POLICIES[name]
        if value not in valid and not (name == "decimals" and value.startswith("decimal(")):
            raise _invalid(name, value, ", ".join(valid))
    try:
        return TypePolicy(**chosen)
    except ValueError as error:
        raise ConfigurationError(f"pgtide: {error}.", remedy="For example: decimal(38,18).") from None


def _position(name: str, value: str) -> Position:
    try:
        return parse_position(value)
    except ValueError:
        raise _invalid(name, value, POSITIONS) from None


def _reader_name(value: str | None) -> str | None:
    if value is None:
        return None
    if not _READER_NAME.fullmatch(value):
        raise _invalid("readerName", value, "letters, digits, and . _ - behind the first, 63 at most")
    if value == "mirror":
        raise ConfigurationError(
            "pgtide: readerName is 'mirror', which is the mirror's own.", remedy="Choose another name."
        )
    return value


def _count(name: str, value: str | None, unit: str) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value) < 1:
        raise ConfigurationError(f"pgtide: {name} is {value!r}.", remedy=f"Give a number of {unit} from 1 on.")
    return int(value)


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise _invalid(name, value, "true, false")
    return value.lower() == "true"


def _invalid(name: str, value: str, valid: str) -> ConfigurationError:
    return ConfigurationError(f"pgtide: {name} is {value!r}.", remedy=f"Valid values: {valid}.")

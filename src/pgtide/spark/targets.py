"""Which lake table mirrors which source table, and what its columns and properties are.

A table's property `pgtide.attnums` says which of its columns is which attribute of the source: a column keeps its
number when it is renamed, and a number is never given twice.  So what has happened between two shapes is worked out,
not guessed, and columns and property change in one commit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.errors import ParseException
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StructField,
    StructType,
    _parse_datatype_string,
)

from pgtide.config import Config, TableOptions
from pgtide.errors import TableError
from pgtide.schema import Column, TableShape
from pgtide.sinks import Alterations, Version
from pgtide.sinks.iceberg_table import RESERVED_COLUMNS, can_be_default, quoted
from pgtide.sinks.merge import DELETED
from pgtide.spark.missing import lake_missing
from pgtide.spark.rows import DEFAULT_POLICY, table_schema

RELATION, RELATION_OID, ATTNUMS = "pgtide.relation", "pgtide.relation_oid", "pgtide.attnums"
SOFT_DELETE = "pgtide.soft_delete"

POINTS_NAMESPACE, POINTS_TABLE = "pgtide", "points"
POINTS = "the points"  # as which they are told apart from tables

# What may be between a mirror column and its attribute, in `pgtide.attnums` under "state"; usually nothing.
_UNFILLED = "unfilled"  # added, and the rows that were there do not have its default yet
_KEPT = "kept"  # gone from the source, still there
_DROPPED = "dropped"  # gone from the source and from the mirror

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")

_WIDER = {("smallint", "int"), ("smallint", "bigint"), ("int", "bigint"), ("float", "double")}


def target_of(config: Config, qualified_name: str) -> str:
    """The quoted identifier of the mirror table of `schema.table`."""
    namespace, _, name = qualified_name.partition(".")
    return quoted(config.mirror.catalog, config.mirror.namespace or namespace, name)


def points_target(config: Config) -> str:
    return quoted(config.mirror.catalog, POINTS_NAMESPACE, POINTS_TABLE)


@dataclass(frozen=True)
class Layout:
    """The columns of a mirror table, what has to happen to the table to have them, and its properties then."""

    live: StructType  # those of the source now
    columns: StructType  # and those it once had, which stay and are null
    properties: dict[str, str]
    alterations: Alterations = field(default_factory=Alterations)
    soft_delete: bool = False  # rows that the source deletes stay, marked in a column of our own
    unfilled: dict[str, pa.Array] = field(default_factory=dict)  # values to give all rows before `properties` hold
    interim: dict[str, str] = field(default_factory=dict)  # the properties until then

    @property
    def stored(self) -> StructType:
        """All columns that the table has."""
        return StructType([*self.columns, *([StructField(DELETED, BooleanType())] if self.soft_delete else [])])

    def columns_for(self, shape: TableShape) -> StructType:
        """Of rows to be written.  Without a key they are found by their values, and only live columns have any."""
        return self.columns if shape.key_columns else self.live


def layout_for(shape: TableShape, version: Version | None, options: TableOptions | None = None) -> Layout:
    """What the table must look like to take rows of this shape; a change that could lose something is an error."""
    live = table_schema(shape)
    _check_names(shape, live)
    known: dict[str, dict[str, str]] = json.loads(version.properties.get(ATTNUMS, "{}")) if version else {}
    if version:
        _check_same_table(shape, version)
    found = _Alterations(shape, version, known)
    for column, wanted in zip(shape.columns, live, strict=True):
        found.has(column, wanted)
    names = {wanted.name.lower() for wanted in live}
    columns = StructType([*live])
    for attnum, then in known.items():
        if attnum not in found.attnums:
            kept = found.lacks(attnum, then, names, drop=options is not None and options.dropped_columns == "drop")
            columns = columns if kept is None else columns.add(kept)
    _check_names(shape, columns)
    same = {RELATION: shape.qualified_name, RELATION_OID: str(shape.relation_oid)}
    soft_delete = _soft_delete(shape, version, options, columns)
    if soft_delete:
        same[SOFT_DELETE] = "true"
        if version and SOFT_DELETE not in version.properties:
            found.defaults[DELETED] = False
    return Layout(
        live,
        columns,
        same | {ATTNUMS: found.recorded(filled=True)},
        Alterations(frozenset(found.dropped), found.renamed, found.widened, found.defaults),
        soft_delete,
        found.unfilled,
        same | {ATTNUMS: found.recorded(filled=False)},
    )


class _Alterations:
    """Collects what has happened to the columns since the table's properties were written."""

    def __init__(self, shape: TableShape, version: Version | None, known: dict[str, dict[str, str]]) -> None:
        self._shape = shape
        self._target = version.target if version else ""
        self._known = known
        self.attnums: dict[str, dict[str, str]] = {}
        self.dropped: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.widened: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.unfilled: dict[str, pa.Array] = {}

    def has(self, column: Column, wanted: StructField) -> None:
        attnum, now = str(column.attnum), {"name": column.name, "type": _text(wanted.dataType)}
        then = self._known.get(attnum)
        self.attnums[attnum] = now
        if then is None:
            # Of a table without any column that is known, nobody knows what its rows are: it has none, or is refused.
            if self._known:
                self._add(column, wanted)
            return
        if then.get("state") in (_KEPT, _DROPPED):
            raise self._error(f"column {column.name} is sent again, and what it was meanwhile is not known")
        if then.get("state") == _UNFILLED:
            self.unfilled[column.name] = lake_missing(column, 1, DEFAULT_POLICY)
        if then["name"] != now["name"]:
            self.renamed[then["name"]] = now["name"]
        # Older versions have noted a type without quotes, whatever the names of its fields are.
        if then["type"] not in (now["type"], wanted.dataType.simpleString()):
            if not _is_wider(then["type"], now["type"]):
                raise self._error(f"column {column.name} was {then['type']} and is {now['type']}")
            self.widened[now["name"]] = wanted.dataType

    def _add(self, column: Column, wanted: StructField) -> None:
        one_row = lake_missing(column, 1, DEFAULT_POLICY)
        value = one_row[0].as_py()
        if value is not None and can_be_default(wanted.dataType, value):
            self.defaults[column.name] = value
        elif value is not None:
            self.unfilled[column.name] = one_row

    def lacks(self, attnum: str, then: dict[str, str], taken: set[str], *, drop: bool) -> StructField | None:
        """A column that the source does not have any more: how it stays in the mirror."""
        if then.get("state") == _DROPPED:
            self.attnums[attnum] = then
            return None
        if drop:
            self.dropped.add(then["name"])
            self.attnums[attnum] = then | {"state": _DROPPED}
            return None
        name, of = then["name"], _parsed(then["type"])
        if of is None:
            raise self._error(
                f"{name}, which the source no longer has, has a type that an older version noted unreadably"
            )
        if name.lower() in taken:  # a newer column has its name now
            name = f"{name}_dropped_{attnum}"
            self.renamed[then["name"]] = name
        self.attnums[attnum] = {"name": name, "type": then["type"], "state": _KEPT}
        return StructField(name, of)

    def recorded(self, *, filled: bool) -> str:
        entries = {
            attnum: entry if filled or entry["name"] not in self.unfilled else entry | {"state": _UNFILLED}
            for attnum, entry in self.attnums.items()
        }
        return json.dumps(entries, sort_keys=True)

    def _error(self, what: str) -> TableError:
        return TableError(
            f"{self._shape.qualified_name}: {what}: the mirror table cannot follow that.",
            remedy=f"Drop the mirror table to load it anew: DROP TABLE {self._target}",
        )


def _is_wider(then: str, now: str) -> bool:
    """Whether every value of the one type is the same value in the other, and Iceberg reads it so."""
    if (then, now) in _WIDER:
        return True
    before, after = _parsed(then), _parsed(now)
    if not isinstance(before, DecimalType) or not isinstance(after, DecimalType):
        return False
    return before.scale == after.scale and before.precision <= after.precision


def _text(of: DataType) -> str:
    """As `simpleString`, in a form that can be read again: names of fields are quoted where they need it."""
    match of:
        case StructType():
            return f"struct<{','.join(f'{_field_name(field.name)}:{_text(field.dataType)}' for field in of.fields)}>"
        case ArrayType():
            return f"array<{_text(of.elementType)}>"
        case MapType():
            return f"map<{_text(of.keyType)},{_text(of.valueType)}>"
    return of.simpleString()


def _field_name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else quoted(name)


def _parsed(text: str) -> DataType | None:
    try:
        return _parse_datatype_string(text)
    except ParseException:
        return None


def _soft_delete(shape: TableShape, version: Version | None, options: TableOptions | None, columns: StructType) -> bool:
    if options is None:  # a load, which writes living rows only
        return version is not None and SOFT_DELETE in version.properties
    wanted = bool(options.soft_delete)
    if version:
        check_soft_delete(shape.qualified_name, version, options)
    if wanted and DELETED in (column.name.lower() for column in columns):
        raise TableError(
            f"{shape.qualified_name} has, or had, a column {DELETED}, which soft deletes add.",
            remedy=f"Rename the column in the source, or set soft_delete = false for {shape.qualified_name}.",
        )
    return wanted


def check_soft_delete(name: str, version: Version, options: TableOptions) -> None:
    """Refuses a table that has soft deletes and is to have none: what is marked would look alive."""
    if not options.soft_delete and SOFT_DELETE in version.properties:
        raise TableError(
            f"{version.target} has soft deletes, and may have rows that are marked as deleted.",
            remedy=f"Set soft_delete = true for {name}, or drop the mirror table to load it anew: "
            f"DROP TABLE {version.target}",
        )


def _check_same_table(shape: TableShape, version: Version) -> None:
    oid = str(shape.relation_oid)
    if version.properties.get(RELATION_OID, oid) != oid:
        raise TableError(
            f"{shape.qualified_name} was dropped and made again in the source: {version.target} mirrors the old table.",
            remedy=f"Drop the mirror table to load it anew: DROP TABLE {version.target}",
        )


def _check_names(shape: TableShape, columns: StructType) -> None:
    seen: set[str] = set()
    for name in (column.name.lower() for column in columns):
        if name in seen:
            raise TableError(
                f"{shape.qualified_name} has, or had, two columns called {name} (case does not count in Spark).",
                remedy="Rename one of them in the source, then drop the mirror table to load it anew.",
            )
        if name in RESERVED_COLUMNS:
            raise TableError(
                f"{shape.qualified_name} has, or had, a column {name}, which is a name of Iceberg's own.",
                remedy="Rename it in the source, or publish the table with a list of columns that leaves it out.",
            )
        seen.add(name)

"""Which lake table mirrors which source table, and what its columns and properties are."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyspark.sql.types import StructField, StructType, _parse_datatype_string

from pgtide.config import Config
from pgtide.errors import TableError
from pgtide.schema import TableShape
from pgtide.sinks import Version
from pgtide.sinks.iceberg_table import quoted
from pgtide.spark.rows import table_schema

RELATION, RELATION_OID, ATTNUMS = "pgtide.relation", "pgtide.relation_oid", "pgtide.attnums"

POINTS_NAMESPACE, POINTS_TABLE = "pgtide", "points"


def target_of(config: Config, qualified_name: str) -> str:
    """The quoted identifier of the mirror table of `schema.table`."""
    namespace, _, name = qualified_name.partition(".")
    return quoted(config.mirror.catalog, config.mirror.namespace or namespace, name)


def points_target(config: Config) -> str:
    return quoted(config.mirror.catalog, POINTS_NAMESPACE, POINTS_TABLE)


@dataclass(frozen=True)
class Layout:
    """The columns of a mirror table: those of the source now, and those it once had, which stay and are null."""

    columns: StructType
    properties: dict[str, str]


def layout_for(shape: TableShape, version: Version | None) -> Layout:
    """What the table must look like to take rows of this shape; a change that could lose something is an error."""
    columns = table_schema(shape)
    _check_names(shape, columns)
    wanted = {
        str(column.attnum): {"name": column.name, "type": field.dataType.simpleString()}
        for column, field in zip(shape.columns, columns, strict=True)
    }
    known = json.loads(version.properties.get(ATTNUMS, "{}")) if version else {}
    oid = str(shape.relation_oid)
    if version and version.properties.get(RELATION_OID, oid) != oid:
        raise TableError(
            f"{shape.qualified_name} was dropped and made again in the source: {version.target} mirrors the old table.",
            remedy=f"Drop the mirror table to load it anew: DROP TABLE {version.target}",
        )
    for attnum, then in known.items():
        now = wanted.get(attnum)
        if now is None:
            columns = StructType([*columns, StructField(then["name"], _parse_datatype_string(then["type"]))])
        elif now != then:
            raise TableError(
                f"{shape.qualified_name}: column {then['name']} {then['type']} became {now['name']} {now['type']}, "
                "which the mirror cannot follow yet.",
                remedy="Drop the mirror table to load it anew.",
            )
    properties = {
        RELATION: shape.qualified_name,
        RELATION_OID: oid,
        ATTNUMS: json.dumps(known | wanted, sort_keys=True),
    }
    _check_names(shape, columns)
    return Layout(columns, properties)


def _check_names(shape: TableShape, columns: StructType) -> None:
    seen: set[str] = set()
    for name in (field.name.lower() for field in columns):
        if name in seen:
            raise TableError(
                f"{shape.qualified_name} has, or had, two columns called {name} (case does not count in Spark).",
                remedy="Rename one of them in the source, then drop the mirror table to load it anew.",
            )
        seen.add(name)

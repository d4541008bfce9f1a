"""Mirror tables in Iceberg: format v3, merge-on-read, every write a compare-and-swap that carries its mark.

A write from version X makes a branch of its own at X, commits on it (the last commit with the mark in its summary), and
fast-forwards main to it.  Iceberg refuses that when main is no longer at X, so what was worked out from X can only ever
be applied to X.  Serializable isolation does not give this: it protects the rows a MERGE reads, not the mark read
before it.  A branch left behind by a killed driver is removed by `sweep`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    IntegerType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

from pgtide.errors import TableError
from pgtide.failpoints import declare, reach
from pgtide.sinks import Changes, Conflict, Mark, Version
from pgtide.sinks.iceberg_table import IcebergTable, is_conflict, quoted
from pgtide.sinks.merge import merge_statement
from pgtide.sinks.multiset import columns_of, multiset_statement, net_rows

_BRANCH_PREFIX = "pgtide_"
_FORWARD_ATTEMPTS = 5

LOG, OFFSET, SHAPE = "pgtide.log", "pgtide.offset", "pgtide.shape"
CHANGES, LOAD, RANGES = "pgtide.changes", "pgtide.load", "pgtide.ranges"

_TABLE_PROPERTIES = {
    "format-version": "3",
    "write.merge.mode": "merge-on-read",
    "write.update.mode": "merge-on-read",
    "write.delete.mode": "merge-on-read",
    # One metadata file per commit would otherwise stay for ever.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}

TABLE_CREATED = declare("mirror.table.created", "a mirror table exists and has no mark yet")
BRANCH_CREATED = declare("mirror.branch.created", "the branch of a write exists and nothing is written to it")
MERGED = declare("mirror.merged", "rows and mark are committed on the branch, main does not have them")
FORWARDED = declare("mirror.forwarded", "main has the rows and the mark")


class IcebergSink:
    """A sink (see `pgtide.sinks`) on whatever Iceberg catalogs the session has.  Targets are quoted identifiers."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def recorded(self, target: str) -> Version | None:
        table = self._load(target)
        return None if table is None else _version(table)

    def create(self, target: str, columns: StructType, properties: dict[str, str]) -> Version:
        namespace = target.rpartition(".")[0]
        self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
        definitions = ", ".join(f"{quoted(field.name)} {field.dataType.simpleString()}" for field in columns)
        listed = ", ".join(f"{_literal(k)} = {_literal(v)}" for k, v in (_TABLE_PROPERTIES | properties).items())
        self._spark.sql(f"CREATE TABLE IF NOT EXISTS {target} ({definitions}) USING iceberg TBLPROPERTIES ({listed})")
        reach(TABLE_CREATED)
        return _version(IcebergTable(self._spark, target))

    def evolve(self, version: Version, columns: StructType, properties: dict[str, str]) -> None:
        present = {field.name for field in self._spark.table(version.target).schema}
        missing = [field for field in columns if field.name not in present]
        if missing:
            added = ", ".join(f"{quoted(field.name)} {field.dataType.simpleString()}" for field in missing)
            self._spark.sql(f"ALTER TABLE {version.target} ADD COLUMNS ({added})")
        if any(version.properties.get(name) != value for name, value in properties.items()):
            IcebergTable(self._spark, version.target).set_properties(properties)

    def upsert(self, version: Version, changes: Changes, mark: Mark) -> Version:
        return self._merge(version, changes.rows, mark, lambda target, view: merge_statement(target, view, changes))

    def recount(self, version: Version, rows: DataFrame, mark: Mark) -> Version:
        columns = columns_of(rows)
        return self._merge(
            version, net_rows(rows), mark, lambda target, view: multiset_statement(target, view, columns)
        )

    def _merge(self, version: Version, rows: DataFrame, mark: Mark, statement: Callable[[str, str], str]) -> Version:
        def merge(table: IcebergTable, branch: str) -> None:
            view = f"pgtide_changes_{secrets.token_hex(8)}"
            rows.createOrReplaceTempView(view)
            try:
                text = statement(_branch_of(version.target, branch), view)
                table.with_summary(_summary(mark), lambda: _discard(self._spark.sql(text)))
            finally:
                self._spark.catalog.dropTempView(view)

        return self._swap(version, mark, merge)

    def replace(self, version: Version, rows: DataFrame | None, mark: Mark) -> Version:
        def overwrite(table: IcebergTable, branch: str) -> None:
            if rows is None:
                table.delete_everything(branch, _summary(mark))
            else:
                writer = rows.writeTo(_branch_of(version.target, branch))
                for name, value in _summary(mark).items():
                    writer = writer.option(f"snapshot-property.{name}", value)
                writer.overwrite(lit(True))

        return self._swap(version, mark, overwrite)

    def append(self, version: Version, rows: DataFrame | None, mark: Mark) -> Version:
        def add(table: IcebergTable, branch: str) -> None:
            if rows is None:
                table.append_nothing(branch, _summary(mark))
            else:
                writer = rows.writeTo(_branch_of(version.target, branch))
                for name, value in _summary(mark).items():
                    writer = writer.option(f"snapshot-property.{name}", value)
                writer.append()

        return self._swap(version, mark, add)

    def sweep(self, target: str) -> None:
        """Removes branches that killed drivers left.  A living one loses its write, and begins again."""
        table = self._load(target)
        for branch in table.branches() if table else ():
            if branch.startswith(_BRANCH_PREFIX):
                table.remove_branch(branch)  # type: ignore[union-attr]

    def _swap(self, version: Version, mark: Mark, write: Callable[[IcebergTable, str], None]) -> Version:
        """The compare-and-swap: branch at the version, write with the mark, forward main, or raise Conflict."""
        table = IcebergTable(self._spark, version.target)
        branch = _BRANCH_PREFIX + secrets.token_hex(8)
        if table.head() != version.snapshot_id:
            raise Conflict(f"{version.target} has moved since its mark was read.")
        if version.snapshot_id is None:
            # A branch needs a snapshot to stand on: the first commit of a table makes it.
            table.append_nothing(branch, {})
        else:
            table.create_branch(branch, version.snapshot_id)
        try:
            reach(BRANCH_CREATED)
            try:
                write(table, branch)
            except (Py4JJavaError, AnalysisException) as error:
                # A catalog of files may miss a table for the moment in which another writer replaces its metadata.
                if is_conflict(error) or _is_missing(error):
                    raise Conflict(f"{version.target}: {str(error).splitlines()[0]}") from error
                raise
            reach(MERGED)
            return self._forward(table, version, branch, mark)
        except BaseException:
            self._abandon(table, branch)
            raise

    def _forward(self, table: IcebergTable, version: Version, branch: str, mark: Mark) -> Version:
        for attempt in range(_FORWARD_ATTEMPTS):
            table.refresh()
            written = table.head(branch)
            if written is None or table.head() != version.snapshot_id:
                raise Conflict(f"{version.target} has moved during the write.")
            summary = next(table.summaries(written))[1]
            assert summary.get(LOG) == mark.log_id, "the commit on the branch does not carry the mark"
            try:
                table.forward(branch)
            except Conflict:
                # Another branch or property was committed meanwhile: main itself may still be where it was.
                if attempt + 1 == _FORWARD_ATTEMPTS:
                    raise
                continue
            reach(FORWARDED)
            # Ranges count only together with those read under the same snapshot.
            same_load = version.mark is not None and version.mark.load == mark.load
            earlier = version.loaded_ranges if same_load else frozenset()
            ranges = earlier | set(mark.ranges) if mark.offset is None else frozenset()
            return replace(version, snapshot_id=written, has_rows=_has_rows(summary), mark=mark, loaded_ranges=ranges)
        raise AssertionError("unreachable")

    def _abandon(self, table: IcebergTable, branch: str) -> None:
        try:
            table.refresh()
            if branch in table.branches():
                table.remove_branch(branch)
        except Exception:  # noqa: BLE001, S110 - the first error is the one to tell; `sweep` removes what stays
            pass

    def _load(self, target: str) -> IcebergTable | None:
        try:
            return IcebergTable(self._spark, target)
        except (Py4JJavaError, AnalysisException) as error:
            if _is_missing(error):
                return None
            raise


def _is_missing(error: Py4JJavaError | AnalysisException) -> bool:
    """Whether the error says that there is no such table."""
    if isinstance(error, AnalysisException):
        return error.getCondition() in {"TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND"}
    return "NoSuchTableException" in str(error) or "NoSuchNamespaceException" in str(error)


def _version(table: IcebergTable) -> Version:
    head = table.head()
    mark: Mark | None = None
    ranges: set[str] = set()
    has_rows = False
    for snapshot_id, summary in table.summaries(head):
        if snapshot_id == head:
            has_rows = _has_rows(summary)
        if LOG not in summary:
            continue
        found = _mark(summary)
        mark = mark or found
        # A loading table's ranges are spread over the commits since its load began; the mark is the newest.
        if mark.offset is not None or found.load != mark.load or found.offset is not None:
            break
        ranges.update(found.ranges)
        if summary.get(RANGES) is None:
            break
    return Version(table.identifier, head, has_rows, mark, frozenset(ranges), table.properties())


def _mark(summary: dict[str, str]) -> Mark:
    return Mark(
        log_id=summary[LOG],
        shape=summary.get(SHAPE, ""),
        offset=int(summary[OFFSET]) if OFFSET in summary else None,
        changes=int(summary.get(CHANGES, "0")),
        load=summary.get(LOAD),
        ranges=tuple(json.loads(summary.get(RANGES, "[]"))),
    )


def _summary(mark: Mark) -> dict[str, str]:
    summary = {LOG: mark.log_id, SHAPE: mark.shape, CHANGES: str(mark.changes)}
    if mark.offset is not None:
        summary[OFFSET] = str(mark.offset)
    if mark.load is not None:
        summary[LOAD] = mark.load
    if mark.ranges:
        summary[RANGES] = json.dumps(mark.ranges)
    return summary


def _has_rows(summary: dict[str, str]) -> bool:
    return summary.get("total-records", "1") != "0"


def _branch_of(target: str, branch: str) -> str:
    return f"{target}.{quoted('branch_' + branch)}"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _discard(_: DataFrame) -> None:
    """A statement such as MERGE has run when `sql` returns; its DataFrame holds nothing to look at."""


def stored_type(of: DataType) -> DataType:
    """The type that Iceberg has for a type of Spark's: it knows no integers of less than four bytes."""
    match of:
        case ShortType() | ByteType():
            return IntegerType()
        case ArrayType():
            return ArrayType(stored_type(of.elementType))
        case MapType():
            return MapType(stored_type(of.keyType), stored_type(of.valueType))
        case StructType():
            return StructType([StructField(field.name, stored_type(field.dataType)) for field in of])
        case _:
            return of


def check_ours(version: Version, log_id: str) -> None:
    """Refuses a table that holds rows we cannot account for."""
    if version.mark is None and version.has_rows:
        raise TableError(
            f"{version.target} has rows but no mark of pgtide, so it is not known what they are.",
            remedy=f"Drop it (DROP TABLE {version.target}) or mirror into another namespace ([mirror] namespace).",
        )
    if version.mark is not None and version.mark.log_id != log_id:
        raise TableError(
            f"{version.target} follows another log ({version.mark.log_id}, this one is {log_id}).",
            remedy=f"Drop it (DROP TABLE {version.target}) to load it anew, or mirror into another namespace.",
        )

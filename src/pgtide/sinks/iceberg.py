"""Mirror tables in Iceberg: format v3, merge-on-read, every write a compare-and-swap that carries its mark.

A write from version X makes a branch of its own at X, commits on it (the last commit with the mark in its summary), and
fast-forwards main to it.  Iceberg refuses that when main is no longer at X, so what was worked out from X can only ever
be applied to X.  Serializable isolation does not give this: it protects the rows a MERGE reads, not the mark read
before it.  A branch left behind by a killed driver is removed by `sweep`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, DataFrameWriterV2, SparkSession
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

from pgtide.failpoints import declare, reach
from pgtide.sinks import Alterations, Changes, Conflict, FileLayout, Mark, Version
from pgtide.sinks.iceberg_files import layout_of_files
from pgtide.sinks.iceberg_marks import (
    BESIDE,
    account,
    base_of,
    check_not_moved,
    has_moved,
    summary_of,
    version_after,
    version_of,
)
from pgtide.sinks.iceberg_table import IcebergTable, create_table, is_conflict, quoted
from pgtide.sinks.merge import (
    DELETE,
    DELETED,
    PREFIX,
    fill_statement,
    keep_statement,
    merge_statement,
    supersede_statement,
)
from pgtide.sinks.multiset import columns_of, marked_rows_lacking, multiset_statement, net_rows
from pgtide.sinks.parquet_file import write_file

_BRANCH_PREFIX = "pgtide_"
_FORWARD_ATTEMPTS = 5
_CREATE_ATTEMPTS = 3

# A table that is compacted cannot be written meanwhile, so a go must end within seconds.
_COMPACT_BYTES = 128 << 20
_COMPACT_FILES_MIN = 5
_NEVER_SPLIT_BYTES = 1 << 50
_EXPIRE_AT_ONCE = 500

_TABLE_PROPERTIES = {
    "format-version": "3",
    "write.merge.mode": "merge-on-read",
    "write.update.mode": "merge-on-read",
    "write.delete.mode": "merge-on-read",
    # One metadata file per commit would otherwise stay for ever.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    # It lists every snapshot that is kept, thousands for a busy table, and is written anew by each commit.
    "write.metadata.compression-codec": "gzip",
    # A file that is not full is rewritten by each compaction: the larger a full one, the longer that takes.
    "write.target-file-size-bytes": str(128 << 20),
}

TABLE_CREATED = declare("mirror.table.created", "a mirror table exists and has no mark yet")
BRANCH_CREATED = declare("mirror.branch.created", "the branch of a write exists and nothing is written to it")
MERGED = declare("mirror.merged", "rows and mark are committed on the branch, main does not have them")
FORWARDED = declare("mirror.forwarded", "main has the rows and the mark")
ALTERING = declare("mirror.altering", "the columns of a table are to be altered, and are not yet")
ALTERED = declare("mirror.altered", "the columns of a table are altered, rows that have them are not written")


class IcebergSink:
    """A sink (see `pgtide.sinks`) on whatever Iceberg catalogs the session has.  Targets are quoted identifiers."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def recorded(self, target: str) -> Version | None:
        table = self._load(target)
        return None if table is None else version_of(table)

    def create(self, target: str, columns: StructType, properties: dict[str, str]) -> Version:
        stored, properties = stored_type(columns), _TABLE_PROPERTIES | properties
        for left in reversed(range(_CREATE_ATTEMPTS)):
            try:
                create_table(self._spark, target, stored, properties)
                break
            except (PySparkException, Py4JJavaError):
                # What another driver makes in the same moment, catalogs in a database tell as errors of any kind.
                if self._load(target) is not None:
                    break
                if not left:
                    raise
        reach(TABLE_CREATED)
        return version_of(IcebergTable(self._spark, target))

    def evolve(
        self, version: Version, columns: StructType, properties: dict[str, str], alterations: Alterations | None = None
    ) -> Version:
        alterations = alterations or Alterations()
        table = IcebergTable(self._spark, version.target)
        found = table.properties()
        if table.head(base_of(version)) != version.snapshot_id or any(
            found.get(name) != version.properties.get(name) for name in properties
        ):
            raise Conflict(f"{version.target} has moved since its mark was read.")
        present = {alterations.renamed.get(name, name) for name in table.columns() - alterations.dropped}
        added = [field for field in columns if field.name not in present]
        altered = added or alterations != Alterations()
        if altered or any(found.get(name) != value for name, value in properties.items()):
            reach(ALTERING)
            table.alter(alterations, added, properties)
            reach(ALTERED)
        return replace(version, properties=found | properties)

    def fill(self, version: Version, values: DataFrame, mark: Mark) -> Version:
        return self._merge(version, values, mark, lambda target, view: fill_statement(target, view, values.columns))

    def upsert(self, version: Version, changes: Changes, mark: Mark) -> Version:
        if self._meets_nothing(version, changes):
            if changes.here is not None:
                return self.append(version, _here_that_stay(changes.here), mark)
            return self.append(version, _rows_that_stay(changes), mark)
        return self._merge(version, changes.rows, mark, lambda target, view: merge_statement(target, view, changes))

    def _meets_nothing(self, version: Version, changes: Changes) -> bool:
        """Whether no row of the version can have a key of these changes: so it is with rows that are new, mostly.

        They can then be appended, which spares reading the table, the join, and the shuffle that a merge needs for its
        deletes.
        """
        if changes.kept or version.snapshot_id is None:
            return False
        table = IcebergTable(self._spark, version.target)
        check_not_moved(table, version)
        return any(
            not table.may_have(base_of(version), column, bounds.lowest, bounds.highest)
            for column, bounds in changes.bounds.items()
        )

    def recount(self, version: Version, rows: DataFrame, mark: Mark, *, soft_delete: bool = False) -> Version:
        columns = columns_of(rows)
        return self._merge(
            version,
            net_rows(rows),
            mark,
            lambda target, view: multiset_statement(target, view, columns, soft_delete=soft_delete),
        )

    def supersede(self, version: Version, rows: DataFrame, key: tuple[str, ...], mark: Mark) -> Version:
        return self._merge(version, rows, mark, lambda target, view: supersede_statement(target, view, rows, key))

    def _merge(self, version: Version, rows: DataFrame, mark: Mark, statement: Callable[[str, str], str]) -> Version:
        return self._swap(version, mark, lambda table, branch: self._merge_into(table, branch, rows, mark, statement))

    def _merge_into(
        self, table: IcebergTable, branch: str, rows: DataFrame, mark: Mark, statement: Callable[[str, str], str]
    ) -> None:
        view = f"pgtide_changes_{secrets.token_hex(8)}"
        rows.createOrReplaceTempView(view)
        try:
            text = statement(_branch_of(table.identifier, branch), view)
            table.with_summary(summary_of(mark), lambda: _discard(self._spark.sql(text)))
        finally:
            self._spark.catalog.dropTempView(view)

    def replace(self, version: Version, rows: DataFrame | None, mark: Mark) -> Version:
        if rows is None:
            return self._swap_at_once(
                version, mark, lambda table, branch: table.delete_everything(branch, summary_of(mark))
            )
        writer = self._writer
        return self._swap(version, mark, lambda _, branch: writer(version, branch, rows, mark).overwrite(lit(True)))

    def append(self, version: Version, rows: DataFrame | pa.Table | None, mark: Mark) -> Version:
        if isinstance(rows, pa.Table):
            return self._append_here(version, rows, mark)
        if rows is None:
            return self._swap_at_once(
                version, mark, lambda table, branch: table.append_nothing(branch, summary_of(mark))
            )
        return self._swap(version, mark, lambda _, branch: self._writer(version, branch, rows, mark).append())

    def _append_here(self, version: Version, rows: pa.Table, mark: Mark) -> Version:
        """Written by this process, where it can be: a job of Spark's costs more than all the rest of a small batch.

        The file stays after a Conflict: of two attempts to commit it, the first may have done it after all.
        """
        layout = self.file_layout(version) if rows.num_rows else None
        path = write_file(rows.to_batches(), layout) if layout else None
        if path is not None:
            return self.append_files(version, [path], mark)
        if not rows.num_rows:
            return self.append(version, None, mark)
        return self._swap(
            version, mark, lambda _, branch: self._writer(version, branch, self._frame(version, rows), mark).append()
        )

    def _frame(self, version: Version, rows: pa.Table) -> DataFrame:
        schema = self._spark.table(version.target).schema
        # In one batch: Spark 4.1 stops reading at an empty one.
        return self._spark.createDataFrame(
            rows.combine_chunks(), StructType([schema[name] for name in rows.column_names])
        )

    def file_layout(self, version: Version) -> FileLayout | None:
        table = IcebergTable(self._spark, version.target)
        if table.is_partitioned_or_sorted() or not table.is_local():
            return None
        return layout_of_files(table.data_folder(), table.schema_with_ids())

    def append_files(self, version: Version, paths: list[str], mark: Mark) -> Version:
        # Before anything else: footers take their time, in which nobody is to get in between.
        files = IcebergTable(self._spark, version.target).data_files(paths)
        return self._swap_at_once(
            version, mark, lambda table, branch: table.append_files(branch, files, summary_of(mark))
        )

    def _writer(self, version: Version, branch: str, rows: DataFrame, mark: Mark) -> DataFrameWriterV2:
        """Columns that the rows do not have are null; rows that are written live."""
        present = set(rows.columns)
        absent = [field for field in self._spark.table(version.target).schema if field.name not in present]
        nothing = {field.name: lit(False if field.name == DELETED else None) for field in absent}
        whole = rows.select("*", *(nothing[field.name].cast(field.dataType).alias(field.name) for field in absent))
        writer = whole.writeTo(_branch_of(version.target, branch))
        for name, value in summary_of(mark).items():
            writer = writer.option(f"snapshot-property.{name}", value)
        return writer

    def begin_beside(self, version: Version, mark: Mark) -> Version:
        assert version.snapshot_id is not None
        table = IcebergTable(self._spark, version.target)
        branch = _BRANCH_PREFIX + secrets.token_hex(8)
        table.create_branch(branch, version.snapshot_id)
        table.delete_everything(branch, summary_of(mark))
        table.refresh()
        table.rename_branch(branch, BESIDE)
        return version_of(table, BESIDE)

    def beside(self, target: str) -> Version | None:
        table = self._load(target)
        return version_of(table, BESIDE) if table is not None and BESIDE in table.branches() else None

    def keep_deleted(self, beside: Version, of: Version, key: tuple[str, ...], columns: StructType) -> Version:
        assert beside.mark is not None
        assert of.snapshot_id is not None
        table = IcebergTable(self._spark, beside.target)
        # A branch has the columns that the table has now, a snapshot those that it had then.
        pinned = _BRANCH_PREFIX + secrets.token_hex(8)
        table.create_branch(pinned, of.snapshot_id)
        try:
            rows = self._spark.table(_branch_of(beside.target, pinned))
            return self._merge(
                beside,
                rows,
                beside.mark,
                lambda target, view: keep_statement(
                    target, view if key else marked_rows_lacking(target, view, columns), key
                ),
            )
        finally:
            self._abandon(table, pinned)

    def take_over(self, beside: Version, now: Version) -> Version:
        table = IcebergTable(self._spark, beside.target)
        if has_moved(table, beside) or table.head() != now.snapshot_id:
            raise Conflict(f"{beside.target}, or what was loaded beside it, has moved.")
        table.put_in_place(BESIDE)
        table.refresh()
        return version_of(table)

    def sweep(self, target: str) -> None:
        """Removes branches that killed drivers left.  A living one loses its write, and begins again."""
        table = self._load(target)
        for branch in table.branches() if table else ():
            if branch.startswith(_BRANCH_PREFIX):
                with suppress(Conflict):  # somebody else sweeps, too
                    table.remove_branch(branch)  # type: ignore[union-attr]

    def compact(self, target: str) -> bool:
        """Puts small files together and leaves deleted rows behind; returns whether there was more than one go holds.

        The commit has no mark: the table holds the same rows as before.  It goes to main itself, where Iceberg refuses
        it if rows of those files were deleted meanwhile; a write that is under way meets a Conflict and begins again.
        """
        table = self._load(target)
        head = table.head() if table else None
        if table is None or head is None:
            return False
        summary = next(table.summaries(head))[1]
        files, length_bytes = int(summary.get("total-data-files", "0")), int(summary.get("total-files-size", "0"))
        if files < _COMPACT_FILES_MIN and summary.get("total-delete-files", "0") == "0":
            return False
        limit = max(_COMPACT_FILES_MIN, _COMPACT_BYTES * files // max(length_bytes, 1))
        options = {
            "min-input-files": str(_COMPACT_FILES_MIN),
            "max-files-to-rewrite": str(limit),
            "max-file-size-bytes": str(_NEVER_SPLIT_BYTES),
        }
        return table.rewrite_files(options) >= limit

    def expire(self, target: str, needed: Collection[int], before: datetime) -> bool:
        """Lets go of snapshots made before then, but for those that are needed or say what the table holds now.

        Files that no other snapshot has go with them.  Returns whether there were more than one go holds.
        """
        table = self._load(target)
        if table is None:
            return False
        stay = {*needed, *table.referenced(), *(snapshot_id for snapshot_id, _ in account(table))}
        stay |= {snapshot_id for snapshot_id, _ in account(table, BESIDE)}
        old = (snapshot_id for snapshot_id, made_at in table.snapshots() if made_at < before)
        going = list(islice((snapshot_id for snapshot_id in old if snapshot_id not in stay), _EXPIRE_AT_ONCE))
        if going:
            table.expire(going)
        return len(going) == _EXPIRE_AT_ONCE

    def _swap(self, version: Version, mark: Mark, write: Callable[[IcebergTable, str], None]) -> Version:
        """The compare-and-swap: branch at the version, write with the mark, forward main, or raise Conflict."""
        table = IcebergTable(self._spark, version.target)
        branch = _branch_at(table, version)
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
        def forward() -> Version:
            table.refresh()
            if table.head(branch) is None or has_moved(table, version):
                raise Conflict(f"{version.target} has moved during the write.")
            now = version_after(table, version, branch, mark)
            table.forward(base_of(version), branch)
            return now

        return _committed(forward)

    def _swap_at_once(self, version: Version, mark: Mark, write: Callable[[IcebergTable, str], None]) -> Version:
        """The same for writes that Spark has no part in: branch, write and forward are one commit, not three."""

        def swap() -> Version:
            table = IcebergTable(self._spark, version.target).transaction()
            branch = _branch_at(table, version)
            write(table, branch)
            now = version_after(table, version, branch, mark)
            table.forward(base_of(version), branch)
            table.commit()
            return now

        return _committed(swap)

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


def _committed(commit: Callable[[], Version]) -> Version:
    """A conflict may be about another branch or a property: main is where it was then, and the next attempt works."""
    for left in reversed(range(_FORWARD_ATTEMPTS)):
        try:
            version = commit()
            break
        except Conflict:
            if not left:
                raise
    reach(FORWARDED)
    return version


def _branch_at(table: IcebergTable, version: Version) -> str:
    """A new branch that stands where the version does; Conflict if the version is no longer the table's."""
    check_not_moved(table, version)
    branch = _BRANCH_PREFIX + secrets.token_hex(8)
    if version.snapshot_id is None:
        # A branch needs a snapshot to stand on: the first commit of a table makes it.
        table.append_nothing(branch, {})
    else:
        table.create_branch(branch, version.snapshot_id)
    return branch


def _rows_that_stay(changes: Changes) -> DataFrame:
    columns = [quoted(name) for name in changes.rows.columns if not name.startswith(PREFIX)]
    return changes.rows.where(f"NOT {quoted(DELETE)}").select(columns)


def _here_that_stay(rows: pa.Table) -> pa.Table:
    columns = [name for name in rows.column_names if not name.startswith(PREFIX)]
    return rows.filter(pc.invert(rows.column(DELETE))).select(columns)


def _is_missing(error: Py4JJavaError | AnalysisException) -> bool:
    """Whether the error says that there is no such table."""
    if isinstance(error, AnalysisException):
        return error.getCondition() in {"TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND"}
    return "NoSuchTableException" in str(error) or "NoSuchNamespaceException" in str(error)


def _branch_of(target: str, branch: str) -> str:
    return f"{target}.{quoted('branch_' + branch)}"


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

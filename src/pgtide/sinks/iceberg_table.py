"""Iceberg's own Java interface, as far as we need it: the one place where py4j objects are handled.

SQL procedures (`fast_forward`, `CREATE BRANCH`) do the same, but each is a query of 100 ms and more where the call
takes 10 to 50 ms, and reading a mark through `<table>.snapshots` would be a Spark job of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from py4j.java_collections import MapConverter
from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException
from pyspark.errors.exceptions.base import PySparkException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession
from pyspark.sql.types import AtomicType, DataType, StructField, StructType, VariantType

from pgtide.sinks import Alterations, Conflict

MAIN = "main"

# Columns that Iceberg gives every table; one with such a name of its own cannot be merged into, or not be read.
RESERVED_COLUMNS = frozenset(
    ("_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number")
)

# What Iceberg throws when the metadata it started from is no longer the table's.  A commit whose outcome is unknown is
# treated the same: beginning again from the recorded mark is right in either case.
_CONFLICTS = (
    "org.apache.iceberg.exceptions.CommitFailedException",
    "org.apache.iceberg.exceptions.CommitStateUnknownException",
    "org.apache.iceberg.exceptions.ValidationException",
)


def quoted(*parts: str) -> str:
    """A multi-part identifier as Spark SQL reads it."""
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


def create_table(spark: SparkSession, identifier: str, columns: DataType, properties: Mapping[str, str]) -> None:
    """Makes the table, and the namespace if need be; raises if there is one.

    SQL would have to be analyzed and planned, for which other tables' loads leave it no processor for seconds.
    """
    jvm = _jvm_with_session(spark)
    gateway: Any = spark.sparkContext._gateway
    found = jvm.org.apache.iceberg.spark.Spark3Util.catalogAndIdentifier(spark._jsparkSession, identifier)
    catalog, name = found.catalog(), found.identifier()
    if not catalog.namespaceExists(name.namespace()):
        catalog.createNamespace(name.namespace(), jvm.java.util.HashMap())
    schema = jvm.org.apache.spark.sql.types.DataType.fromJson(columns.json())
    not_partitioned = gateway.new_array(jvm.org.apache.spark.sql.connector.expressions.Transform, 0)
    catalog.createTable(name, schema, not_partitioned, MapConverter().convert(properties, gateway._gateway_client))


def _jvm_with_session(spark: SparkSession) -> Any:
    """Catalogs are found by the configuration of the thread's active session, and a new thread has none."""
    jvm: Any = spark._jvm
    getattr(jvm, "org.apache.spark.sql.classic.SparkSession").setActiveSession(spark._jsparkSession)
    return jvm


class IcebergTable:
    """A loaded table; `refresh` looks at the catalog again."""

    def __init__(self, spark: SparkSession, identifier: str) -> None:
        self.identifier = identifier
        self._spark = spark
        self._jvm = _jvm_with_session(spark)
        self._table: Any = self._jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(
            spark._jsparkSession, identifier
        )

    def refresh(self) -> None:
        self._table.refresh()

    def transaction(self) -> IcebergTransaction:
        return IcebergTransaction(self)

    def head(self, branch: str = MAIN) -> int | None:
        snapshot = self._table.snapshot(branch)
        return None if snapshot is None else int(snapshot.snapshotId())

    def summaries(self, snapshot_id: int | None) -> Iterator[tuple[int, dict[str, str]]]:
        """This snapshot and its ancestors, newest first, as far as they are kept."""
        while snapshot_id is not None:
            snapshot = self._table.snapshot(snapshot_id)
            if snapshot is None:
                return
            yield snapshot_id, self._texts(snapshot.summary())
            parent = snapshot.parentId()
            snapshot_id = None if parent is None else int(parent)

    def columns(self) -> set[str]:
        return {str(field.name()) for field in self._table.schema().columns()}

    def properties(self) -> dict[str, str]:
        return self._texts(self._table.properties())

    def _texts(self, found: Any) -> dict[str, str]:
        """A map of Java's in one go: entry by entry, each costs several ways to the JVM and back."""
        mapper = self._jvm.com.fasterxml.jackson.databind.ObjectMapper()
        texts: dict[str, str] = json.loads(mapper.writeValueAsString(found))
        return texts

    def alter(self, alterations: Alterations, added: Sequence[StructField], properties: Mapping[str, str]) -> None:
        """Columns and properties in one commit; refuses when the table has changed since it was loaded."""
        transaction = self._table.newTransaction()
        if alterations.dropped:
            update = transaction.updateSchema()
            for name in alterations.dropped:
                update = update.deleteColumn(name)
            _commit(update)
        if alterations.renamed:
            update = transaction.updateSchema()
            for name, new_name in alterations.renamed.items():
                update = update.renameColumn(name, new_name)
            _commit(update)
        update = transaction.updateSchema()
        for name, wider in alterations.widened.items():
            update = update.updateColumn(name, self._type(wider))
        for field in added:
            update = self._added(update, field, alterations.defaults.get(field.name))
        _commit(update)
        update = transaction.updateProperties()
        for name, value in properties.items():
            update.set(name, value)
        _commit(update)
        _commit(transaction, "commitTransaction")

    def _added(self, update: Any, field: StructField, default: Any) -> Any:
        """Rows that are there read the default without being written: their files do not have the column."""
        of = self._type(field.dataType)
        if default is None:
            return update.addColumn(field.name, of)
        # As text, which Iceberg reads by the column's type.
        if isinstance(default, date):
            default = default.isoformat()
        elif isinstance(default, Decimal):
            default = f"{default:f}"
        literal = self._jvm.org.apache.iceberg.expressions.Literal
        return update.addColumn(field.name, of, literal.of(default).to(of))

    def _type(self, of: DataType) -> Any:
        # As a column of a schema: a StructType by itself would be taken for one.
        schema = self._jvm.org.apache.spark.sql.types.DataType.fromJson(StructType([StructField("c", of)]).json())
        return self._jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert(schema).findType("c")

    def branches(self) -> list[str]:
        return [name for name in dict(self._table.refs()) if name != MAIN]

    def create_branch(self, name: str, snapshot_id: int) -> None:
        with _as_conflicts():
            self._references().createBranch(name, snapshot_id).commit()

    def remove_branch(self, name: str) -> None:
        with _as_conflicts():
            self._references().removeBranch(name).commit()

    def rename_branch(self, name: str, new: str) -> None:
        with _as_conflicts():
            self._references().renameBranch(name, new).commit()

    def forward(self, base: str, branch: str) -> None:
        """Moves the base to the branch's head and drops the branch, in one commit; refuses when the base has moved."""
        with _as_conflicts():
            self._references().fastForwardBranch(base, branch).removeBranch(branch).commit()

    def put_in_place(self, branch: str) -> None:
        """Makes main what the branch is, though it does not descend from main, and drops the branch, in one commit."""
        with _as_conflicts():
            self._references().replaceBranch(MAIN, branch).removeBranch(branch).commit()

    def _references(self) -> Any:
        return self._table.manageSnapshots()

    def snapshots(self) -> Iterator[tuple[int, datetime]]:
        """All that are kept and when they were made, the oldest first; also those that main does not descend from."""
        for snapshot in self._table.snapshots():
            made_at_ms = int(snapshot.timestampMillis())
            yield int(snapshot.snapshotId()), datetime.fromtimestamp(made_at_ms / 1000, UTC)

    def referenced(self) -> set[int]:
        """The snapshots that branches and tags stand on."""
        return {int(ref.snapshotId()) for ref in dict(self._table.refs()).values()}

    def expire(self, snapshot_ids: list[int]) -> None:
        """Lets go of exactly these snapshots, and of the files that only they have."""
        # Without a time of its own it would also take all that are older than five days.
        update = self._table.expireSnapshots().expireOlderThan(0)
        for snapshot_id in snapshot_ids:
            update = update.expireSnapshotId(snapshot_id)
        _commit(update)

    def rewrite_files(self, options: dict[str, str]) -> int:
        """Iceberg's compaction; returns how many data files it has replaced."""
        actions = self._jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        rewrite = actions.rewriteDataFiles(self._table)
        for name, value in options.items():
            rewrite = rewrite.option(name, value)
        try:
            return int(rewrite.execute().rewrittenDataFilesCount())
        except Py4JJavaError as error:
            if is_conflict(error):
                raise Conflict(_first_line(error)) from error
            raise

    def may_have(self, branch: str, column: str, lowest: int | str, highest: int | str) -> bool:
        """Whether a file of the branch may hold a row between these, by the statistics of files alone."""
        expressions = self._jvm.org.apache.iceberg.expressions.Expressions
        between = getattr(expressions, "and")(
            expressions.greaterThanOrEqual(column, lowest),
            expressions.lessThanOrEqual(column, highest),
        )
        with _as_conflicts():
            files = self._table.newScan().useRef(branch).filter(between).planFiles()
            try:
                return bool(files.iterator().hasNext())
            finally:
                files.close()

    def append_nothing(self, branch: str, summary: dict[str, str]) -> None:
        """An empty commit that carries the summary; makes the branch if it does not exist."""
        _commit(_with_summary(self._table.newFastAppend().toBranch(branch), summary))

    def schema_with_ids(self) -> dict[str, Any]:
        """The schema with its field ids, in the form that Iceberg's specification gives it as JSON."""
        found: dict[str, Any] = json.loads(self._jvm.org.apache.iceberg.SchemaParser.toJson(self._table.schema()))
        return found

    def is_partitioned_or_sorted(self) -> bool:
        return bool(self._table.spec().isPartitioned() or self._table.sortOrder().isSorted())

    def is_local(self) -> bool:
        """Whether a place without a scheme is on this machine, as Hadoop is set up."""
        configuration = self._spark.sparkContext._jsc.hadoopConfiguration()
        return str(configuration.get("fs.defaultFS", "file:///")).startswith("file:")

    def data_folder(self) -> str:
        """Where the table wants its data files to be."""
        return str(self._table.locationProvider().newDataLocation("name")).removesuffix("/name")

    def data_files(self, paths: list[str]) -> list[Any]:
        """Parquet files that were written for the table, with what their footers tell."""
        iceberg = self._jvm.org.apache.iceberg
        metrics_config = iceberg.MetricsConfig.forTable(self._table)
        found = []
        for path in paths:
            file = self._table.io().newInputFile(path)
            metrics = iceberg.parquet.ParquetUtil.fileMetrics(file, metrics_config)
            builder = iceberg.DataFiles.builder(self._table.spec()).withInputFile(file).withFormat("PARQUET")
            found.append(builder.withMetrics(metrics).build())
        return found

    def append_files(self, branch: str, files: list[Any], summary: dict[str, str]) -> None:
        append = self._table.newAppend().toBranch(branch)
        for file in files:
            append = append.appendFile(file)
        _commit(_with_summary(append, summary))

    def delete_everything(self, branch: str, summary: dict[str, str]) -> None:
        everything = self._jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
        delete = self._table.newDelete().deleteFromRowFilter(everything)
        _commit(_with_summary(delete.toBranch(branch), summary))

    def with_summary(self, summary: dict[str, str], write: Callable[[], None]) -> None:
        """Runs `write` so that the commit it makes carries `summary`.

        The session conf would do the same for one writer, but its key is shared by all threads of the session: in
        parallel writes most marks landed in other tables' commits.  `CommitMetadata` belongs to the thread.
        """
        gateway: Any = self._spark.sparkContext._gateway
        ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
        call = _Callable(write)
        properties = MapConverter().convert(summary, gateway._gateway_client)
        error_class = self._jvm.java.lang.Class.forName("java.lang.RuntimeException")
        self._jvm.org.apache.iceberg.spark.CommitMetadata.withCommitProperties(properties, call, error_class)
        if call.error is not None:
            raise call.error


class IcebergTransaction(IcebergTable):
    """A table whose commits take effect together, when `commit` does; what Spark writes cannot be a part of it."""

    def __init__(self, table: IcebergTable) -> None:
        self.identifier, self._spark, self._jvm = table.identifier, table._spark, table._jvm
        self._transaction = table._table.newTransaction()
        self._table = self._transaction.table()

    def _references(self) -> Any:
        return self._transaction.manageSnapshots()

    def commit(self) -> None:
        """Refuses, if branches were moved, when anything about the table has changed since the transaction began.

        Iceberg would do the rest of the transaction again on what it finds then; what moves branches it cannot.
        """
        _commit(self._transaction, "commitTransaction")


def _with_summary(update: Any, summary: dict[str, str]) -> Any:
    for name, value in summary.items():
        update = update.set(name, value)
    return update


def can_be_default(of: DataType, value: Any) -> bool:
    """Whether Iceberg can have the value as a column's default: nothing nested, nothing that JSON has no number for."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(of, AtomicType) and not isinstance(of, VariantType) and finite


@contextmanager
def _as_conflicts() -> Iterator[None]:
    """What says that the table has moved, as a Conflict: some is said at the commit, some while it is put together."""
    try:
        yield
    except Py4JJavaError as error:
        if is_conflict(error):
            raise Conflict(_first_line(error)) from error
        raise
    except IllegalArgumentException as error:
        # "Cannot fast-forward: main is not an ancestor of …", "Ref does not exist" (another driver cleaned up).
        raise Conflict(str(error).splitlines()[0]) from error


def _commit(update: Any, method: str = "commit") -> None:
    with _as_conflicts():
        getattr(update, method)()


def is_conflict(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that the table has moved."""
    return any(name in _java_text(error) for name in _CONFLICTS)


def _java_text(error: BaseException) -> str:
    if isinstance(error, Py4JJavaError):
        java: Any = error.java_exception
        lines = []
        while java is not None:
            lines.append(str(java.toString()))
            java = java.getCause()
        return "\n".join(lines)
    if isinstance(error, PySparkException):
        return str(error)
    return ""


def _first_line(error: Py4JJavaError) -> str:
    java: Any = error.java_exception
    return str(java.getMessage() or java.toString()).splitlines()[0]


class _Callable:
    """A Python function as java.util.concurrent.Callable; its error is kept, for py4j would flatten it to text."""

    class Java:
        implements = ["java.util.concurrent.Callable"]  # noqa: RUF012 - py4j reads it from here

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.error: BaseException | None = None

    def call(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - handed on to the caller by `with_summary`
            self.error = error

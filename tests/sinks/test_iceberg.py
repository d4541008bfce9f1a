"""The Iceberg sink: a write takes effect at the version it was worked out from, with its mark, or not at all."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from pgtide.errors import TableError
from pgtide.failpoints import FailpointReached
from pgtide.sinks import Alterations, Changes, Conflict, Mark, Version
from pgtide.sinks.bounds import Bounds
from pgtide.sinks.iceberg import BRANCH_CREATED, FORWARDED, MERGED, IcebergSink, stored_type
from pgtide.sinks.iceberg_marks import check_ours
from pgtide.sinks.iceberg_table import MAIN, IcebergTable, quoted
from pgtide.sinks.merge import DELETE, DELETED, LOST_VALUE, keep_name, origin_name
from tests.arming import armed
from tests.waiting import wait_for

COLUMNS = StructType([StructField("id", LongType()), StructField("body", StringType())])


def mark(offset: int | None, **others: object) -> Mark:
    return Mark("log-1", "shape-1", offset, **others)  # type: ignore[arg-type]


@pytest.fixture
def sink(spark: SparkSession) -> IcebergSink:
    return IcebergSink(spark)


@pytest.fixture
def empty(sink: IcebergSink) -> Version:
    return sink.create(quoted("lake", "sinks", f"t_{uuid.uuid4().hex[:12]}"), COLUMNS, {"pgtide.relation": "public.t"})


def changes(spark: SparkSession, *rows: tuple[int, str | None, bool]) -> Changes:
    schema = StructType([*COLUMNS, StructField(DELETE, BooleanType())])
    return Changes(spark.createDataFrame(list(rows), schema), ("id",))


def plain(spark: SparkSession, *rows: tuple[int, str]) -> DataFrame:
    return spark.createDataFrame(list(rows), COLUMNS)


def contents(spark: SparkSession, version: Version) -> dict[int, str]:
    return {row["id"]: row["body"] for row in spark.table(version.target).collect()}


def recorded(sink: IcebergSink, version: Version) -> Version:
    found = sink.recorded(version.target)
    assert found is not None
    return found


def test_table_that_does_not_exist_is_told_apart_from_an_empty_one(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    assert sink.recorded(quoted("lake", "sinks", "nothing")) is None
    assert sink.recorded(quoted("lake", "no such namespace", "nothing")) is None
    assert recorded(sink, empty).mark is None
    assert recorded(sink, empty).properties["pgtide.relation"] == "public.t"
    shown = {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES {empty.target}").collect()}
    assert shown["format-version"] == "3"


def test_table_that_several_make_at_once_is_made_once(sink: IcebergSink) -> None:
    target = quoted("lake", f"new_{uuid.uuid4().hex[:12]}", "a table")
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: sink.create(target, COLUMNS, {"pgtide.relation": "public.t"}), range(4)))
    assert all(version == sink.recorded(target) for version in made)


def test_columns_of_a_new_table_take_nulls_and_names_of_any_kind(spark: SparkSession, sink: IcebergSink) -> None:
    point = StructType([StructField("a b", ShortType(), nullable=False), StructField("`", StringType())])
    columns = StructType(
        [
            StructField("id", LongType(), nullable=False),
            StructField("so many: points", ArrayType(point, containsNull=False)),
        ]
    )
    version = sink.create(quoted("lake", "sinks", f"t {uuid.uuid4().hex[:12]}"), columns, {"pgtide.note": "it's `so`"})
    assert version.properties["pgtide.note"] == "it's `so`"
    sink.append(
        version,
        spark.createDataFrame(
            [(None, [(1, "x"), None])],
            StructType([StructField(field.name, stored_type(field.dataType)) for field in columns]),
        ),
        mark(1),
    )
    (row,) = spark.table(version.target).collect()
    assert (row["id"], row["so many: points"][0]["a b"], row["so many: points"][1]) == (None, 1, None)


def test_table_that_cannot_be_made_says_why(sink: IcebergSink) -> None:
    twice = StructType([StructField("id", LongType()), StructField("id", LongType())])
    with pytest.raises((Py4JJavaError, PySparkException), match="id"):
        sink.create(quoted("lake", "sinks", "never made"), twice, {})
    assert sink.recorded(quoted("lake", "sinks", "never made")) is None


def test_rows_and_mark_are_one_commit(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    begun = sink.append(empty, None, mark(0))
    first = sink.upsert(begun, changes(spark, (1, "a", False), (2, "b", False)), mark(10))
    second = sink.upsert(first, changes(spark, (1, None, True), (2, "B", False), (3, None, True)), mark(20, changes=5))
    assert contents(spark, second) == {2: "B"}
    assert recorded(sink, second).mark == mark(20, changes=5)
    third = sink.replace(second, plain(spark, (7, "g")), mark(30))
    assert contents(spark, third) == {7: "g"}
    fourth = sink.replace(third, None, mark(40))
    assert contents(spark, fourth) == {}
    assert recorded(sink, fourth) == fourth
    assert IcebergTable(spark, empty.target).branches() == []


def test_only_one_of_two_writes_from_one_version_takes_effect(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    begun = sink.append(empty, None, mark(0))

    def write(number: int) -> Version | Conflict:
        try:
            return sink.upsert(begun, changes(spark, (number, "x", False)), mark(number))
        except Conflict as conflict:
            return conflict

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(write, [1, 2, 3]))
    winners = [result for result in results if isinstance(result, Version)]
    assert len(winners) == 1
    assert winners[0].mark is not None
    assert contents(spark, begun) == {winners[0].mark.offset: "x"}
    assert IcebergTable(spark, empty.target).branches() == []


def test_first_write_of_a_new_table_is_compared_too(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    sink.append(empty, plain(spark, (1, "a")), mark(1))
    with pytest.raises(Conflict):
        sink.append(empty, plain(spark, (2, "b")), mark(2))
    assert contents(spark, empty) == {1: "a"}


def test_few_rows_are_written_without_a_job_and_only_from_the_version_they_were_worked_out_from(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    begun = sink.append(empty, None, mark(0))
    rows = pa.table({"id": [1, 2], "body": ["a", None]})
    jobs = len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
    written = sink.append(begun, rows, mark(5))
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup(None)) == jobs
    assert written == sink.recorded(empty.target)
    assert contents(spark, written) == {1: "a", 2: None}
    with pytest.raises(Conflict):
        sink.append(begun, rows, mark(6))
    assert sink.recorded(empty.target) == written


def test_few_new_rows_are_appended_and_those_that_go_again_are_not_there(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    begun = sink.append(empty, pa.table({"id": [1], "body": ["a"]}), mark(0))
    here = pa.table({"id": [2, 3], "body": ["b", None], DELETE: [False, True]})
    frame = spark.createDataFrame(here)
    between = Changes(frame, ("id",), bounds={"id": Bounds(1, 3)}, here=here)
    behind = Changes(frame, ("id",), bounds={"id": Bounds(2, 3)}, here=here)
    for told in (behind, between):
        begun = sink.upsert(begun, told, mark(5))
        assert contents(spark, begun) == {1: "a", 2: "b"}


def test_branch_that_main_has_moved_away_from_is_a_conflict(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    begun = sink.append(empty, None, mark(0))
    assert begun.snapshot_id is not None
    table = IcebergTable(spark, begun.target)
    for name in ("first", "second"):
        table.create_branch(name, begun.snapshot_id)
        table.append_nothing(name, {})
    table.forward(MAIN, "first")
    with pytest.raises(Conflict, match="not an ancestor"):
        table.forward(MAIN, "second")


@pytest.mark.parametrize("is_new", [True, False])
def test_transaction_that_moves_main_is_refused_when_the_table_has_changed_meanwhile(
    spark: SparkSession, sink: IcebergSink, empty: Version, is_new: bool
) -> None:
    begun = empty if is_new else sink.append(empty, None, mark(0))
    transaction = IcebergTable(spark, begun.target).transaction()
    if begun.snapshot_id is not None:
        transaction.create_branch("mine", begun.snapshot_id)
    transaction.append_nothing("mine", {"by": "me"})
    transaction.forward(MAIN, "mine")
    other = sink.append(begun, plain(spark, (1, "another's")), mark(1))
    with pytest.raises(Conflict):
        transaction.commit()
    assert recorded(sink, begun) == other
    assert contents(spark, begun) == {1: "another's"}


def test_only_one_of_two_writes_without_rows_takes_effect(sink: IcebergSink, empty: Version) -> None:
    begun = sink.append(empty, None, mark(0))

    def write(number: int) -> bool:
        try:
            sink.append(begun, None, mark(number))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(write, [1, 2, 3]))
    assert sorted(results) == [False, False, True]
    assert recorded(sink, begun).mark == mark(1 + results.index(True))


def test_mark_is_found_below_commits_of_others(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    written = sink.append(empty, plain(spark, (1, "a")), mark(10))
    spark.sql(f"INSERT INTO {empty.target} VALUES (2, 'by hand')")
    found = recorded(sink, empty)
    assert found.mark == mark(10)
    assert found.snapshot_id != written.snapshot_id


@pytest.mark.parametrize("point", [BRANCH_CREATED, MERGED, FORWARDED])
def test_write_broken_off_is_there_whole_or_not_at_all(
    spark: SparkSession, sink: IcebergSink, empty: Version, point: str
) -> None:
    begun = sink.append(empty, None, mark(0))
    with armed(f"{point}=raise"), pytest.raises(FailpointReached):
        sink.upsert(begun, changes(spark, (1, "a", False)), mark(10))
    found = recorded(sink, begun)
    assert (found.mark, contents(spark, begun)) in [(mark(0), {}), (mark(10), {1: "a"})]
    assert (found.mark == mark(10)) == (point == FORWARDED)
    assert IcebergTable(spark, empty.target).branches() == []


def test_sweep_removes_branches_of_killed_writers_only(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    written = sink.append(empty, plain(spark, (1, "a")), mark(10))
    assert written.snapshot_id is not None
    table = IcebergTable(spark, empty.target)
    table.create_branch("pgtide_0123", written.snapshot_id)
    table.create_branch("audit", written.snapshot_id)
    sink.sweep(empty.target)
    assert IcebergTable(spark, empty.target).branches() == ["audit"]


def test_ranges_of_a_load_add_up_until_it_begins_anew(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    version = sink.replace(empty, None, mark(None, load="S1"))
    version = sink.append(version, plain(spark, (1, "a")), mark(None, load="S1", ranges=("1:0-8",)))
    version = sink.append(version, plain(spark, (2, "b")), mark(None, load="S1", ranges=("1:8-",)))
    assert recorded(sink, version).loaded_ranges == {"1:0-8", "1:8-"}
    version = sink.replace(version, None, mark(None, load="S2"))
    assert version.loaded_ranges == frozenset()
    assert recorded(sink, version).loaded_ranges == frozenset()
    assert contents(spark, version) == {}


def test_kept_value_that_is_nowhere_is_an_error_and_not_a_null(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    begun = sink.append(empty, plain(spark, (1, "large")), mark(0))
    schema = StructType(
        [
            *COLUMNS,
            StructField(DELETE, BooleanType()),
            StructField(keep_name("body"), BooleanType()),
            StructField(origin_name("id"), LongType()),
        ]
    )

    def moved(origin: int) -> Changes:
        return Changes(spark.createDataFrame([(5, None, False, True, origin)], schema), ("id",), ("body",))

    with pytest.raises(Exception, match=LOST_VALUE):
        sink.upsert(begun, moved(99), mark(10))
    assert recorded(sink, begun).mark == mark(0)
    written = sink.upsert(begun, moved(1), mark(10))
    assert contents(spark, written) == {1: "large", 5: "large"}


def test_table_of_unknown_origin_is_refused(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    spark.sql(f"INSERT INTO {empty.target} VALUES (1, 'by hand')")
    with pytest.raises(TableError, match="no mark of pgtide"):
        check_ours(recorded(sink, empty), "log-1")


def test_table_of_another_log_is_refused(sink: IcebergSink, empty: Version) -> None:
    version = sink.append(empty, None, mark(0))
    check_ours(version, "log-1")
    with pytest.raises(TableError, match="another log"):
        check_ours(version, "log-2")


def test_columns_can_be_added_again_and_again(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    wider = StructType([*COLUMNS, StructField("odd `name`", LongType())])
    for _ in range(2):
        sink.evolve(recorded(sink, empty), wider, {"pgtide.attnums": "{}"})
    assert spark.table(empty.target).columns == ["id", "body", "odd `name`"]
    assert recorded(sink, empty).properties["pgtide.attnums"] == "{}"


def test_columns_are_altered_together_and_rows_read_the_defaults(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    wide = StructType([*COLUMNS, StructField("n", IntegerType()), StructField("old", StringType())])
    version = sink.evolve(empty, wide, {})
    version = sink.append(version, spark.createDataFrame([(1, "a", 5, "b")], wide), mark(10))
    alterations = Alterations(
        dropped=frozenset({"old"}),
        renamed={"id": "body", "body": "id"},
        widened={"n": LongType()},
        defaults={"vat": Decimal("1.50"), "old": "anew"},
    )
    columns = StructType(
        [
            StructField("body", LongType()), StructField("id", StringType()), StructField("n", LongType()),
            StructField("vat", DecimalType(6, 2)), StructField("old", StringType()),
        ]
    )  # fmt: skip
    altered = sink.evolve(version, columns, {"pgtide.attnums": "new"}, alterations)
    assert altered.properties["pgtide.attnums"] == "new"
    assert recorded(sink, empty).properties == altered.properties
    assert spark.table(empty.target).collect() == [(1, "a", 5, Decimal("1.50"), "anew")]
    assert spark.table(empty.target).dtypes[2:4] == [("n", "bigint"), ("vat", "decimal(6,2)")]
    then = spark.sql(f"SELECT * FROM {empty.target} VERSION AS OF {version.snapshot_id}")
    assert (then.columns, then.collect()) == (["id", "body", "n", "old"], [(1, "a", 5, "b")])
    filled = sink.fill(altered, spark.createDataFrame([("same", None)], "id string, n bigint"), mark(20))
    assert spark.table(empty.target).collect() == [(1, "same", None, Decimal("1.50"), "anew")]
    assert recorded(sink, empty).mark == filled.mark == mark(20)


def test_altering_from_a_version_that_has_moved_changes_nothing(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    wider = StructType([*COLUMNS, StructField("n", LongType())])
    sink.append(empty, None, mark(1))
    with pytest.raises(Conflict):
        sink.evolve(empty, wider, {"pgtide.attnums": "mine"})
    now = recorded(sink, empty)
    sink.evolve(now, COLUMNS, {"pgtide.attnums": "another's"})
    with pytest.raises(Conflict):
        sink.evolve(now, wider, {"pgtide.attnums": "mine"})
    assert spark.table(empty.target).columns == ["id", "body"]
    assert recorded(sink, empty).properties["pgtide.attnums"] == "another's"


def test_compaction_changes_files_and_neither_rows_nor_mark(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    version = sink.append(empty, None, mark(0))
    for number in range(1, 7):
        version = sink.upsert(version, changes(spark, (number, "a", False), (1, f"b{number}", False)), mark(number))
    before = contents(spark, version), recorded(sink, version).mark
    assert sink.compact(empty.target) is False
    assert (contents(spark, version), recorded(sink, version).mark) == before
    assert spark.table(f"{empty.target}.files").count() == 1
    head = recorded(sink, version).snapshot_id
    assert sink.compact(empty.target) is False
    assert recorded(sink, version).snapshot_id == head, "there was nothing left to do"


def test_compaction_during_a_write_makes_the_write_begin_again(
    spark: SparkSession, sink: IcebergSink, empty: Version, tmp_path: Path
) -> None:
    version = sink.append(empty, None, mark(0))
    for number in range(1, 6):
        version = sink.upsert(version, changes(spark, (number, "a", False)), mark(number))
    with armed(f"{MERGED}=hold:{tmp_path / 'go on'}"), ThreadPoolExecutor(1) as pool:
        writing = pool.submit(sink.upsert, version, changes(spark, (1, "late", False)), mark(6))
        wait_for(lambda: len(IcebergTable(spark, empty.target).branches()) == 1, limit_s=30, what="the branch")
        sink.compact(empty.target)
        (tmp_path / "go on").touch()
        with pytest.raises(Conflict):
            writing.result()
    assert recorded(sink, version).mark == mark(5)
    sink.upsert(recorded(sink, version), changes(spark, (1, "late", False)), mark(6))
    assert contents(spark, version) == {1: "late", 2: "a", 3: "a", 4: "a", 5: "a"}


def test_expiry_keeps_what_is_needed_and_all_that_tells_the_mark(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    version = sink.append(empty, plain(spark, (1, "a")), mark(1))
    kept = sink.upsert(version, changes(spark, (2, "b", False)), mark(2))
    tagged = sink.upsert(kept, changes(spark, (3, "c", False)), mark(3))
    spark.sql(f"ALTER TABLE {empty.target} CREATE TAG audit AS OF VERSION {tagged.snapshot_id}")
    marked = sink.upsert(tagged, changes(spark, (4, "d", False)), mark(4))
    for number in (5, 6):
        spark.sql(f"INSERT INTO {empty.target} VALUES ({number}, 'by hand')")
    table = IcebergTable(spark, empty.target)
    assert marked.snapshot_id is not None
    table.create_branch("pgtide_killed", marked.snapshot_id)
    table.append_nothing("pgtide_killed", {})  # what a killed writer has left
    assert kept.snapshot_id is not None
    now = datetime.now(UTC)

    sink.expire(empty.target, [kept.snapshot_id], now - timedelta(hours=1))
    assert len(list(IcebergTable(spark, empty.target).snapshots())) == 8, "they are too young"
    sink.sweep(empty.target)
    assert sink.expire(empty.target, [kept.snapshot_id], now + timedelta(seconds=1)) is False
    left = [snapshot_id for snapshot_id, _ in IcebergTable(spark, empty.target).snapshots()]
    assert left[:3] == [kept.snapshot_id, tagged.snapshot_id, marked.snapshot_id]
    assert len(left) == 5, "the two commits of others lead from the head to the mark"
    assert recorded(sink, empty).mark == mark(4)
    assert spark.sql(f"SELECT * FROM {empty.target} VERSION AS OF {kept.snapshot_id}").count() == 2
    assert len(contents(spark, empty)) == 6


def test_expiry_keeps_all_ranges_of_an_unfinished_load(spark: SparkSession, sink: IcebergSink, empty: Version) -> None:
    version = sink.replace(empty, None, mark(None, load="S1"))
    version = sink.append(version, plain(spark, (1, "a")), mark(None, load="S1", ranges=("1:0-8",)))
    version = sink.replace(version, None, mark(None, load="S2"))
    for number in range(3):
        version = sink.append(version, plain(spark, (number, "a")), mark(None, load="S2", ranges=(f"1:{number}",)))
    spark.sql(f"INSERT INTO {empty.target} VALUES (9, 'by hand')")
    before = recorded(sink, empty)
    count = len(list(IcebergTable(spark, empty.target).snapshots()))
    sink.expire(empty.target, (), datetime.now(UTC) + timedelta(seconds=1))
    assert recorded(sink, empty) == before
    assert before.loaded_ranges == {"1:0", "1:1", "1:2"}
    assert len(list(IcebergTable(spark, empty.target).snapshots())) < count


def test_state_beside_keeps_deleted_rows_once_and_takes_over_only_from_what_it_was_compared_with(
    spark: SparkSession, sink: IcebergSink, empty: Version
) -> None:
    with_mark = StructType([StructField(DELETED, BooleanType())])
    table = sink.append(empty, plain(spark, (1, "a"), (2, "b"), (3, "c")), mark(5))
    table = sink.evolve(table, with_mark, {}, Alterations(defaults={DELETED: False}))
    table = sink.upsert(table, replace(changes(spark, (1, None, True)), soft_delete=True), mark(6))
    beside = sink.begin_beside(table, mark(None))
    beside = sink.append(beside, plain(spark, (3, "new"), (4, "d")), mark(6))
    for _ in range(2):  # as after a kill
        beside = sink.keep_deleted(beside, table, ("id",), COLUMNS)
    moved = sink.upsert(table, changes(spark, (9, "moved", False)), mark(7))
    with pytest.raises(Conflict):
        sink.take_over(beside, table)
    taken = sink.take_over(beside, moved)
    assert taken.mark == mark(6)
    rows = spark.table(empty.target).collect()
    assert sorted(map(tuple, rows)) == [(1, "a", True), (2, "b", True), (3, "new", False), (4, "d", False)]
    assert IcebergTable(spark, empty.target).branches() == []


def test_state_beside_without_key_keeps_marked_rows_beyond_those_it_has_marked_itself(
    spark: SparkSession, sink: IcebergSink
) -> None:
    """Among them values that are not equal to themselves, and ones of a column that the source has no more."""
    nan = float("nan")
    columns = StructType([StructField("page", StringType()), StructField("ratio", DoubleType())])
    stored = StructType([*columns, StructField("dropped", StringType()), StructField(DELETED, BooleanType())])
    empty = sink.create(quoted("lake", "sinks", f"t_{uuid.uuid4().hex[:12]}"), stored, {"pgtide.relation": "public.t"})
    old = [("a", nan, "x", True), ("a", nan, "x", True), ("b", None, "y", True), ("c", 1.0, "z", False)]
    table = sink.append(empty, spark.createDataFrame(old, stored), mark(5))
    beside = sink.begin_beside(table, mark(None))
    new = [("a", nan, None, True), ("a", nan, None, False), ("d", 1.0, None, False)]
    beside = sink.append(beside, spark.createDataFrame(new, stored), mark(6))
    for _ in range(2):  # as after a kill
        beside = sink.keep_deleted(beside, table, (), columns)
    sink.take_over(beside, table)
    rows = [(row["page"], row["dropped"], row[DELETED]) for row in spark.table(empty.target).collect()]
    assert sorted(rows, key=str) == sorted(
        [("a", None, False), ("a", None, True), ("a", "x", True), ("b", "y", True), ("d", None, False)], key=str
    )

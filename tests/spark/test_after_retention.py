"""A mirror that starts when retention has taken what it has long applied, and what it never needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from pgtide.change import TRANSACTIONS, Committed, LargeTransaction, Op, TableRows, TransactionKind
from pgtide.errors import LogRangeError
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.spark.conftest import Mirrored, mirrored_in
from tests.spark.logs import Change, committed, insert, model, stored, table_shape

BUSY = table_shape()
QUIET = table_shape("quiet", oid=16500)


@pytest.fixture
def mirrored(spark: SparkSession, tmp_path: Path) -> Iterator[Mirrored]:
    """With a segment for each transaction."""
    with mirrored_in(tmp_path, spark, segment_bytes=1) as opened:
        yield opened


def reads(*changes: Change) -> Committed:
    piece = committed(changes, 250)
    index = TRANSACTIONS.get_field_index("kind")
    kind = pa.array([int(TransactionKind.READ)], pa.uint8())
    return Committed(piece.transactions.set_column(index, TRANSACTIONS.field(index), kind), piece.tables)


def test_table_that_has_been_quiet_is_as_it_was(mirrored: Mirrored) -> None:
    log = mirrored.log
    first = insert(QUIET, id=1, body="quiet")
    log.commit(first)
    mirrored.run()
    mark = mirrored.mark(QUIET)
    # Rows for other readers behind the table's mark: no harm in losing those either.
    log.writer.write([reads(Change(QUIET, Op.TRUNCATE), Change(QUIET, Op.READ, {"id": 1, "body": "quiet"}))])
    changes = [insert(BUSY, id=number) for number in range(5)]
    for number, change in enumerate(changes[:4]):
        log.writer.write([committed([change], 300 + 100 * number)])
    mirrored.run()
    removal = plan_removal(log.path, retention_s=0, max_bytes=0)
    remove(log.path, removal)
    assert removal.end_offset > 3
    with pytest.raises(LogRangeError):
        LogReader(log.path).plan(mark or 0, log.writer.end_offset, QUIET.relation_oid)
    log.writer.write([committed(changes[4:], 1000)])
    mirrored.run()
    assert mirrored.rows(QUIET) == model(QUIET, [first])
    assert mirrored.rows(BUSY) == model(BUSY, changes)
    assert mirrored.mark(QUIET) == mark


def test_table_whose_changes_are_gone_is_parked_with_its_remedy_and_the_others_go_on(mirrored: Mirrored) -> None:
    log = mirrored.log
    first = insert(QUIET, id=1, body="quiet")
    log.commit(first)
    changes = [insert(BUSY, id=number) for number in range(3)]
    log.commit(changes[0])
    mirrored.run()
    log.commit(insert(QUIET, id=2, body="never seen"))
    log.commit(*changes[1:])
    removal = plan_removal(log.path, retention_s=0, max_bytes=1)  # all but the segment that is being written
    remove(log.path, removal)
    assert removal.end_offset == log.writer.end_offset - 2
    mirrored.run(parked=["public.quiet"])
    error = mirrored.progress()["tables"]["public.quiet"]["error"]
    assert "no longer in the log" in error
    assert "pgtide snapshot start public.quiet --type bulk" in error
    assert mirrored.rows(QUIET) == model(QUIET, [first])
    assert mirrored.rows(BUSY) == model(BUSY, changes)


def rolled_back_and_committed(spool: Path, gone: Change, kept: Change) -> LargeTransaction:
    """A transaction too large for memory, whose first change was rolled back with its savepoint."""
    buffer = TransactionBuffer(Spool(spool), memory_bytes=1)
    buffer.begin(7)
    for place, (subxid, change) in enumerate([(9, gone), (7, kept)]):
        rows = TableRows(change.shape, stored(change.shape, [(place, change)]))
        buffer.append(7, np.array([subxid], np.uint32), [rows])
    buffer.abort(7, 9)
    large = buffer.commit(7, Commit(390, 400, 1))
    assert isinstance(large, LargeTransaction)
    return large


def test_table_of_which_only_a_rolled_back_savepoint_was_removed_is_not_parked(
    mirrored: Mirrored, tmp_path: Path
) -> None:
    log = mirrored.log
    first, changes = insert(QUIET, id=1), [insert(BUSY, id=number) for number in range(3)]
    log.commit(first, changes[0])
    mirrored.run()
    log.writer.write_large(rolled_back_and_committed(tmp_path / "spool", insert(QUIET, id=2), changes[1]))
    mirrored.run()
    log.writer.write([committed([changes[2]], 500)])
    remove(log.path, plan_removal(log.path, retention_s=0, max_bytes=1))
    mirrored.run()
    assert mirrored.rows(QUIET) == model(QUIET, [first])
    assert mirrored.rows(BUSY) == model(BUSY, changes)


def test_table_whose_mirror_is_dropped_does_not_begin_empty_where_retention_has_taken_its_changes(
    mirrored: Mirrored,
) -> None:
    log = mirrored.log
    log.commit(insert(QUIET, id=1))
    log.commit(insert(BUSY, id=1))
    mirrored.run()
    log.commit(insert(QUIET, id=2))
    log.commit(insert(BUSY, id=2))
    mirrored.run()
    remove(log.path, plan_removal(log.path, retention_s=0, max_bytes=1))
    mirrored.spark.sql(f"DROP TABLE {mirrored.target(QUIET)}")
    mirrored.run(parked=["public.quiet"])
    assert "pgtide snapshot start public.quiet --type bulk" in mirrored.progress()["tables"]["public.quiet"]["error"]
    new = table_shape("new", oid=16600)
    log.commit(insert(QUIET, id=3), insert(new, id=1))
    mirrored.run(parked=["public.quiet"])
    assert mirrored.rows(QUIET) == {}
    assert list(mirrored.rows(new)) == [(1,)], "a table of which nothing is gone begins"

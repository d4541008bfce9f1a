"""With soft deletes, rows that the source has no more come along when their table is loaded anew.

A load reads rows that live.  So before what was loaded beside a table takes over, it gets those of the table's rows
that it lacks, marked: they were deleted before, or while the table was away.  That joins the table with itself, and is
done in a thread of its own, so that no batch waits; then what is beside catches up again, and takes over.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pyspark.sql import SparkSession

from pgtide.failpoints import declare, reach
from pgtide.schema import TableShape
from pgtide.sinks import Conflict, Sink, Version
from pgtide.spark.apply import JOB_TAG, MirrorTable
from pgtide.spark.publisher import is_streaming
from pgtide.spark.rows import table_schema
from pgtide.spark.targets import SOFT_DELETE

_ATTEMPTS_MAX = 10  # batches write to the same table meanwhile

DELETED_KEPT = declare("load.deleted.kept", "what is beside a table has its deleted rows, and has not taken over")


@dataclass(frozen=True, slots=True)
class _Kept:
    shadow: MirrorTable
    of: Version  # the table's rows that came along
    is_level: bool  # they had all changes that the state beside had: what has come since has come to both
    work: Future[None]


class DeletedRows:
    """Used by the thread that runs a batch, or that has the lock of batches."""

    def __init__(self, spark: SparkSession, sink: Sink) -> None:
        self._spark = spark
        self._sink = sink
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pgtide-deleted-rows")
        self._kept: dict[str, _Kept] = {}

    def are_coming(self, shadow: MirrorTable) -> bool:
        """Whether they are being written: until then nobody else may write to the state beside.  Raises what failed."""
        kept = self._of(shadow)
        if kept is None or not kept.work.done():
            return kept is not None
        if kept.work.exception() is not None:
            del self._kept[shadow.target]
        kept.work.result()
        return False

    def have_come(self, shadow: MirrorTable, shape: TableShape, now: Version) -> bool:
        """Whether the state beside may take the place of what the table is now; has the rows written if it lacks any.

        The state beside has caught up.
        """
        assert shadow.version is not None
        assert shadow.beside_of is not None
        if SOFT_DELETE not in shadow.version.properties:
            return True
        kept = self._of(shadow)
        if kept is not None and (kept.is_level or kept.of.snapshot_id == now.snapshot_id):
            del self._kept[shadow.target]
            return True
        is_level = is_streaming(shadow.beside_of) and shadow.beside_of.clean_to >= shadow.clean_to
        work = self._pool.submit(self._keep, shadow, shape, now)
        self._kept[shadow.target] = _Kept(shadow, now, is_level, work)
        return False

    def end(self, stop: threading.Event) -> None:
        self._pool.shutdown(wait=stop.is_set(), cancel_futures=True)

    def _of(self, shadow: MirrorTable) -> _Kept | None:
        kept = self._kept.get(shadow.target)
        return kept if kept is not None and kept.shadow is shadow else None

    def _keep(self, shadow: MirrorTable, shape: TableShape, of: Version) -> None:
        self._spark.addTag(JOB_TAG)
        key, columns = tuple(column.name for column in shape.key_columns), table_schema(shape)
        assert shadow.version is not None
        for left in reversed(range(_ATTEMPTS_MAX)):
            try:
                shadow.version = self._sink.keep_deleted(shadow.version, of, key, columns)
                break
            except Conflict:
                if not left:
                    raise
        reach(DELETED_KEPT)

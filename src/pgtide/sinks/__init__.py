"""The contract of a sink: how a batch becomes a lake table, exactly once.

A table's commits carry a **mark**: which log it follows, the offset up to which its changes are applied (exclusive),
and the shape they had.  The mark is in the same commit as the rows, so the two can never disagree, and it is the only
thing that is trusted: no checkpoint, no file beside the table.

    version = sink.recorded(target)        # the table's head, and the newest mark at or below it
    …work out what lies between version.mark.offset and `to`…
    sink.upsert(version, rows, mark)       # compare-and-swap: only if the head is still `version`

Every write names the version it was worked out from and takes effect only if the table is still there; otherwise it
raises `Conflict`, having changed nothing, and the caller begins again from `recorded`.  So a repeat after a crash finds
its own mark and has nothing to do, and of two writers one wins and the other sees what the first one did.

A sink knows nothing of Postgres or of the log.  Rows come as DataFrames whose columns are the table's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructType

from pgtide.errors import TransientError
from pgtide.sinks.bounds import Bounds


class Conflict(TransientError):
    """The table moved on between reading its mark and writing: begin again from `recorded`."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a commit says about itself."""

    log_id: str
    shape: str  # fingerprint of the shape whose columns the table has
    offset: int | None = None  # applied up to here, exclusive; None while the table is loading
    changes: int = 0  # how many changes were applied since the table began, for people
    load: str | None = None  # the database snapshot and LSN that the first load reads under
    ranges: tuple[str, ...] = ()  # loading: the ranges that this commit finished


@dataclass(frozen=True, slots=True)
class Version:
    """A table at one version, and what its history says up to there."""

    target: str
    snapshot_id: int | None  # None: nothing was ever written to it
    has_rows: bool  # may be true for a table whose rows were all deleted, never false for one with rows
    mark: Mark | None  # without its ranges; None: nobody marked it
    loaded_ranges: frozenset[str] = frozenset()  # loading: all ranges finished so far
    properties: dict[str, str] = field(default_factory=dict)
    rows: int = 0  # at least so many, as far as the table itself counts them; for people
    beside: bool = False  # a state that readers do not see yet; see `begin_beside`


@dataclass(frozen=True, slots=True)
class Changes:
    """At most one row per key: the table's columns, `_delete`, and what is to be taken from the target.

    `kept` are columns that some rows leave as they are: such a row has `_keep.<column>` true, and its value is that
    of the target row whose key is in the row's `_origin.<key column>` columns (the key the row had before the batch).

    `bounds`, where they are known, tell for columns of the key what values it has in all rows, origins included.
    """

    rows: DataFrame
    key: tuple[str, ...]
    kept: tuple[str, ...] = ()
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    soft_delete: bool = False  # rows that go stay, with `_is_deleted` true; a row that comes again has it false
    here: pa.Table | None = None  # the rows once more, if they are few: in the driver's memory


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What Parquet files must be to become a part of the table: where, and with which columns and field ids."""

    folder: str  # a path on this machine
    location: str  # the same folder as the table names it
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Alterations:
    """What has happened to a table's columns besides new ones; names as they were before, but for those in `defaults`.

    They take effect in this order: dropped, renamed (all at once: two may swap names), widened, added with a default.
    """

    dropped: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    widened: Mapping[str, DataType] = field(default_factory=dict)  # by the new name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # new column → what rows have that are there already


class Sink(Protocol):
    def recorded(self, target: str) -> Version | None:
        """The table as it is now; None when there is none."""

    def create(self, target: str, columns: StructType, properties: dict[str, str]) -> Version:
        """Makes an empty table without a mark, unless it exists."""

    def evolve(
        self, version: Version, columns: StructType, properties: dict[str, str], alterations: Alterations | None = None
    ) -> Version:
        """Adds columns that are missing, alters others, sets properties: all of it at once or nothing.

        A compare-and-swap as well: what the alterations were worked out from is in the version's properties.
        """

    def fill(self, version: Version, values: DataFrame, mark: Mark) -> Version:
        """Gives all rows the values of this one row, in its columns."""

    def upsert(self, version: Version, changes: Changes, mark: Mark) -> Version:
        """Writes and deletes rows by key."""

    def recount(self, version: Version, rows: DataFrame, mark: Mark, *, soft_delete: bool = False) -> Version:
        """Makes rows of a table without key come and go: the table's columns and `multiset.SIGN`."""

    def replace(self, version: Version, rows: DataFrame | None, mark: Mark) -> Version:
        """Makes the table consist of these rows alone; of none, when there are none."""

    def supersede(self, version: Version, rows: DataFrame, key: tuple[str, ...], mark: Mark) -> Version:
        """With soft deletes: makes these rows alone live, and marks all others as deleted."""

    def append(self, version: Version, rows: DataFrame | pa.Table | None, mark: Mark) -> Version:
        """Adds rows, of this process's memory if they are few; without rows it only sets the mark."""

    def file_layout(self, version: Version) -> FileLayout | None:
        """How files for `append_files` are written; None if rows can only come by `append`."""

    def append_files(self, version: Version, paths: list[str], mark: Mark) -> Version:
        """Adds the rows of files that were written as `file_layout` says."""

    def begin_beside(self, version: Version, mark: Mark) -> Version:
        """An empty state of the table beside the one that readers see, to be filled by writes to what is returned."""

    def beside(self, target: str) -> Version | None:
        """The state beside, if there is one."""

    def keep_deleted(self, beside: Version, of: Version, key: tuple[str, ...], columns: StructType) -> Version:
        """With soft deletes: the state beside gets what it lacks of the table's rows, marked as deleted.

        Rows whose key it does not have; without a key those that are marked, as far as it has no equal ones that are,
        in these columns.  Done again it changes nothing.
        """

    def take_over(self, beside: Version, now: Version) -> Version:
        """Makes the state beside what readers see, at once, instead of what they see now."""

    def sweep(self, target: str) -> None:
        """Removes what killed writers left unfinished."""

    def compact(self, target: str) -> bool:
        """Makes the table quick to read again, in a bounded go; returns whether more is left.  Changes no row."""

    def expire(self, target: str, needed: Collection[int], before: datetime) -> bool:
        """Lets go of versions made before then; never of one that is needed, nor of what `recorded` must find.

        A bounded go; returns whether more is left.
        """


__all__ = ["Alterations", "Changes", "Conflict", "FileLayout", "Mark", "Sink", "Version"]

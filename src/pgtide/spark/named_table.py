"""Which changes belong to a table that is read by its name.

Mostly one relation has had the name: all its changes are the table's, also those under a name it had before.  A table
that was dropped and created again, or swapped by renames, has been several relations: then a change belongs to it if
its relation had the name when it was made.  A block's directory names the shape of its rows, and the shape has the
table's name: to plan a range nothing else is read, but each shape once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgtide.errors import ConfigurationError, LogRangeError, TableError
from pgtide.log.control import removed
from pgtide.log.reader import LogReader, Slice
from pgtide.schema import TableShape
from pgtide.spark.positions import LATEST, Position, resolve_position


class NamedTable:
    """A table of the log, and `shape`, as which its changes are read.  Learns what comes up while it plans."""

    def __init__(self, reader: LogReader, name: str, ending: Position = LATEST) -> None:
        self.name = name
        self._has_name: dict[tuple[int, str], bool] = {}  # by relation and fingerprint
        self._relation_oids: set[int] = set()  # of those that have had the name
        shapes = reader.every_shape()
        self._learn(shapes)
        self._known_at_first = frozenset(self._relation_oids)
        present = reader.shapes(shapes)
        shape = self._shape_at_end(reader, ending) or present.get(name)
        if shape is None:
            raise ConfigurationError(
                f"pgtide: the log in {reader.location} has no table {name}.",
                remedy=f"Tables in it: {', '.join(sorted(present)) or 'none yet'}.",
            )
        self.shape = shape

    def _shape_at_end(self, reader: LogReader, ending: Position) -> TableShape | None:
        """The shape of the last change of a range that ends before the log does."""
        if ending == LATEST or not self._relation_oids:
            return None
        try:
            end = resolve_position(reader, "endingOffsets", ending)
            newest = reader.newest(end, lambda piece: self._has_seen(piece) and self._owns(piece))
        except LogRangeError:
            return None  # to be told, or passed over, when the range is planned
        return None if newest is None else reader.shape(newest.relation_oid, newest.entry.fingerprint)

    def has_lost_changes(self, reader: LogReader) -> bool:
        """Whether retention took any of its changes."""
        self._learn(reader.every_shape())
        taken = removed(reader.storage)
        return any(taken.last_offset(relation_oid, reads=True) >= 0 for relation_oid in self._relation_oids)

    def plan(self, reader: LogReader, start: int, end: int) -> list[Slice]:
        """Where its changes with start <= offset < end are; TableError if they cannot be read as `shape`."""
        if start < reader.look().first_offset:
            self._learn(reader.every_shape())  # of what retention took, nothing is seen in blocks
        pieces = reader.plan_around(start, end, self._relation_oids)
        for piece in pieces:
            if not self._has_seen(piece):
                self._learn([reader.shape(*_key(piece))])
        mine = [piece for piece in pieces if self._owns(piece)]
        self._check_others(reader, start, mine)
        return mine

    def _learn(self, shapes: Iterable[TableShape]) -> None:
        for shape in shapes:
            named = shape.qualified_name == self.name
            self._has_name[shape.relation_oid, shape.fingerprint] = named
            if named:
                self._relation_oids.add(shape.relation_oid)

    def _has_seen(self, piece: Slice) -> bool:
        return _key(piece) in self._has_name

    def _owns(self, piece: Slice) -> bool:
        if len(self._relation_oids) == 1:
            return piece.relation_oid in self._relation_oids
        return self._has_name[_key(piece)]

    def _check_others(self, reader: LogReader, start: int, pieces: Sequence[Slice]) -> None:
        """Columns of another relation are found by their names: whether that makes sense."""
        columns = {column.name for column in self.shape.columns}
        for key in {_key(piece) for piece in pieces if piece.relation_oid != self.shape.relation_oid}:
            found = {column.name for column in reader.shape(*key).columns}
            offsets = [piece.entry for piece in pieces if _key(piece) == key]
            if key[0] not in self._known_at_first and not found <= columns:
                raise TableError(
                    f"{self.name} is another table from offset {offsets[0].first_offset} on, created again or renamed "
                    f"to this name, with columns that this query does not have: {', '.join(sorted(found - columns))}.",
                    remedy="Start the query again, a stream with the same checkpointLocation: it then has the present "
                    "table's columns and goes on where it ended; no change is lost.",
                )
            if not found & columns:
                behind = offsets[-1].last_offset + 1
                raise TableError(
                    f"{self.name} was another table up to offset {behind}, with none of the columns that it has now.",
                    remedy=f'Read the changes before as a batch: .option("startingOffsets", "{start}")'
                    f'.option("endingOffsets", "{behind}"); then those of the present table with "startingOffsets", '
                    f'"{behind}", in a stream with a new checkpointLocation.',
                )


def _key(piece: Slice) -> tuple[int, str]:
    return piece.relation_oid, piece.entry.fingerprint

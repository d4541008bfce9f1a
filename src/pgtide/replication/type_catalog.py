"""Types as columns use them, resolved from pg_type down to elements, base types, subtypes and fields.

All types of many columns are loaded together, one statement per level of nesting.  Built-in types never change
and are kept; a user's types are asked for again each time, because ALTER TYPE changes them under the same oid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pgtide.replication.connect import Connection, postgres_errors
from pgtide.types import Kind, PgType

_FIRST_USER_OID = 16384  # FirstNormalObjectId in transam.h

_KINDS: dict[str, Kind] = {
    "e": "enum", "d": "domain", "c": "composite", "r": "range", "m": "multirange",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of pg_type with what it refers to."""

    name: str
    kind: Kind
    element: int  # array: element, domain: base type, range: subtype, multirange: range; else 0
    element_typmod: int
    dimensions: int  # domain over an array
    fields: tuple[tuple[str, int, int, int], ...]  # composite: name, type oid, typmod, dimensions

    @property
    def refers_to(self) -> set[int]:
        return {oid for oid in (self.element, *(type_oid for _, type_oid, _, _ in self.fields)) if oid}


class TypeCatalog:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._entries: dict[int, _Entry] = {}

    def load(self, oids: Iterable[int]) -> None:
        """Reads these types and all they refer to; `resolve` then answers for them without asking the server."""
        self._entries = {oid: entry for oid, entry in self._entries.items() if oid < _FIRST_USER_OID}
        asked: set[int] = set()
        while wanted := set(oids) - self._entries.keys() - asked:
            asked |= wanted
            found = self._read(wanted)
            self._entries.update(found)
            oids = {oid for entry in found.values() for oid in entry.refers_to}

    def resolve(self, oid: int, typmod: int = -1, dimensions: int = 0) -> PgType:
        """The type as a column with this modifier and attndims uses it; a type that is gone is `unknown`."""
        entry = self._entries.get(oid)
        if entry is None:
            return PgType(oid, "unknown")  # its text is understood, its binary form would not be
        if entry.kind == "array":
            return PgType(oid, entry.name, "array", typmod, self.resolve(entry.element, typmod), max(1, dimensions))
        element = None
        if entry.element:
            element = self.resolve(entry.element, entry.element_typmod, entry.dimensions)
        fields = tuple((name, self.resolve(*field)) for name, *field in entry.fields)
        return PgType(oid, entry.name, entry.kind, typmod, element, 1, fields)

    def _read(self, oids: set[int]) -> dict[int, _Entry]:
        with postgres_errors("reading types from the catalog"):
            rows = self._connection.execute(_TYPES, {"oids": list(oids)}).fetchall()
        return {
            oid: _Entry(name, "array" if is_array else _KINDS.get(typtype, "base"), element, typmod, dimensions,
                        tuple((field[0], field[1], field[2], field[3]) for field in fields))
            for oid, name, typtype, is_array, element, typmod, dimensions, fields in rows
        }  # fmt: skip


# An array type is one that its element names as its array: int2vector and oidvector have elements but are base types.
_TYPES = """
SELECT t.oid::int8, t.typname::text, t.typtype::text, coalesce(e.typarray = t.oid, false),
       (CASE WHEN e.typarray = t.oid THEN t.typelem
             WHEN t.typtype = 'd' THEN t.typbasetype
             WHEN t.typtype = 'r' THEN r.rngsubtype
             WHEN t.typtype = 'm' THEN m.rngtypid
             ELSE 0::oid END)::int8,
       t.typtypmod, t.typndims,
       coalesce((SELECT json_agg(json_build_array(a.attname, a.atttypid::int8, a.atttypmod, a.attndims)
                                 ORDER BY a.attnum)
                 FROM pg_attribute a
                 WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped), '[]')
FROM pg_type t
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typelem <> 0
LEFT JOIN pg_range r ON r.rngtypid = t.oid
LEFT JOIN pg_range m ON m.rngmultitypid = t.oid
WHERE t.oid = ANY(%(oids)s::int8[]::oid[])"""

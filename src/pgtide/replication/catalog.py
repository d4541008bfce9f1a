"""What Postgres's catalog says about tables: which there are, and their shapes down to the last composite field.

Questions are asked for many tables at once, so that a thousand tables cost a handful of statements.

A shape that the catalog alone gives (`shape`) and one that begins from a relation message of the stream
(`shape_for`) are equal, fingerprint included, as long as nothing was altered in between.

Under REPLICA IDENTITY FULL a message does not say what the key is, and the catalog says what it is now: there may have
been equal keys when the rows were changed.  Such rows come whole, so they need no key; a table has one in the stream
from where on it is certain that the key was there.  It is if the transaction that made it had ended before all that the
slot can still send, or if the stream has passed an LSN at which the key was seen: whoever wrote to the table before the
key was made had committed by then, for making it locks the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg.rows import kwargs_row

from pgtide.config import matches
from pgtide.errors import PgtideError, TransientError
from pgtide.replication.attributes import (
    Attribute,
    KnownShapes,
    RelationColumn,
    RelationMessage,
    numbered,
)
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.published import PublishedTable, published_tables
from pgtide.replication.type_catalog import TypeCatalog
from pgtide.replication.writers import prepared_and_open, wal_end_lsn
from pgtide.schema import Column, TableShape


@dataclass(frozen=True, slots=True)
class TableInfo:
    oid: int
    namespace: str
    name: str
    relkind: str  # r table, p partitioned
    relreplident: str  # d default, n nothing, f full, i index
    primary_key: tuple[str, ...]  # empty also for a deferrable one, which does not identify rows at every moment
    usable_identity: bool  # updates and deletes can be published without making them fail
    owner: str
    owned: bool  # the connected role has the owner's rights
    readable: bool  # SELECT on the table and USAGE of the schema: it can be locked by its name, and read
    hides_rows: bool  # row-level security applies to the connected role

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def has_key(self) -> bool:
        """Whether a changed row can be found again in a mirror by less than all of its columns."""
        return self.usable_identity and (self.relreplident != "f" or bool(self.primary_key))


@dataclass(frozen=True, slots=True)
class Relation:
    """Anything in the database that can be selected from, for saying why a name does not mean a table."""

    qualified_name: str
    relkind: str
    relpersistence: str


@dataclass(frozen=True, slots=True)
class _Relation:
    """A row of pg_class with its columns and its key."""

    namespace: str
    name: str
    replica_identity: str
    attributes: tuple[Attribute, ...]
    primary_key: frozenset[int]  # attribute numbers
    identity_index: frozenset[int]
    key_xid: int | None  # the transaction that made the primary key, if that may be later than what the slot sends


@dataclass
class Catalog:
    """Answers from the catalog as it is now, over one ordinary connection."""

    connection: Connection
    known: KnownShapes = field(default_factory=KnownShapes)
    slot: str = ""  # whose messages `shape_for` gets
    _types: TypeCatalog = field(init=False)
    _streamed: dict[int, TableShape] = field(default_factory=dict, init=False)  # by the last message of each relation
    _key_seen: dict[int, tuple[int, int, TableShape]] = field(default_factory=dict, init=False)  # LSN, key_xid, keyed
    _certain_keys: dict[int, int] = field(default_factory=dict, init=False)  # relation → key_xid

    def __post_init__(self) -> None:
        self._types = TypeCatalog(self.connection)

    def tables(self, patterns: Sequence[str]) -> list[TableInfo]:
        """The tables that the patterns mean and that can be published, by name.

        A partition is covered by a parent that is meant too: its rows travel under the parent's name.
        """
        virtual_columns = self.connection.info.server_version >= 180000
        with postgres_errors("reading the catalog"), self.connection.cursor(row_factory=kwargs_row(_table)) as cursor:
            rows = cursor.execute(_TABLES, {"virtual_columns": virtual_columns}).fetchall()
        meant = [(table, parents) for table, parents in rows if matches(patterns, table.qualified_name)]
        oids = {table.oid for table, _ in meant}
        return [table for table, parents in meant if oids.isdisjoint(parents)]

    def relations(self) -> list[Relation]:
        """Everything with rows in the database's own schemas, whether it can be published or not."""
        with postgres_errors("reading the catalog"):
            return [Relation(*row) for row in self.connection.execute(_RELATIONS)]

    def shape(self, oid: int, publications: Sequence[str] = ()) -> TableShape:
        """The shape of one table as it is now."""
        shapes = self.shapes([oid], publications)
        if oid not in shapes:
            raise PgtideError(f"there is no table with oid {oid} any more", remedy="Start again.")
        return shapes[oid]

    def shapes(self, oids: Collection[int], publications: Sequence[str] = ()) -> dict[int, TableShape]:
        """The shapes of many tables as they are now; those that are gone are left out.

        With the publications that the stream is asked for, only the columns that these let through.  Without, all but
        generated ones.
        """
        relations = self._relations(oids)
        published = published_tables(self.connection, publications) if publications else {}
        messages = {oid: _as_message(oid, relation, published.get(oid)) for oid, relation in relations.items()}
        self._types.load(column.type_oid for message in messages.values() for column in message.columns)
        shapes = {oid: self._shape(message, relations[oid]) for oid, message in messages.items()}
        for shape in shapes.values():
            self.known.remember(shape)
        return shapes

    def shape_for(self, message: RelationMessage) -> TableShape:
        """The shape that a relation message describes; where the catalog disagrees, the message counts.

        What a prepared transaction has altered is shown to nobody before its end: then TransientError.
        """
        open_gid = prepared_and_open(self.connection, message.prepared_xid) if message.prepared_xid else None
        if open_gid is not None:
            message = _Message(
                message.relation_oid, message.namespace, message.name, message.replica_identity, message.columns, True
            )
        relation = self._relations([message.relation_oid]).get(message.relation_oid)
        self._types.load(column.type_oid for column in message.columns)
        shape = self._shape(message, relation or _GONE)
        if open_gid is not None and any(column.attnum < 0 for column in shape.columns):
            raise TransientError(
                f"prepared transaction {open_gid!r} has altered {shape.qualified_name}, which the catalog shows "
                "only after its end: from there on, changes wait for COMMIT PREPARED or ROLLBACK PREPARED"
            )
        self.known.remember(shape)
        shape = self._with_certain_key(shape, relation.key_xid if relation else None)
        self._streamed[message.relation_oid] = shape
        return shape

    def keys_certain_behind(self, lsn: int) -> list[TableShape]:
        """The stream has come to this LSN: shapes of tables that have a key from here on.  Each is told once."""
        certain = [oid for oid, (seen_lsn, _, _) in self._key_seen.items() if seen_lsn <= lsn]
        shapes = []
        for oid in certain:
            _, self._certain_keys[oid], shape = self._key_seen.pop(oid)
            shapes.append(shape)
        return shapes

    def _with_certain_key(self, shape: TableShape, key_xid: int | None) -> TableShape:
        oid = shape.relation_oid
        self._key_seen.pop(oid, None)
        keyed = shape.replica_identity == "f" and shape.key_columns
        if not keyed or key_xid is None or self._certain_keys.get(oid) == key_xid:
            return shape
        self._key_seen[oid] = wal_end_lsn(self.connection), key_xid, shape  # the LSN is one after the key was seen
        return replace(shape, columns=tuple(replace(column, key=False) for column in shape.columns))

    def _shape(self, message: RelationMessage, relation: _Relation) -> TableShape:
        before = self._streamed.get(message.relation_oid)
        attnums = numbered(message, relation.attributes, self.known, before)
        known = {attribute.attnum: attribute for attribute in relation.attributes}
        full = message.replica_identity == "f"
        # REPLICA IDENTITY FULL marks every column as key; then the primary key is what finds a row again.
        key = relation.primary_key if full and relation.primary_key <= set(attnums) else frozenset()
        columns = []
        for column, attnum in zip(message.columns, attnums, strict=True):
            attribute = known.get(attnum)
            pg_type = self._types.resolve(column.type_oid, column.typmod, attribute.dimensions if attribute else 0)
            is_key = attnum in key if full else column.key
            not_null = attribute is not None and not attribute.dropped and attribute.not_null
            missing = None if attribute is None else attribute.missing
            columns.append(Column(attnum, column.name, pg_type, is_key, not_null, missing=missing))
        return TableShape(
            message.relation_oid, message.namespace, message.name, message.replica_identity, tuple(columns)
        )

    def _relations(self, oids: Iterable[int]) -> dict[int, _Relation]:
        with postgres_errors("reading the catalog"):
            rows = self.connection.execute(_SHAPES, {"oids": list(oids), "slot": self.slot}).fetchall()
        return {
            oid: _Relation(namespace, name, identity, tuple(Attribute(*attribute) for attribute in attributes),
                           frozenset(primary_key), frozenset(identity_index), key_xid)
            for oid, namespace, name, identity, attributes, primary_key, identity_index, key_xid in rows
        }  # fmt: skip


def _table(*, parents: list[int], primary_key: list[str], **fields: Any) -> tuple[TableInfo, list[int]]:
    return TableInfo(primary_key=tuple(primary_key), **fields), parents


_GONE = _Relation("", "", "d", (), frozenset(), frozenset(), None)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    type_oid: int
    typmod: int
    key: bool


@dataclass(frozen=True, slots=True)
class _Message:
    """The relation message that the server would send now."""

    relation_oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: Sequence[RelationColumn]
    in_progress: bool = False
    prepared_xid: int = 0


def _as_message(oid: int, relation: _Relation, published: PublishedTable | None) -> _Message:
    key = {"d": relation.primary_key, "i": relation.identity_index}.get(relation.replica_identity, frozenset())
    sent = published.columns if published is not None else None
    columns = [
        _Column(a.name, a.type_oid, a.typmod, a.attnum in key or relation.replica_identity == "f")
        for a in relation.attributes
        if not a.dropped and (a.name in sent if sent is not None else not a.generated)
    ]
    return _Message(oid, relation.namespace, relation.name, relation.replica_identity, columns)


_OWN_SCHEMAS = "n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp_)'"

# Of pg_class c and its pg_namespace n.  SELECT on every column is not enough: LOCK TABLE asks for it on the table.
READABLE = "has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')"
HIDES_ROWS = "c.relrowsecurity AND row_security_active(c.oid)"

# A key identifies rows only if its index is valid and not deferrable (RelationGetIndexList in relcache.c).
_KEY_INDEX = "i.indisvalid AND i.indimmediate"

# Updates fail when a published table has no usable identity, and it is the leaf's own identity that counts
# (CheckCmdReplicaIdentity): a partitioned table is usable if itself and all of its leaves are.
# Since 18 virtual generated columns under FULL make updates fail as well.
# Leaves are asked for their ancestors: pg_partition_tree() would wait for exclusive locks on them.
_TABLES = f"""
WITH identity AS MATERIALIZED (
    SELECT c.oid, CASE c.relreplident
        WHEN 'd' THEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND {_KEY_INDEX})
        WHEN 'i' THEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident AND {_KEY_INDEX})
        WHEN 'f' THEN NOT (%(virtual_columns)s AND EXISTS (
            SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated = 'v'))
        ELSE false END AS usable
    FROM pg_class c WHERE c.relkind IN ('r', 'p')
), unusable_leaf AS MATERIALIZED (
    SELECT DISTINCT a.relid::oid AS root FROM pg_class c JOIN identity USING (oid), pg_partition_ancestors(c.oid) a
    WHERE c.relispartition AND c.relkind = 'r' AND NOT identity.usable
)
SELECT c.oid::int8, n.nspname::text AS namespace, c.relname::text AS name, c.relkind::text, c.relreplident::text,
       CASE WHEN c.relispartition
            THEN ARRAY(SELECT a.relid::oid::int8 FROM pg_partition_ancestors(c.oid) a WHERE a.relid <> c.oid)
            ELSE '{{}}' END AS parents,
       ARRAY(SELECT a.attname::text
             FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY k(attnum, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE i.indrelid = c.oid AND i.indisprimary AND {_KEY_INDEX} AND k.place <= i.indnkeyatts
             ORDER BY k.place) AS primary_key,
       identity.usable AND (c.relkind = 'r' OR c.oid NOT IN (SELECT root FROM unusable_leaf)) AS usable_identity,
       pg_get_userbyid(c.relowner)::text AS owner, pg_has_role(c.relowner, 'USAGE') AS owned,
       {READABLE} AS readable, {HIDES_ROWS} AS hides_rows
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN identity ON identity.oid = c.oid
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND {_OWN_SCHEMAS}
ORDER BY n.nspname, c.relname"""

_RELATIONS = f"""
SELECT n.nspname || '.' || c.relname, c.relkind::text, c.relpersistence::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {_OWN_SCHEMAS}
ORDER BY 1"""

# All transactions before a slot's catalog_xmin had ended where it begins to send.  What changes the row of an index
# later makes it look younger than it is, and so does wraparound: that costs time, and is not wrong.
_SHAPES = f"""
SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relreplident::text,
       coalesce((SELECT json_agg(json_build_array(
                     a.attnum, a.attname, a.atttypid::int8, a.atttypmod, a.attndims, a.attnotnull, a.attisdropped,
                     a.attgenerated <> '',
                     CASE WHEN a.atthasmissing THEN (a.attmissingval::text::text[])[1] END) ORDER BY a.attnum)
                 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0), '[]'),
       ARRAY(SELECT unnest(i.indkey[:i.indnkeyatts - 1])::int4 FROM pg_index i
             WHERE i.indrelid = c.oid AND i.indisprimary AND {_KEY_INDEX}),
       ARRAY(SELECT unnest(i.indkey[:i.indnkeyatts - 1])::int4 FROM pg_index i
             WHERE i.indrelid = c.oid AND i.indisreplident AND {_KEY_INDEX}),
       (SELECT i.xmin::text::int8 FROM pg_index i, pg_replication_slots s
        WHERE i.indrelid = c.oid AND i.indisprimary AND s.slot_name = %(slot)s AND age(i.xmin) <= age(s.catalog_xmin))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY(%(oids)s::int8[]::oid[]) AND c.relkind IN ('r', 'p')"""

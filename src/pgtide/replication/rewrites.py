"""What the catalog shows of changes to a table that the stream does not send: name, files, a stamp on each attribute.

A rewrite gives a table another file (`relfilenode`).  So do TRUNCATE, which is sent, and VACUUM FULL or CLUSTER, which
leave values as they are; but those leave the rows of pg_attribute as they are too, and whatever gives rows other values
does not: ALTER COLUMN … TYPE writes the column's row anew even if the type stays, ADD COLUMN makes one.

Of a partition not even TRUNCATE is sent, if the root is what is published: each that is gone, has another file, or has
come with rows counts as rewritten.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg

from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.writers import wal_end_lsn

# {"name": …, "files": {oid: relfilenode}, "branches": {oid: stamp of its place below its parent}, "labels": {oid: label
# of an enum}, "attributes": {attnum: {…}}}, as JSON has it.  Those of older versions lack branches and labels.
State = dict[str, Any]

# Types that become wider with every value as it was: integers and floats, whose rewrite mirrors can follow.  A numeric
# is rewritten only if its scale is another or its precision smaller: then its values may be others.
_WIDER = {(21, 23), (21, 20), (23, 20), (700, 701)}
# The same bits are shown as another value, and nothing is rewritten: integer as oid, cidr as inet.
_SHOWN_OTHERWISE = {(23, 26), (650, 869)}

_LOCK_TIMEOUT_MS = 200


def table_states(connection: Connection, oids: Collection[int]) -> tuple[dict[int, State], int]:
    """The tables as they are now, without those that are gone, and an LSN: what commits after it commits after this."""
    with postgres_errors("reading the catalog"):
        states: dict[int, State] = dict(connection.execute(_STATES, {"oids": list(oids)}).fetchall())
        return states, wal_end_lsn(connection)


def is_rewritten(before: State, now: State) -> bool:
    """Whether rows may have got other values, unseen, or have come or gone with a partition, between the two.

    An integer or float that has become wider is taken to have kept its values: with `USING` it need not.
    """
    if _has_renamed_label(before, now) or _has_other_partitions(before, now):
        return True
    pairs = [(before["attributes"].get(attnum), attribute) for attnum, attribute in now["attributes"].items()]
    if any(then is not None and (then["type"], attribute["type"]) in _SHOWN_OTHERWISE for then, attribute in pairs):
        return True
    if all(now["files"][oid] == file for oid, file in _files(before).items()):
        return False
    widened = any(then is not None and _is_wider(then, attribute) for then, attribute in pairs)
    return any(not _keeps_values(then, attribute, file_explained=widened) for then, attribute in pairs)


def new_branches(before: State, now: State) -> set[int]:
    """The partitions, and tables of partitions, that were not below the table before."""
    if "branches" in before:
        return {int(oid) for oid in now["branches"].keys() - before["branches"].keys()}
    return {int(oid) for oid in now["branches"].keys() & now["files"].keys() - _files(before).keys()}


def bring_rows(connection: Connection, branches: Collection[int]) -> bool:
    """Whether some of these were attached and not created as partitions, and have rows, which may be older than that.

    Rows that came after it through the root were sent, but cannot be told from the others.
    """
    with postgres_errors("reading the catalog"):
        attached = [row[0] for row in connection.execute(_ATTACHED, [list(branches)]).fetchall()]
        if not attached:
            return False
        try:
            with connection.transaction():
                connection.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}".encode())
                row = connection.execute(_HAS_ROWS, [attached]).fetchone()
        except psycopg.errors.LockNotAvailable:
            return True  # it may have some
    return row is not None and bool(row[0])


def _files(state: State) -> dict[str, int]:
    return state["files"] or {}  # older versions have noted null for a table without partitions


def _has_renamed_label(before: State, now: State) -> bool:
    return any(now["labels"].get(oid, label) != label for oid, label in before.get("labels", {}).items())


def _has_other_partitions(before: State, now: State) -> bool:
    """Whether one is gone, has another file, was away in between, or is new and was truncated already."""
    files, branches = now["files"], now["branches"]
    return (
        any(oid not in files or (oid in branches and files[oid] != file) for oid, file in _files(before).items())
        or any(branches.get(oid, stamp) != stamp for oid, stamp in before.get("branches", {}).items())
        or any(int(oid) != files[oid] for oid in files.keys() & branches.keys() - _files(before).keys())
    )


def _is_wider(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return (before["type"], now["type"]) in _WIDER


def _keeps_values(before: dict[str, Any] | None, now: dict[str, Any], *, file_explained: bool) -> bool:
    if before == now or now["dropped"]:
        return True
    if before is None:  # a default that is not noted beside the column was written into the rows
        return not now["has_default"] or now["missing"]
    if before["type"] == now["type"] and before["typmod"] == now["typmod"]:
        # A new stamp for another name or a constraint; for nothing that shows, only ALTER … TYPE … USING gives one.
        return file_explained and before["shown"] != now["shown"]
    return _is_wider(before, now)


# Asked from the root downwards by pg_inherits: pg_partition_tree() would wait for exclusive locks on the leaves.
# One that is being detached concurrently is read by nobody any more.  RENAME VALUE keeps the oid of a label.
_STATES = """
WITH RECURSIVE tree AS (
    SELECT c.oid AS root, c.oid, NULL::int8 AS stamp
    FROM pg_class c WHERE c.oid = ANY(%(oids)s::int8[]::oid[]) AND c.relkind IN ('r', 'p')
    UNION ALL SELECT tree.root, i.inhrelid, i.xmin::text::int8
    FROM tree JOIN pg_class c USING (oid) JOIN pg_inherits i ON i.inhparent = c.oid
    WHERE c.relkind = 'p' AND NOT i.inhdetachpending
), parts AS (
    SELECT tree.root, json_object_agg(c.oid, c.relfilenode::int8) FILTER (WHERE c.relkind = 'r') AS files,
           json_object_agg(c.oid, tree.stamp) FILTER (WHERE tree.stamp IS NOT NULL) AS branches
    FROM tree JOIN pg_class c USING (oid) GROUP BY 1
), types AS (
    SELECT a.attrelid AS root, a.atttypid AS oid
    FROM pg_attribute a WHERE a.attrelid = ANY(%(oids)s::int8[]::oid[]) AND a.attnum > 0 AND a.atttypid >= 16384
    UNION SELECT types.root, inner_type.oid FROM types JOIN pg_type t USING (oid) CROSS JOIN LATERAL (
        SELECT t.typelem UNION ALL SELECT t.typbasetype
        UNION ALL SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
        UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
    ) inner_type(oid) WHERE inner_type.oid >= 16384
), enums AS (
    SELECT types.root, json_object_agg(e.oid, e.enumlabel) AS labels
    FROM types JOIN pg_enum e ON e.enumtypid = types.oid GROUP BY 1
)
SELECT c.oid::int8, json_build_object(
    'name', json_build_array(c.relnamespace::regnamespace::text, c.relname),
    'files', coalesce(parts.files, '{}'), 'branches', coalesce(parts.branches, '{}'),
    'labels', coalesce(enums.labels, '{}'),
    'attributes', (SELECT json_object_agg(a.attnum, json_build_object(
        'stamp', a.xmin::text::int8, 'type', a.atttypid::int8, 'typmod', a.atttypmod, 'dropped', a.attisdropped,
        'missing', a.atthasmissing,
        'shown', concat_ws(
            ' ', a.attnotnull, a.atthasdef, a.attidentity, a.attstorage, a.attoptions, a.attacl, a.attname),
        'has_default', a.atthasdef OR a.attidentity <> '' OR t.typdefaultbin IS NOT NULL))
        FROM pg_attribute a LEFT JOIN pg_type t ON t.oid = a.atttypid AND t.typtype = 'd'
        WHERE a.attrelid = c.oid AND a.attnum > 0))
FROM pg_class c LEFT JOIN parts ON parts.root = c.oid LEFT JOIN enums ON enums.root = c.oid
WHERE c.oid = ANY(%(oids)s::int8[]::oid[]) AND c.relkind IN ('r', 'p')"""

# ATTACH PARTITION writes the columns' rows in the command in which it writes the one of pg_inherits; CREATE TABLE …
# PARTITION OF in an earlier command of its transaction, with those of the system columns, which nothing writes again.
# A standby does not know of commands (the WAL has none): there all of one transaction count as attached.
_ATTACHED = """
SELECT i.inhrelid::int8
FROM pg_inherits i JOIN pg_attribute made ON made.attrelid = i.inhrelid AND made.attnum = -1
WHERE i.inhrelid = ANY(%s::int8[]::oid[]) AND (made.xmin <> i.xmin OR pg_is_in_recovery() OR EXISTS (
    SELECT FROM pg_attribute a
    WHERE a.attrelid = i.inhrelid AND a.attnum > 0 AND a.xmin = i.xmin AND a.cmin = i.cmin))"""

_HAS_ROWS = """
WITH RECURSIVE tree AS (
    SELECT unnest(%s::int8[]::oid[]) AS oid
    UNION SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT bool_or(pg_relation_size(c.oid) > 0) FROM tree JOIN pg_class c USING (oid) WHERE c.relkind = 'r'"""

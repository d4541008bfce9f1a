"""What the catalog shows of changes to a table that the stream does not send: name, files, a stamp on each attribute.

A rewrite gives a table another file (`relfilenode`).  So do TRUNCATE, which is sent, and VACUUM FULL or CLUSTER, which
leave values as they are; but those leave the rows of pg_attribute as they are too, and whatever gives rows other values
does not: ALTER COLUMN … TYPE writes the column's row anew even if the type stays, ADD COLUMN makes one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pgtide.replication.connect import Connection, postgres_errors

State = dict[str, Any]  # {"name": …, "files": {oid: relfilenode}, "attributes": {attnum: {…}}}, as JSON has it

# Types that become wider with every value as it was: integers and floats, whose rewrite mirrors can follow.
_WIDER = {(21, 23), (21, 20), (23, 20), (700, 701)}
_NUMERIC = 1700


def table_states(connection: Connection, oids: Collection[int]) -> tuple[dict[int, State], int]:
    """The tables as they are now, without those that are gone, and an LSN: what commits after it commits after this."""
    with postgres_errors("reading the catalog"):
        states: dict[int, State] = dict(connection.execute(_STATES, {"oids": list(oids)}).fetchall())
        row = connection.execute(_END).fetchone()
    assert row is not None
    return states, int(row[0])


def is_rewritten(before: State, now: State) -> bool:
    """Whether rows may have got other values, unseen, between the two.

    An integer or float that has become wider is taken to have kept its values: with `USING` it need not.
    """
    files = now["files"]
    if all(files.get(oid, file) == file for oid, file in before["files"].items()):
        return False
    pairs = [(before["attributes"].get(attnum), attribute) for attnum, attribute in now["attributes"].items()]
    widened = any(then is not None and _is_wider(then, attribute) for then, attribute in pairs)
    return any(not _keeps_values(then, attribute, file_explained=widened) for then, attribute in pairs)


def _is_wider(before: dict[str, Any], now: dict[str, Any]) -> bool:
    types = before["type"], now["type"]
    return types in _WIDER or (types == (_NUMERIC, _NUMERIC) and before["typmod"] != now["typmod"])


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
_STATES = """
WITH RECURSIVE tree AS (
    SELECT c.oid AS root, c.oid FROM pg_class c WHERE c.oid = ANY(%(oids)s::int8[]::oid[]) AND c.relkind IN ('r', 'p')
    UNION ALL SELECT tree.root, i.inhrelid
    FROM tree JOIN pg_class c USING (oid) JOIN pg_inherits i ON i.inhparent = c.oid WHERE c.relkind = 'p'
)
SELECT c.oid::int8, json_build_object(
    'name', json_build_array(c.relnamespace::regnamespace::text, c.relname),
    'files', (SELECT json_object_agg(leaf.oid, leaf.relfilenode::int8) FROM tree JOIN pg_class leaf USING (oid)
              WHERE tree.root = c.oid AND leaf.relkind = 'r'),
    'attributes', (SELECT json_object_agg(a.attnum, json_build_object(
        'stamp', a.xmin::text::int8, 'type', a.atttypid::int8, 'typmod', a.atttypmod, 'dropped', a.attisdropped,
        'missing', a.atthasmissing,
        'shown', concat_ws(
            ' ', a.attnotnull, a.atthasdef, a.attidentity, a.attstorage, a.attoptions, a.attacl, a.attname),
        'has_default', a.atthasdef OR a.attidentity <> '' OR t.typdefaultbin IS NOT NULL))
        FROM pg_attribute a LEFT JOIN pg_type t ON t.oid = a.atttypid AND t.typtype = 'd'
        WHERE a.attrelid = c.oid AND a.attnum > 0))
FROM pg_class c WHERE c.oid = ANY(%(oids)s::int8[]::oid[]) AND c.relkind IN ('r', 'p')"""

_END = """
SELECT (CASE WHEN pg_is_in_recovery() THEN greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn())
             ELSE pg_current_wal_insert_lsn() END - '0/0')::int8"""

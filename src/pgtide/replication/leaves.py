"""The leaf partitions of tables.  A load locks and reads them by their own names, so it is their rights that count.

They are asked for their ancestors: pg_partition_tree() would wait for exclusive locks on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pgtide.replication.catalog import HIDES_ROWS, READABLE, TableInfo
from pgtide.replication.connect import Connection, postgres_errors


@dataclass(frozen=True, slots=True)
class Leaf:
    root: str  # the qualified name of the table under whose name its rows travel
    parent: str  # the table it is attached to, quoted
    namespace: str
    name: str
    relkind: str  # r table, f foreign table
    relpersistence: str  # p permanent, u unlogged
    readable: bool
    hides_rows: bool


def leaves_of(connection: Connection, tables: Iterable[TableInfo]) -> list[Leaf]:
    """The leaves of those that are partitioned, by name."""
    roots = {table.oid: table.qualified_name for table in tables if table.relkind == "p"}
    if not roots:
        return []
    with postgres_errors("reading the catalog"):
        rows = connection.execute(_LEAVES, {"roots": list(roots)}).fetchall()
    return [Leaf(roots[root], *fields) for root, *fields in rows]


_LEAVES = f"""
SELECT a.relid::oid::int8,
       (SELECT format('%%I.%%I', pn.nspname, p.relname) FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
        JOIN pg_namespace pn ON pn.oid = p.relnamespace WHERE i.inhrelid = c.oid),
       n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, {READABLE}, {HIDES_ROWS}
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_partition_ancestors(c.oid) a
WHERE c.relispartition AND c.relkind IN ('r', 'f') AND a.relid::oid::int8 = ANY(%(roots)s)
ORDER BY n.nspname, c.relname"""

"""A table as of a database snapshot, and its cut into ctid ranges of about the same size.

Leaf partitions are cut as tables of their own: they have the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgtide.errors import TableError
from pgtide.replication.catalog import Catalog
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.published import published_tables
from pgtide.replication.slot import Snapshot
from pgtide.snapshot.copy_range import TableAsOf, dropped, leaves_under_snapshot, under_snapshot
from pgtide.snapshot.ctid_ranges import CtidRange

# They are asked for their ancestors: pg_partition_tree() would wait for exclusive locks on them.
_LEAVES = (
    "FROM pg_catalog.pg_class c, pg_catalog.pg_partition_ancestors(c.oid) a "
    "WHERE c.relispartition AND c.relkind IN ('r', 'f') AND a.relid::oid::int8 = %s"
)


def table_as_of(
    connection: Connection, relation_oid: int, snapshot: Snapshot, publications: Sequence[str]
) -> TableAsOf:
    """The table as of the snapshot: the columns and rows that the stream carries from there on."""
    with under_snapshot(connection, [relation_oid], snapshot):
        shape = Catalog(connection).shapes([relation_oid], publications).get(relation_oid)
        published = published_tables(connection, publications, [relation_oid]).get(relation_oid)
    if shape is None:
        raise dropped(f"the table with oid {relation_oid}")
    return TableAsOf(shape, snapshot, published.row_filter if published else None)


def leaves(connection: Connection, table: TableAsOf) -> list[int]:
    """The tables that have the rows: the table itself, or its leaf partitions."""
    oid = table.shape.relation_oid
    with postgres_errors(f"reading {table.shape.qualified_name}"):
        found = connection.execute(
            f"SELECT c.oid::int8, c.relkind::text, c.oid::regclass::text {_LEAVES} ORDER BY 1".encode(), [oid]
        ).fetchall()
    for _, relkind, name in found:
        if relkind == "f":
            raise TableError(
                f"{table.shape.qualified_name}: its partition {name} is a foreign table, whose changes nobody sends.",
                remedy=f'Detach it, or leave the table out: source.tables = [..., "!{table.shape.qualified_name}"]',
            )
    return [row[0] for row in found] or [oid]


def cut(connection: Connection, table: TableAsOf, range_bytes: int) -> list[CtidRange]:
    """All ranges of the table, none much larger than that; the last one of each leaf is open at its end."""
    ranges = []
    for leaf in leaves(connection, table):
        # The size is read after the snapshot is taken: the other way round rows could lie beyond it.
        with leaves_under_snapshot(connection, table, [leaf]):
            size = connection.execute(
                "SELECT c.relfilenode::int8, pg_relation_size(c.oid) / current_setting('block_size')::int8, "
                "       pg_relation_size(c.oid) + coalesce(pg_relation_size(nullif(c.reltoastrelid, 0)), 0) "
                "FROM pg_catalog.pg_class c WHERE c.oid = %s",
                [leaf],
            ).fetchone()
        if size is None:
            continue  # attached after the snapshot was taken
        file, blocks, length_bytes = size
        count = -(-length_bytes // range_bytes) or 1
        step = -(-blocks // count) or 1  # all of one size, so that nobody waits for the one who has the last long one
        starts = list(range(0, max(blocks, 1), step))
        ranges += [CtidRange(leaf, file, start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return ranges


def partition_files(connection: Connection, table: TableAsOf) -> set[tuple[int, int]]:
    """The leaf partitions, each with its file, as they are now; none for a table that is not partitioned."""
    with postgres_errors(f"reading {table.shape.qualified_name}"):
        found = connection.execute(
            f"SELECT c.oid::int8, pg_relation_filenode(c.oid)::int8 {_LEAVES}".encode(), [table.shape.relation_oid]
        ).fetchall()
    return set(found)


def file_blocks(connection: Connection, relation_oid: int) -> int:
    """How many blocks the table or leaf has now."""
    with postgres_errors("reading the source"):
        row = connection.execute(
            "SELECT pg_relation_size(%s::oid) / current_setting('block_size')::int8", [relation_oid]
        ).fetchone()
    return int(row[0] or 0) if row else 0


def table_bytes(connection: Connection, table: TableAsOf) -> int:
    """What the table takes in the source, large values included."""
    with postgres_errors(f"reading {table.shape.qualified_name}"):
        row = connection.execute(
            "SELECT sum(pg_table_size(leaf::oid::regclass))::int8 FROM unnest(%s::int8[]) leaf",
            [leaves(connection, table)],
        ).fetchone()
    return int(row[0] or 0) if row else 0

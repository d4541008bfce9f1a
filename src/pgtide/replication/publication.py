"""The publication: what the server sends.  Managed by us, or the user's and then only looked at.

Do no harm: a table without usable replica identity in a publication of updates makes the application's own UPDATE
and DELETE fail.  In managed mode such tables go into a second publication of inserts and truncates only.

Both publications are made before the slot, even when empty: the stream reads the catalog as of the change it
decodes, and would stop for good at changes from before a publication that it was asked for existed.

Only a publication that bears our comment is altered: one of the same name that somebody made for
another purpose stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from psycopg import sql

from pgtide.config import INSERT_ONLY_SUFFIX, Source
from pgtide.errors import SourceNotReadyError
from pgtide.replication.catalog import TableInfo
from pgtide.replication.connect import Connection, postgres_errors
from pgtide.replication.published import PublishedTable, published_tables

MARK = "managed by pgtide"
_LOCK_TIMEOUT = "10s"  # a migration waiting behind our lock would make every query wait behind it
_ALL = "insert, update, delete, truncate"
_INSERT_ONLY = "insert, truncate"


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as the catalog has it."""

    name: str
    tables: Mapping[int, tuple[str, str]]  # those named in it, not those it covers by schema or as partitions
    publish: str
    via_root: bool
    generated_columns: bool
    all_tables: bool
    schemas: bool
    owned: bool  # by the connected role, or one whose rights it has
    comment: str | None


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """What has to be done, and the rights that it takes."""

    statements: tuple[sql.Composed, ...] = ()
    creates: tuple[str, ...] = ()  # needs CREATE on the database
    alters: tuple[str, ...] = ()  # needs ownership of these publications
    adds: tuple[TableInfo, ...] = ()  # needs ownership of these tables


def publication_names(source: Source) -> tuple[str, ...]:
    """What the stream is asked for."""
    if source.publication_mode == "existing":
        return (source.publication,)
    return source.publication, source.publication + INSERT_ONLY_SUFFIX


def plan_publication(
    source: Source, existing: Mapping[str, Publication], tables: Sequence[TableInfo], server_version: int
) -> PublicationPlan:
    """The statements that bring both managed publications from what is there to what is wanted; none if all is well."""
    main, second = publication_names(source)
    wanted = {
        main: (_ALL, [table for table in tables if table.usable_identity]),
        second: (_INSERT_ONLY, [table for table in tables if not table.usable_identity]),
    }
    statements: list[sql.Composed] = []
    creates, alters, adds = [], [], []
    for name, (publish, members) in wanted.items():
        publication = existing.get(name)
        if publication is None:
            statements += _create(name, publish, members, server_version)
            creates.append(name)
            adds += members
            continue
        _refuse_foreign(publication)
        changes = _alter(publication, publish, members, server_version)
        if changes:
            statements += changes
            alters.append(name)
            adds += [table for table in members if table.oid not in publication.tables]
    return PublicationPlan(tuple(statements), tuple(creates), tuple(alters), tuple(adds))


def apply_plan(connection: Connection, plan: PublicationPlan) -> None:
    """Does it, in one transaction: no moment at which a table is in neither publication, or harmfully in both."""
    if not plan.statements:
        return
    with postgres_errors("setting up the publication"), connection.transaction():
        connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(_LOCK_TIMEOUT))
        for statement in plan.statements:
            connection.execute(statement)


def ensure_publication(connection: Connection, source: Source, tables: Sequence[TableInfo]) -> tuple[str, ...]:
    """Makes sure that the tables are published, and returns the publications to ask the stream for."""
    names = publication_names(source)
    existing = read_publications(connection, names)
    if source.publication_mode == "existing":
        check_existing(source, existing, published_tables(connection, names), tables)
    else:
        apply_plan(connection, plan_publication(source, existing, tables, connection.info.server_version))
    return names


def check_existing(
    source: Source,
    existing: Mapping[str, Publication],
    published: Mapping[int, PublishedTable],
    tables: Sequence[TableInfo],
) -> None:
    """Refuses a publication of the user's that does not publish what the configuration wants."""
    name = sql.Identifier(source.publication).as_string()
    publication = existing.get(source.publication)
    if publication is None:
        raise SourceNotReadyError(
            f'there is no publication {name}, and source.publication_mode is "existing"',
            remedy=creation_by_hand(source, tables),
        )
    publish = _ALL if any(table.usable_identity for table in tables) else _INSERT_ONLY
    if not set(publish.split(", ")) <= set(publication.publish.split(", ")):
        raise SourceNotReadyError(
            f"publication {name} publishes only {publication.publish or 'nothing'}: the mirror would miss the rest",
            remedy=f"ALTER PUBLICATION {name} SET (publish = '{publish}');",
        )
    roots = [table for table in tables if table.relkind == "p"]
    if roots and not publication.via_root:
        raise SourceNotReadyError(
            f"publication {name} publishes partitions one by one, but {listed(roots)} is wanted as one table",
            remedy=f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true);",
        )
    missing = [table for table in tables if table.oid not in published]
    if missing:
        raise SourceNotReadyError(
            f"publication {name} does not publish {listed(missing)}",
            remedy=f"{_identities(missing)}ALTER PUBLICATION {name} ADD TABLE {listed(missing)};\n"
            "Or leave them out of source.tables.",
        )


def creation_by_hand(source: Source, tables: Sequence[TableInfo]) -> str:
    """What somebody with more rights than ours can type, for publication_mode = "existing"."""
    name = sql.Identifier(source.publication).as_string()
    create = f"CREATE PUBLICATION {name} FOR TABLE {listed(tables)} WITH (publish_via_partition_root = true);"
    return _identities(tables) + create


def _identities(tables: Sequence[TableInfo]) -> str:
    """What must come before publishing the tables whose updates would fail then."""
    unusable = [table for table in tables if not table.usable_identity]
    return "".join(f"ALTER TABLE {listed([table])} REPLICA IDENTITY FULL;\n" for table in unusable)


def read_publications(connection: Connection, names: Sequence[str]) -> dict[str, Publication]:
    """The publications of these names that are there."""
    version = connection.info.server_version
    query = sql.SQL(_PUBLICATIONS).format(
        schemas=sql.SQL(_SCHEMAS if version >= 150000 else "false"),
        generated=sql.SQL("p.pubgencols = 's'" if version >= 180000 else "false"),
    )
    with postgres_errors("reading publications"):
        rows = connection.execute(query, {"names": list(names)}).fetchall()
    return {
        name: Publication(name, {oid: (namespace, table) for oid, namespace, table in members}, *rest)
        for name, members, *rest in rows
    }


class _Named(Protocol):
    @property
    def namespace(self) -> str: ...

    @property
    def name(self) -> str: ...


def listed(tables: Iterable[_Named]) -> str:
    """The tables' names, quoted as SQL wants them."""
    return ", ".join(sql.Identifier(table.namespace, table.name).as_string() for table in tables)


def _members(tables: Iterable[tuple[str, str]]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(namespace, name) for namespace, name in tables)


def _options(publish: str, server_version: int) -> sql.Composed:
    # Stored generated columns are sent where the server can (18); without them, REPLICA IDENTITY FULL on a table
    # that has one would make its updates fail.
    generated = sql.SQL(", publish_generated_columns = stored" if server_version >= 180000 else "")
    return sql.SQL("(publish = {}, publish_via_partition_root = true{})").format(publish, generated)


def _create(name: str, publish: str, tables: Sequence[TableInfo], server_version: int) -> list[sql.Composed]:
    identifier = sql.Identifier(name)
    members = _members((table.namespace, table.name) for table in tables)
    what = sql.SQL(" FOR TABLE {}").format(members) if tables else sql.SQL("")
    return [
        sql.SQL("CREATE PUBLICATION {}{} WITH {}").format(identifier, what, _options(publish, server_version)),
        sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(identifier, MARK),
    ]


def _alter(
    publication: Publication, publish: str, tables: Sequence[TableInfo], server_version: int
) -> list[sql.Composed]:
    identifier = sql.Identifier(publication.name)
    wanted = {table.oid: (table.namespace, table.name) for table in tables}
    statements = []
    gone = sorted(names for oid, names in publication.tables.items() if oid not in wanted)
    if gone:
        statements.append(sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(identifier, _members(gone)))
    if (
        publication.publish != publish
        or not publication.via_root
        or (server_version >= 180000 and not publication.generated_columns)
    ):
        statements.append(sql.SQL("ALTER PUBLICATION {} SET {}").format(identifier, _options(publish, server_version)))
    new = [names for oid, names in wanted.items() if oid not in publication.tables]
    if new:
        statements.append(sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(identifier, _members(new)))
    return statements


def _refuse_foreign(publication: Publication) -> None:
    name = sql.Identifier(publication.name).as_string()
    if publication.comment != MARK or publication.all_tables or publication.schemas:
        raise SourceNotReadyError(
            f"publication {name} was not made by pgtide, so it is not altered",
            remedy='Set source.publication_mode = "existing" to use it as it is, choose another source.publication,'
            f" or remove it: DROP PUBLICATION {name};",
        )


_SCHEMAS = "EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid)"

_PUBLICATIONS = """
SELECT p.pubname::text,
       coalesce((SELECT json_agg(json_build_array(c.oid::int8, n.nspname, c.relname))
                 FROM pg_publication_rel r
                 JOIN pg_class c ON c.oid = r.prrelid
                 JOIN pg_namespace n ON n.oid = c.relnamespace
                 WHERE r.prpubid = p.oid), '[]'),
       concat_ws(', ', CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
                 CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END),
       p.pubviaroot, {generated}, p.puballtables, {schemas}, pg_has_role(p.pubowner, 'USAGE'),
       obj_description(p.oid, 'pg_publication')
FROM pg_publication p
WHERE p.pubname = ANY(%(names)s)"""

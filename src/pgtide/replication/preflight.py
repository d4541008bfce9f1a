"""Can this server be a source, as it is and as we are configured?  Asked before anything is created.

Every no is one message with what to type.  Only questions are asked: nothing is created or changed, and a replication
connection is opened and closed because only that shows that one is allowed and that a wal sender is free.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psycopg import sql

from pgtide.config import Config, Source
from pgtide.config.patterns import included, matches_any
from pgtide.errors import ConfigurationError, SourceNotReadyError, TransientError
from pgtide.replication.catalog import Catalog, TableInfo
from pgtide.replication.connect import Connection, connect, connect_when_ready, postgres_errors
from pgtide.replication.leaves import Leaf, leaves_of
from pgtide.replication.publication import (
    PublicationPlan,
    check_existing,
    creation_by_hand,
    listed,
    plan_publication,
    publication_names,
    read_publications,
)
from pgtide.replication.published import published_tables
from pgtide.replication.server import Server, reached
from pgtide.replication.slot import FREE_A_SLOT

_TWO_PHASE_SINCE = 150000
_EXISTING_MODE = 'set source.publication_mode = "existing"'
_ORIGIN_FILTER_VERSION = 160000
_UNPUBLISHABLE = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What was found out about the source on the way."""

    server_version: int
    system_identifier: str
    timeline: int
    database: str
    role: str
    tables: tuple[TableInfo, ...]
    server: Server  # the one that was asked, of all those that the connection string may lead to
    warnings: tuple[str, ...] = ()  # what may be in the way later

    @property
    def tables_without_key(self) -> tuple[TableInfo, ...]:
        """Rows of these cannot be found again: without usable identity, or with a full one and no primary key."""
        return tuple(table for table in self.tables if not table.has_key)


def check_source(config: Config, stop: threading.Event | None = None) -> SourceFacts:
    """The facts, or the first reason why capture cannot start; a server that is down is waited for."""
    source = config.source
    with connect_when_ready(source.dsn, timeout_s=source.connect_timeout_seconds, stop=stop) as anywhere:
        _check_settings(anywhere, source)
        _check_origin(anywhere, config)
        system_identifier, timeline, server = _check_replication(anywhere, source)
    with _connect_to(server, source) as connection:
        _check_settings(connection, source)
        warnings = _check_slots(connection, config)
        tables = _check_tables(connection, config)
        leaves = leaves_of(connection, tables)
        _check_leaves(leaves)
        _check_readable(connection, [*tables, *leaves])
        _check_publication(connection, source, tables)
        database, role = _names(connection)
        version = connection.info.server_version
        return SourceFacts(version, system_identifier, timeline, database, role, tuple(tables), server, warnings)


def _connect_to(server: Server, source: Source) -> Connection:
    try:
        return server.connect(timeout_s=source.connect_timeout_seconds)
    except TransientError as error:
        raise SourceNotReadyError(error.what, remedy=error.remedy) from None


def _row(connection: Connection, query: str) -> tuple[str, ...]:
    with postgres_errors("asking the server about itself"):
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row


def _names(connection: Connection) -> tuple[str, str]:
    database, role = _row(connection, "SELECT current_database()::text, current_user::text")
    return database, role


def _check_settings(connection: Connection, source: Source) -> None:
    wal_level, recovering = _row(connection, "SELECT current_setting('wal_level'), pg_is_in_recovery()::text")
    if wal_level != "logical":
        raise SourceNotReadyError(
            f"the server's wal_level is {wal_level}; logical replication needs logical",
            remedy="ALTER SYSTEM SET wal_level = logical; then restart the server."
            " (Amazon RDS: rds.logical_replication = 1; Cloud SQL: cloudsql.logical_decoding = on.)",
        )
    if source.two_phase and connection.info.server_version < _TWO_PHASE_SINCE:
        raise SourceNotReadyError(
            f"source.two_phase = true needs Postgres 15; the server is {connection.info.server_version // 10000}",
            remedy="Set source.two_phase = false: prepared transactions are then captured when they commit.",
        )
    if recovering == "true" and source.publication_mode == "managed":
        raise SourceNotReadyError(
            "the server is a standby, on which no publication can be created",
            remedy=f"Connect to the primary, or create the publication there and {_EXISTING_MODE}.",
        )


def _check_origin(connection: Connection, config: Config) -> None:
    version = connection.info.server_version
    if config.source.origin == "none" and version < _ORIGIN_FILTER_VERSION:
        raise ConfigurationError(
            f'{config.file}: source.origin: found "none", which Postgres {version // 10000} does not know',
            remedy='Set source.origin = "any", or upgrade the server to 16 or newer.',
        )


def _check_replication(connection: Connection, source: Source) -> tuple[str, int, Server]:
    """System identifier and timeline, which only a replication connection tells everyone, and where it ended."""
    _, role = _names(connection)
    try:
        with connect(source.dsn, replication=True, timeout_s=source.connect_timeout_seconds) as replication:
            with postgres_errors("identifying the server"):
                row = replication.execute("IDENTIFY_SYSTEM").fetchone()
            assert row is not None
            return str(row[0]), int(row[1]), reached(source.dsn, replication)
    except TransientError as error:
        raise SourceNotReadyError(error.what, remedy=error.remedy) from None
    except SourceNotReadyError:
        # Asked of the catalog, not read from the message: that may be in any language.
        (allowed,) = _row(connection, "SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user")
        if allowed:
            raise
        raise SourceNotReadyError(
            f"role {role} may not replicate (it has no REPLICATION privilege)",
            remedy=f"As a superuser: ALTER ROLE {_quoted(role)} REPLICATION;"
            f" (Amazon RDS: GRANT rds_replication TO {_quoted(role)};)",
        ) from None


def _check_slots(connection: Connection, config: Config) -> tuple[str, ...]:
    """Ours must be there or free; that none is left beside it is a warning, since the first load needs no other."""
    source = config.source
    with postgres_errors("reading the replication slots"):
        names = [row[0] for row in connection.execute("SELECT slot_name::text FROM pg_replication_slots")]
    (limit,) = _row(connection, "SELECT current_setting('max_replication_slots')")
    if source.slot not in names and len(names) >= int(limit):
        raise SourceNotReadyError(
            f"all {limit} replication slots of the server are in use ({', '.join(sorted(names)) or 'none allowed'})",
            remedy=FREE_A_SLOT,
        )
    reads_here = (config.snapshot.initial == "bulk" or config.snapshot.reads_in_log) and not source.read_from
    if reads_here and len({*names, source.slot}) >= int(limit):
        used = f"all {limit} replication slots of the server are in use, ours included"
        return (f"{used}: a load that needs another snapshot takes one more, for a moment. {FREE_A_SLOT}",)
    return ()


def _check_tables(connection: Connection, config: Config) -> list[TableInfo]:
    catalog = Catalog(connection)
    everything = [table.qualified_name for table in catalog.tables(["*.*"])]
    patterns = config.source.tables
    for pattern in included(patterns):
        # A partition is not in `everything`, but may be named by itself.
        if not any(matches_any([pattern], name) for name in everything) and not catalog.tables([pattern]):
            raise _no_such_table(pattern, everything, catalog, config, _names(connection)[0])
    tables = catalog.tables(patterns)
    if not tables:
        raise SourceNotReadyError(
            f"{config.file}: source.tables: {list(patterns)} leaves no table: all that are meant are excluded",
            remedy="Take back one of the patterns that begin with !.",
        )
    return tables


def _no_such_table(
    pattern: str, tables: Sequence[str], catalog: Catalog, config: Config, database: str
) -> SourceNotReadyError:
    what = f"{config.file}: source.tables: {pattern!r} matches no table in database {database}"
    for relation in catalog.relations():
        if matches_any([pattern], relation.qualified_name):
            kind = _UNPUBLISHABLE.get(relation.relkind, "an unlogged or temporary table")
            return SourceNotReadyError(
                f"{what}: {relation.qualified_name} is {kind}, which Postgres does not replicate",
                remedy="Name a permanent table, or leave it out.",
            )
    # By the table's name alone: with the schema in front all tables of a schema look alike.
    by_name = {name.partition(".")[2]: name for name in tables}
    near = difflib.get_close_matches(pattern.partition(".")[2], by_name, n=3, cutoff=0.7)
    if near:
        return SourceNotReadyError(what, remedy=f"Did you mean {' or '.join(by_name[name] for name in near)}?")
    if not tables:
        return SourceNotReadyError(what, remedy="It has no tables at all: check dbname in source.dsn.")
    shown = ", ".join(tables[:5]) + (f" and {len(tables) - 5} more" if len(tables) > 5 else "")
    return SourceNotReadyError(what, remedy=f"There are: {shown}.")


def _check_leaves(leaves: Iterable[Leaf]) -> None:
    for leaf in leaves:
        kind, name = ("a foreign" if leaf.relkind == "f" else "an unlogged"), listed([leaf])
        if leaf.relkind == "f" or leaf.relpersistence != "p":
            make_permanent = "" if leaf.relkind == "f" else f" or ALTER TABLE {name} SET LOGGED;"
            raise SourceNotReadyError(
                f"the partition {name} of {leaf.root} is {kind} table, whose changes Postgres does not replicate",
                remedy=f"ALTER TABLE {leaf.parent} DETACH PARTITION {name};{make_permanent}"
                f' Or leave the table out: source.tables = [..., "!{leaf.root}"]',
            )


def _check_readable(connection: Connection, tables: Sequence[TableInfo | Leaf]) -> None:
    _, role = _names(connection)
    unreadable = [table for table in tables if not table.readable]
    if unreadable:
        schemas = ", ".join(sorted({_quoted(table.namespace) for table in unreadable}))
        raise SourceNotReadyError(
            f"role {role} may not read {listed(unreadable)}",
            remedy=f"GRANT USAGE ON SCHEMA {schemas} TO {_quoted(role)};"
            f" GRANT SELECT ON TABLE {listed(unreadable)} TO {_quoted(role)};",
        )
    hidden = [table for table in tables if table.hides_rows]
    if hidden:
        raise SourceNotReadyError(
            f"row-level security hides rows of {listed(hidden)} from role {role}: the first load would miss them",
            remedy=f"As a superuser: ALTER ROLE {_quoted(role)} BYPASSRLS; or leave the tables out of source.tables.",
        )


def _check_publication(connection: Connection, source: Source, tables: Sequence[TableInfo]) -> None:
    names = publication_names(source)
    existing = read_publications(connection, names)
    if source.publication_mode == "existing":
        check_existing(source, existing, published_tables(connection, names), tables)
        return
    plan = plan_publication(source, existing, tables, connection.info.server_version)
    _check_rights(connection, source, plan, [name for name in plan.alters if not existing[name].owned], tables)


def _check_rights(
    connection: Connection, source: Source, plan: PublicationPlan, foreign: Sequence[str], tables: Sequence[TableInfo]
) -> None:
    """Refuses a plan that the role may not carry out: in part would be worse than not at all."""
    database, role = _names(connection)
    by_hand = f"Or, as a superuser, create the publication yourself and {_EXISTING_MODE}:\n"
    by_hand += creation_by_hand(source, tables)
    others = [table for table in plan.adds if not table.owned]
    if others:
        owners = ", ".join(sorted({_quoted(table.owner) for table in others}))
        raise SourceNotReadyError(
            f"role {role} does not own {listed(others)}, and only its owner can publish a table",
            remedy=f"GRANT {owners} TO {_quoted(role)};\n{by_hand}",
        )
    if foreign:
        publications = ", ".join(_quoted(name) for name in foreign)
        raise SourceNotReadyError(
            f"role {role} does not own publication {publications} and cannot alter it",
            remedy=f"ALTER PUBLICATION {_quoted(foreign[0])} OWNER TO {_quoted(role)};\n{by_hand}",
        )
    if plan.creates:
        (allowed,) = _row(connection, "SELECT has_database_privilege(current_database(), 'CREATE')")
        if not allowed:
            raise SourceNotReadyError(
                f"role {role} may not create a publication in database {database}",
                remedy=f"GRANT CREATE ON DATABASE {_quoted(database)} TO {_quoted(role)};\n{by_hand}",
            )


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()

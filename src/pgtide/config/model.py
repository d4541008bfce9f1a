"""What can be configured: sections, keys, defaults and limits, and nothing that does nothing.

The descriptions here are the comments that `pgtide init` writes.  A validator's message completes the
sentence "expected …": `loading` puts file, key and what was found in front of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from pgtide.config.patterns import included, is_pattern

INSERT_ONLY_SUFFIX = "_insert_only"  # of the second publication, for tables whose rows cannot be found again
_NAME_MAX_BYTES = 63  # NAMEDATALEN - 1
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BUCKET_AND_PREFIX = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.+(/|$))[A-Za-z0-9!_.*'()=+-]+)*/?")
_OBJECT_STORE_FLUSH_MS = 1000  # every flush is two requests that are paid for


def is_url(path: Any) -> bool:
    """Whether a path names something on an object store; a folder otherwise."""
    return isinstance(path, str) and _URL.match(path) is not None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _spark_values(value: Any) -> Any:
    """Spark's settings are strings; TOML's numbers and booleans are taken as Spark writes them."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(item).lower() if isinstance(item, bool) else str(item) if isinstance(item, int | float) else item
        for key, item in value.items()
    }


class Section(BaseModel):
    # Strict: 'trigger_seconds = "1"' is a mistake in the file, not a number in disguise.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


class Source(Section):
    dsn: str = Field(
        repr=False,  # it may hold a password
        description="The database: anything libpq takes (URI, key=value, service=NAME); PG* variables fill the rest.",
        examples=["host=localhost dbname=shop user=pgtide"],
    )
    tables: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = Field(
        ("public.*",), description="Tables to capture: schema.table, with * ? [] as in a shell; ! in front excludes."
    )
    slot: str = Field("pgtide", description="Name of the replication slot.")
    publication: str = Field("pgtide", description="Name of the publication.")
    publication_mode: Literal["managed", "existing"] = Field(
        "managed", description='"managed": pgtide creates and alters the publication; "existing": yours, never altered.'
    )
    origin: Literal["any", "none"] = Field(
        "any",
        description='"none" (Postgres 16 and newer): without changes that were themselves replicated from elsewhere.',
    )
    two_phase: bool = Field(
        False,
        description="Take prepared transactions (PREPARE TRANSACTION) when they are prepared, not when they commit; "
        "Postgres 15 on. The slot stays so.",
    )
    read_from: str = Field(
        "",
        repr=False,  # it may hold a password
        description='A standby (Postgres 16 and newer) from which loads read, as in dsn; "": from the source itself.',
    )
    connect_timeout_seconds: float = Field(
        10, gt=0, le=3600, description="How long to wait for the server at start before giving up."
    )

    def read_dsn(self, *, standby: bool) -> str:
        """Where to read rows: from the source, or from the standby."""
        return self.read_from if standby else self.dsn

    @field_validator("dsn", "read_from")
    @classmethod
    def _dsn_parses(cls, dsn: str) -> str:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        try:
            conninfo_to_dict(dsn)
        except ProgrammingError:
            # libpq's own words quote parts of the string, which may be parts of the password.
            raise ValueError("a connection string that libpq can parse") from None
        return dsn

    @field_validator("tables")
    @classmethod
    def _tables_are_patterns(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in tables:
            if not is_pattern(pattern):
                raise ValueError(f'patterns of the form "schema.table", unlike {pattern!r}')
        if not included(tables):
            raise ValueError("at least one pattern that does not begin with !")
        return tables

    @field_validator("slot")
    @classmethod
    def _slot_is_a_slot_name(cls, slot: str) -> str:
        if not re.fullmatch(r"[a-z0-9_]{1,63}", slot):
            raise ValueError("1 to 63 lower-case letters, digits and underscores (Postgres's rule for slots)")
        return slot

    @field_validator("publication")
    @classmethod
    def _publication_fits(cls, publication: str) -> str:
        limit_bytes = _NAME_MAX_BYTES - len(INSERT_ONLY_SUFFIX)
        if not publication or "\0" in publication or len(publication.encode()) > limit_bytes:
            raise ValueError(f"a name of 1 to {limit_bytes} bytes ({INSERT_ONLY_SUFFIX} is appended for a second one)")
        return publication


class Log(Section):
    path: str = Field("pgtide-data/log", description="Folder of the change log, or s3://bucket/prefix.")
    flush_interval_ms: int = Field(
        10,
        ge=1,
        le=60_000,
        description=f"Under load, make changes durable at most this often; if not set, {_OBJECT_STORE_FLUSH_MS} on S3.",
        json_schema_extra={"default_depends_on": "path"},
    )
    retention_hours: float = Field(
        72, ge=0, description="Changes that every reader has passed are kept at least this long."
    )
    max_bytes: int = Field(
        0, ge=0, description="Above this the oldest changes go, whoever still needs them; 0: no limit."
    )

    @model_validator(mode="before")
    @classmethod
    def _flushes_cost_more_on_object_stores(cls, values: Any) -> Any:
        if isinstance(values, dict) and is_url(values.get("path")):
            return {"flush_interval_ms": _OBJECT_STORE_FLUSH_MS} | values
        return values

    @field_validator("path")
    @classmethod
    def _path_is_a_folder_or_on_s3(cls, path: str) -> str:
        if not path or (_URL.match(path) and not _BUCKET_AND_PREFIX.fullmatch(path)):
            raise ValueError("a folder or s3://bucket/prefix (endpoint and credentials come from AWS_* and ~/.aws)")
        return path


class Capture(Section):
    transaction_memory_bytes: int = Field(
        256 << 20, ge=1 << 16, description="Open transactions stay in memory up to this; beyond, they go to the spool."
    )
    spool_path: str = Field(
        "", description='Folder of the spool; "": in the log\'s folder, or in pgtide-data/spool if the log is on S3.'
    )
    spool_max_bytes: int = Field(0, ge=0, description="What the spool may take on disk; 0: no limit.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the HTTP answers /metrics (Prometheus), /health and /ready; 0: none."
    )
    metrics_address: str = Field(
        "127.0.0.1", min_length=1, description='Where that port is; "0.0.0.0" to be asked from other machines.'
    )
    unhealthy_after_seconds: float = Field(
        60, gt=0, description="How long the log may not be writable before /health says so."
    )


class TableOptions(Section):
    """What can be set for one mirror table; what is not, is as for all."""

    soft_delete: bool | None = None
    dropped_columns: Literal["keep", "drop"] | None = None


class Mirror(Section):
    format: Literal["iceberg"] = Field("iceberg", description="Format of the mirror tables.")
    catalog: str = Field("lake", description="Name of the Spark catalog.")
    warehouse: str = Field(
        "pgtide-data/lake",
        description="Where the tables are, if the Spark session does not define the catalog itself: a folder or a URL.",
    )
    namespace: str = Field("", description='Namespace of all mirror tables; "": the source schema\'s name.')
    trigger_seconds: float = Field(1, gt=0, le=86_400, description="How often the mirror looks for changes.")
    compact_minutes: float = Field(
        15,
        ge=0,
        description="How often small files are put together and versions that no kept point needs let go; 0: never.",
    )
    keep_points_hours: float = Field(
        24, gt=0, description="How long points can be read: all of the last hour, and before that one a minute."
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the HTTP answer /metrics (Prometheus) of pgtide mirror; 0: none. "
        "pgtide run shows all at capture.metrics_port.",
    )
    metrics_address: str = Field(
        "127.0.0.1", min_length=1, description='Where that port is; "0.0.0.0" to be asked from other machines.'
    )
    soft_delete: bool = Field(
        False, description="Rows that the source deletes stay in the mirror, with true in a column _is_deleted."
    )
    dropped_columns: Literal["keep", "drop"] = Field(
        "keep",
        description='A column that the source drops: "keep" leaves it in the mirror, null in newer rows; "drop".',
    )
    tables: dict[str, TableOptions] = Field(
        {},
        description='Other settings for some tables: a section [mirror.tables."schema.table"] each, with '
        "soft_delete and dropped_columns.",
    )

    def options_of(self, qualified_name: str) -> TableOptions:
        """What counts for this table."""
        own = self.tables.get(qualified_name, TableOptions())
        return TableOptions(
            soft_delete=self.soft_delete if own.soft_delete is None else own.soft_delete,
            dropped_columns=own.dropped_columns or self.dropped_columns,
        )

    @field_validator("format", mode="before")
    @classmethod
    def _delta_comes_later(cls, value: Any) -> Any:
        if value == "delta":
            raise ValueError('"iceberg" (delta is not there yet)')
        return value

    @field_validator("catalog")
    @classmethod
    def _catalog_is_a_name(cls, catalog: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", catalog):
            raise ValueError("a name of letters, digits and underscores")
        return catalog

    @field_validator("warehouse")
    @classmethod
    def _warehouse_is_given(cls, warehouse: str) -> str:
        if not warehouse:
            raise ValueError("a folder or a URL")
        return warehouse


class Snapshot(Section):
    initial: Literal["bulk", "none"] = Field(
        "bulk", description='Rows that are there at the first start: "bulk" loads them, "none" begins with the changes.'
    )
    reads_in_log: bool = Field(
        False,
        description="Rows that are there also go into the log, as changes of kind read, for your own readers of it; "
        "the mirror passes them over.",
    )
    connections: int = Field(4, ge=1, le=64, description="How many connections may read at once, over all tables.")
    range_bytes: int = Field(
        128 << 20,
        ge=8192,
        description="How much of a table is read at once, and becomes a file of the lake; what a kill loses is a few.",
    )
    statement_timeout_seconds: float = Field(
        600,
        ge=0,
        description="How long one statement of a load may read; a range that takes longer is halved. 0: no limit.",
    )
    max_age_minutes: float = Field(
        60,
        gt=0,
        description="How long a load reads under one database snapshot, which keeps vacuum from the rows that are dead "
        "since; then it goes on under a new one.",
    )


class Spark(Section):
    master: str = Field("local[*]", min_length=1, description="Where Spark runs.")
    conf: Annotated[dict[str, str], BeforeValidator(_spark_values)] = Field(
        {}, repr=False, description='Further settings of the Spark session, as in { "spark.driver.memory" = "2g" }.'
    )


class Config(Section):
    source: Source = Field(description="Where changes come from.")
    log: Log = Field(Log(), description="The change log, between Postgres and Spark.")
    capture: Capture = Field(Capture(), description="Between the server and the log.")
    mirror: Mirror = Field(Mirror(), description="The tables in the lake.")
    snapshot: Snapshot = Field(Snapshot(), description="Rows that were there before.")
    spark: Spark = Field(Spark(), description="The Spark session of run and mirror.")

    _file: Path = PrivateAttr(default_factory=lambda: Path("pgtide.toml").absolute())

    @property
    def file(self) -> Path:
        """The configuration file, for messages and relative paths; it need not exist."""
        return self._file

    @property
    def log_location(self) -> str:
        """Absolute folder or URL of the log."""
        return self.log.path.rstrip("/") if is_url(self.log.path) else str(self.log_path)

    @property
    def log_path(self) -> Path:
        """The folder of a log that is in one."""
        assert not is_url(self.log.path), f"{self.log.path} is not a folder"
        return self.file.parent / Path(self.log.path).expanduser()

    @property
    def spool_path(self) -> Path:
        """Always a folder: a spool is appended to."""
        if self.capture.spool_path:
            return self.file.parent / Path(self.capture.spool_path).expanduser()
        if is_url(self.log.path):
            # By the log's name: a spool is emptied at start, and two captures may have one folder.
            return self.file.parent / "pgtide-data" / "spool" / self.log_location.partition("://")[2]
        return self.log_path / "spool"

    @property
    def presence_path(self) -> Path:
        """The folder in whose `control/` the capture says how it is: only a file on its own machine can be locked."""
        if is_url(self.log.path):
            return self.file.parent / "pgtide-data" / "capture" / self.log_location.partition("://")[2]
        return self.log_path

    @property
    def warehouse(self) -> str:
        """Absolute folder or URL of the warehouse."""
        if _URL.match(self.mirror.warehouse):
            return self.mirror.warehouse
        return str(self.file.parent / Path(self.mirror.warehouse).expanduser())

    def at(self, file: Path) -> Config:
        """The same configuration as if it had been read from this file."""
        config = self.model_copy()
        config._file = file.absolute()
        return config

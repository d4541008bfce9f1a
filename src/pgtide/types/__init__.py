"""Postgres's types: what a column's type is, how the log stores its values, and what Spark sees of them."""

from __future__ import annotations

from pgtide.types.lake import is_variant, lake_type, to_lake
from pgtide.types.pg_type import Kind, PgType, decimal_precision_scale, storage_type
from pgtide.types.policy import TypePolicy

__all__ = [
    "Kind",
    "PgType",
    "TypePolicy",
    "decimal_precision_scale",
    "is_variant",
    "lake_type",
    "storage_type",
    "to_lake",
]

"""Which tables are meant: globs over `schema.table`, where `!` excludes.

`*`, `?` and `[abc]` as in a shell, case counts, and the order of the patterns does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(tables: Sequence[str], qualified_name: str) -> bool:
    """Whether the patterns mean this table: one includes it and none excludes it."""
    return matches_any(included(tables), qualified_name) and not matches_any(excluded(tables), qualified_name)


def matches_any(globs: Iterable[str], qualified_name: str) -> bool:
    return any(fnmatchcase(qualified_name, glob) for glob in globs)


def included(tables: Sequence[str]) -> tuple[str, ...]:
    return tuple(pattern for pattern in tables if not pattern.startswith("!"))


def excluded(tables: Sequence[str]) -> tuple[str, ...]:
    return tuple(pattern[1:] for pattern in tables if pattern.startswith("!"))


def is_pattern(text: str) -> bool:
    """Whether this reads as `schema.table` or `!schema.table`."""
    namespace, dot, name = text.removeprefix("!").partition(".")
    return bool(namespace and dot and name) and text == text.strip()

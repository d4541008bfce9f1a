"""The MERGE statement that applies a batch: pure text, so that it can be read and tested by itself.

Columns kept by some rows (unchanged TOAST) are filled before the MERGE, by a join of the changes with the target on
the key a row had before the batch; a CASE inside the MERGE could not serve a row whose key changed, because its
new key matches nothing.  The join is there only when a batch has such rows: it reads those columns of the target.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from pgtide.sinks import Changes
from pgtide.sinks.bounds import within
from pgtide.sinks.iceberg_table import quoted

# A column of the source may be called anything, so ours have a prefix with a dot.
PREFIX = "_pgtide."
DELETE = PREFIX + "delete"
LOST_VALUE = "pgtide: an unchanged value is not in the mirror"

# With soft deletes: true in rows that the source has no more.  `_deleted` is a column of Iceberg's own.
DELETED = "_is_deleted"


def keep_name(column: str) -> str:
    """True where the row keeps the target's value of this column."""
    return f"{PREFIX}keep.{column}"


def origin_name(key_column: str) -> str:
    """The key under which the row was known before the batch."""
    return f"{PREFIX}origin.{key_column}"


def merge_statement(target: str, source: str, changes: Changes) -> str:
    columns = _columns(changes.rows)
    soft = changes.soft_delete
    matched = " AND ".join([*(f"t.{quoted(name)} = s.{quoted(name)}" for name in changes.key), *_bounded("t", changes)])
    return (
        f"MERGE INTO {target} t USING ({_source(target, source, changes, columns)}) s ON {matched} "
        f"WHEN MATCHED AND s.{quoted(DELETE)} THEN {f'UPDATE SET t.{DELETED} = true' if soft else 'DELETE'} "
        f"WHEN MATCHED THEN UPDATE SET {_assigned(columns, soft)} "
        f"WHEN NOT MATCHED AND NOT s.{quoted(DELETE)} THEN {_insert(columns, soft)}"
    )


def supersede_statement(target: str, source: str, rows: DataFrame, key: tuple[str, ...]) -> str:
    """Under soft deletes: the source's rows are those that live, all others are marked as deleted.

    Without a key no row is found again: those that live are new ones.
    """
    columns = _columns(rows)
    matched = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in key)
    update = f"WHEN MATCHED THEN UPDATE SET {_assigned(columns, soft=True)} " if key else ""
    return (
        f"MERGE INTO {target} t USING {source} s ON {matched or 'false'} {update}"
        f"WHEN NOT MATCHED THEN {_insert(columns, soft=True)} "
        f"WHEN NOT MATCHED BY SOURCE AND NOT t.{DELETED} THEN UPDATE SET t.{DELETED} = true"
    )


def keep_statement(target: str, rows: str, key: tuple[str, ...]) -> str:
    """Rows whose key the target lacks come as deleted ones; without a key all of them.

    The key may be another than it was, and be null in rows that are long deleted: those are the same, too.
    """
    matched = " AND ".join(f"t.{quoted(name)} <=> s.{quoted(name)}" for name in key)
    return (
        f"MERGE INTO {target} t USING (SELECT * EXCEPT ({DELETED}), true AS {DELETED} FROM {rows}) s "
        f"ON {matched or 'false'} WHEN NOT MATCHED THEN INSERT *"
    )


def _columns(rows: DataFrame) -> list[str]:
    return [name for name in rows.columns if not name.startswith(PREFIX)]


def _assigned(columns: list[str], soft: bool) -> str:
    living = [f"t.{DELETED} = false"] if soft else []
    return ", ".join([*(f"t.{quoted(name)} = s.{quoted(name)}" for name in columns), *living])


def _insert(columns: list[str], soft: bool) -> str:
    names = [*map(quoted, columns), *([DELETED] if soft else [])]
    values = [*(f"s.{quoted(name)}" for name in columns), *(["false"] if soft else [])]
    return f"INSERT ({', '.join(names)}) VALUES ({', '.join(values)})"


def fill_statement(target: str, source: str, columns: list[str]) -> str:
    """All rows get the values of the source's one row."""
    assigned = ", ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in columns)
    return f"MERGE INTO {target} t USING {source} s ON true WHEN MATCHED THEN UPDATE SET {assigned}"


def _source(target: str, source: str, changes: Changes, columns: list[str]) -> str:
    if not changes.kept:
        return f"SELECT * FROM {source}"
    found = f"o.{quoted(changes.key[0])} IS NOT NULL" + (f" AND NOT o.{DELETED}" if changes.soft_delete else "")
    same = (f"o.{quoted(name)} = c.{quoted(origin_name(name))}" for name in changes.key)
    origin = " AND ".join([*same, *_bounded("o", changes)])
    selected = [f"c.{quoted(DELETE)}"]
    for name in columns:
        plain = f"c.{quoted(name)}"
        if name in changes.kept:
            # A value that is nowhere must not become a null.
            kept = f"CASE WHEN {found} THEN o.{quoted(name)} ELSE raise_error('{LOST_VALUE}') END"
            plain = f"CASE WHEN c.{quoted(keep_name(name))} THEN {kept} ELSE {plain} END AS {quoted(name)}"
        selected.append(plain)
    return f"SELECT {', '.join(selected)} FROM {source} c LEFT JOIN {target} o ON {origin}"


def _bounded(alias: str, changes: Changes) -> list[str]:
    return [within(f"{alias}.{quoted(name)}", bounds) for name, bounds in changes.bounds.items()]

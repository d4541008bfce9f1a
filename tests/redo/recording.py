"""A recording, what should come out of it, and what a log has of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from pgtide.change import Op
from pgtide.log.reader import LogReader
from pgtide.redo.files import file_of, numbers, record_files
from pgtide.redo.generator import TABLES, History
from pgtide.redo.reader import Limits
from pgtide.redo.records import Operation, Record

OPS = {Operation.INSERT: Op.INSERT, Operation.UPDATE: Op.UPDATE, Operation.DELETE: Op.DELETE}
READ: dict[str, Callable[[Any], Any]] = {
    "ID": int,
    "TOTAL": Decimal,
    "NOTE": str,
    "TAKEN": datetime.fromisoformat,
    "CODE": bytes.fromhex,
}
NAMES = {table["data_obj"]: f"{table['owner']}.{table['name']}" for table in TABLES}

# So little that nearly everything is spooled, and that transactions enter the log in both ways.
TIGHT = Limits(memory_bytes=20_000, piece_bytes=4_000, checkpoint_bytes=20_000, write_bytes=2_000)

Change = tuple[str, Op, dict[str, Any], dict[str, Any] | None]  # table, what, row, row before


def recorded(folder: Path, seed: int, steps: int, records_per_file: int = 200) -> History:
    history = History(seed, steps)
    record_files(history.records(), folder, records_per_file)
    return history


def expected(history: History) -> list[Change]:
    """By the generator's own account, in commit order."""
    return [_change(record) for transaction in history.committed for record in transaction]


def _change(record: Record) -> Change:
    shown = record.old if record.operation is Operation.DELETE else record.new
    before = record.old if record.operation is Operation.UPDATE else None
    assert shown is not None
    return NAMES[record.data_obj], OPS[record.operation], _values(shown), None if before is None else _values(before)


def _values(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else READ[name](value) for name, value in row.items()}


def found(log_path: Path) -> list[Change]:
    """Everything that a reader of the log can see, by offset."""
    reader = LogReader(log_path)
    rows: list[tuple[int, Change]] = []
    for piece in reader.plan(reader.first_offset(), reader.end().end_offset):
        read = reader.read(piece)
        columns = read.shape.columns
        for row in read.rows.to_pylist():
            values = {column.name: row[column.storage_name] for column in columns}
            updated = row["_op"] == Op.UPDATE
            before = {column.name: row[f"_old.{column.storage_name}"] for column in columns} if updated else None
            rows.append((row["_offset"], (read.shape.qualified_name, Op(row["_op"]), values, before)))
    assert len({offset for offset, _ in rows}) == len(rows)
    return [change for _, change in sorted(rows, key=lambda item: item[0])]


def remove_passed(folder: Path, lsn: int) -> None:
    """The source removes what was read: a reader that needs it again cannot go on."""
    for number in numbers(folder):
        if number < lsn >> 32:
            file_of(folder, number).unlink()

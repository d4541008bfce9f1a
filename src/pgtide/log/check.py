"""A full check of a log: every checksum, the order of offsets and of commits, and that every file is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pgtide.errors import LogCorruptError
from pgtide.log.reader import Block, LogReader


@dataclass
class CheckResult:
    changes: int = 0
    transactions: int = 0
    blocks: int = 0
    problems: list[str] = field(default_factory=list)


def check_log(path: Path) -> CheckResult:
    """Reads everything that readers can see.  A problem does not stop the check of what lies after it, if possible."""
    result = CheckResult()
    log = LogReader(path)
    expected = log.first_offset()
    last_end_lsn = 0
    try:
        for block in log.blocks(expected, log.end().end_offset):
            result.blocks += 1
            where = f"{block.path} at byte {block.position}"
            if block.header.first_offset != expected:
                result.problems.append(f"{where}: begins at offset {block.header.first_offset}, expected {expected}")
            expected = block.header.end_offset
            try:
                last_end_lsn = _check_block(log, block, last_end_lsn, result)
            except LogCorruptError as error:
                result.problems.append(error.what)
    except LogCorruptError as error:
        result.problems.append(error.what)
    return result


def _check_block(log: LogReader, block: Block, last_end_lsn: int, result: CheckResult) -> int:
    directory = log.directory(block)
    offsets: list[int] = []
    for piece in log.slices(block):
        offsets += log.read(piece).rows["_offset"].to_pylist()
    result.changes += len(offsets)
    if len(set(offsets)) != len(offsets):
        result.problems.append(f"{block.path} at byte {block.position}: an offset occurs twice")
    expected = sum(directory.transactions["changes"].to_pylist())
    if expected != len(offsets):
        result.problems.append(f"{block.path} at byte {block.position}: {len(offsets)} changes, expected {expected}")
    for entry in directory.transactions.to_pylist():
        if entry["ends"]:
            result.transactions += 1
            if entry["end_lsn"] <= last_end_lsn:
                result.problems.append(f"{block.path} at byte {block.position}: commits are not in the order of LSNs")
            last_end_lsn = entry["end_lsn"]
    return last_end_lsn

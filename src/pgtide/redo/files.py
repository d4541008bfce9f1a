"""Recorded redo logs: `redo-<number>.jsonl`, numbered without gaps, each line a record.

Where a record is, is told by an LSN as in Postgres, `<number of the file>/<byte>`: it increases along the log, and no
two records share one, as they may share an SCN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pgtide.errors import LogError
from pgtide.redo.records import Record

_NAME = re.compile(r"redo-(\d{10})\.jsonl")


@dataclass(frozen=True, slots=True)
class Located:
    """A record, where it begins and where the next one does."""

    record: Record
    lsn: int
    end_lsn: int


def file_of(folder: Path, number: int) -> Path:
    return folder / f"redo-{number:010d}.jsonl"


def numbers(folder: Path) -> list[int]:
    """The files that are there, ascending."""
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.exists() else ()
    return sorted(int(match[1]) for match in found if match)


def record_files(records: Iterable[Record], folder: Path, records_per_file: int) -> None:
    """Writes a recording."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[bytes] = []
    number = 1
    for record in records:
        if len(lines) == records_per_file:
            file_of(folder, number).write_bytes(b"".join(lines))
            lines, number = [], number + 1
        lines.append(record.encode())
    file_of(folder, number).write_bytes(b"".join(lines))


def read_from(folder: Path, lsn: int) -> Iterator[Located]:
    """All records from there on, up to the last that is whole; more may be written meanwhile, and read by a next call.

    A file that is gone, although reading has not passed it, is an error.
    """
    number, byte = lsn >> 32, lsn & 0xFFFFFFFF
    while True:
        path = file_of(folder, number)
        finished = file_of(folder, number + 1).exists()  # asked first: until then lines may be added
        try:
            with path.open("rb") as file:
                file.seek(byte)
                for line in file:
                    if not line.endswith(b"\n") and not finished:
                        return  # still being written
                    at = number << 32 | byte
                    record = Record.parse(line, f"{path} at byte {byte}")
                    byte += len(line)
                    yield Located(record, at, number << 32 | byte)
        except FileNotFoundError:
            _check_not_missed(folder, number, byte)
            return
        if finished:
            number, byte = number + 1, 0
        elif not file_of(folder, number + 1).exists():
            _check_not_missed(folder, number + 1, 0)
            return


def _check_not_missed(folder: Path, number: int, byte: int) -> None:
    """A file that has not come into being yet may be awaited; one that was there, or has followers, may not."""
    later = [each for each in numbers(folder) if each > number]
    if later or byte:
        raise LogError(
            f"{file_of(folder, number)} is gone, but it has been read only up to byte {byte}",
            remedy="bring the file back from where the source keeps its copies",
        )

"""Names of a log's objects.

What one flush made is `<first offset>.seg`.  It ends where the next one begins, and it may only be created, never
replaced: two writers that go on after the same predecessor want the same name, and one of them gets it.  So what was
flushed is one chain, whoever wrote.  A merged object `<first offset>-<end offset>-<level>.seg` holds the blocks of a
stretch of the chain once more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(\d{20})(?:-(\d{20})-(\d+))?\.seg")


@dataclass(frozen=True, slots=True)
class ObjectName:
    first_offset: int
    end_offset: int | None = None  # of a merged object
    level: int = 0  # 0: flushed; n: merged from objects of level n - 1

    def __str__(self) -> str:
        if self.end_offset is None:
            return f"{self.first_offset:020d}.seg"
        return f"{self.first_offset:020d}-{self.end_offset:020d}-{self.level}.seg"


def parse_name(file: str) -> ObjectName | None:
    """The name of a file of `segments/`, None if it is none of the log's."""
    match = _NAME.fullmatch(file.rpartition("/")[2])
    if match is None:
        return None
    if match[2] is None:
        return ObjectName(int(match[1]))
    return ObjectName(int(match[1]), int(match[2]), int(match[3]))

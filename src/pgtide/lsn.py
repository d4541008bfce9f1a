"""Log sequence numbers: 64-bit integers inside, `16/B374D848` for people.

Everything in pgtide that holds an LSN holds an `int`; the name of the variable says which one
(`commit_lsn`, `end_lsn`, `durable_lsn`).  Zero means "none", as `InvalidXLogRecPtr` does in Postgres.
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def parse_lsn(text: str) -> int:
    """The number behind `XXXXXXXX/XXXXXXXX`, as Postgres prints an LSN."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an LSN: {text!r} (expected two hexadecimal numbers, as in 16/B374D848)")
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """The LSN as Postgres prints it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"

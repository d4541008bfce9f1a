"""Whether the log lacks changes of a table since it was loaded: it was away for a while."""

from __future__ import annotations

from pgtide.log.control import TableHistory
from pgtide.lsn import parse_lsn
from pgtide.sinks import Mark


def has_gap(mark: Mark, history: TableHistory | None, start_lsn: int) -> bool:
    """Also for a load that is under way: what it has read is as of an LSN that the log does not follow from."""
    if history is None:
        return False
    if history.complete_lsn is None:
        return True
    return loaded_lsn(mark, start_lsn) < history.complete_lsn


def loaded_lsn(mark: Mark, start_lsn: int) -> int:
    """As of which LSN the table was loaded; one that was not has all changes since the log began."""
    _, at, lsn = (mark.load or "").rpartition("@")
    return parse_lsn(lsn) if at else start_lsn

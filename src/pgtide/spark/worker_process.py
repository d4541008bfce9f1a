"""Spark's Python processes: quick to begin the next task of ours, and quiet when they end.

Before each task Spark has Python look for new modules, for which the directories of Spark's own zip files are read anew
(0.1 s, Python 3.11), and after each it collects garbage, for which it goes through all that is imported (0.07 s).
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from types import TracebackType
from zipimport import zipimporter


def ready_for_more() -> None:
    """To be called at the end of a task, when everything that it needs is imported."""
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]  # made again by whoever imports from there
    _keep_what_is_imported()


@cache
def _keep_what_is_imported() -> None:
    """Once: what a later task leaves behind is to be collected."""
    gc.collect()
    gc.freeze()


def end_quietly() -> None:
    """To be called by a streaming source that is stopped, in the process that Spark has for it.

    When the query has ended, that process finds its connection closed, cannot tell Spark so, and would print three
    traces to the terminal of whoever has pressed Ctrl-C.
    """
    sys.excepthook = _unless_alone


def _unless_alone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, BrokenPipeError | ConnectionResetError | KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)

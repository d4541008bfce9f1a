"""A reader of redo logs as a process, to be killed: `python -m tests.redo.child FOLDER LOG`."""

from __future__ import annotations

import sys
from pathlib import Path

from pgtide.redo.reader import RedoReader
from tests.redo.recording import TIGHT, remove_passed


def main(folder: Path, log_path: Path) -> None:
    reader = RedoReader(folder, log_path, limits=TIGHT, on_position=lambda lsn: remove_passed(folder, lsn))
    reader.read_all()
    reader.close()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))

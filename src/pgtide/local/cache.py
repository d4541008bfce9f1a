"""Where pgtide keeps what it fetched or prepared once: jars, a template database cluster, copied programs.

`PGTIDE_CACHE` names the folder; without it, a checkout keeps its own in `.cache` (so that removing the checkout
removes everything), and an installed package uses the user's cache folder.  Whatever is put there is made aside and
renamed into place, so a folder that exists is complete, whoever was killed while making it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT_VARIABLE = "PGTIDE_CACHE"


def cache_folder() -> Path:
    """The cache folder; it need not exist yet."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(named).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "pgtide").is_dir():
        return checkout / ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pgtide"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there yet.  Two processes may both make it; the first to finish wins."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        content = aside / "content"
        content.mkdir()
        make(content)
        try:
            content.rename(folder)
        except OSError:
            # A folder with something in it cannot be renamed over: another process was faster, and its work is as good.
            if not folder.is_dir():
                raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(aside)
    return folder

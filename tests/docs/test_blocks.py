"""The documentation is true: every block marked `run` or `file=` in README.md and docs/ works as it stands.

The blocks of one page share a folder and run from top to bottom.  `service=shop` leads to a fresh database.
CONTRIBUTING.md tells how to mark a block.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from tests.database import Database

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    marks: tuple[str, ...]
    body: str
    line: int

    @property
    def runs(self) -> bool:
        return "run" in self.marks

    @property
    def file(self) -> str | None:
        return next((mark.removeprefix("file=") for mark in self.marks if mark.startswith("file=")), None)


def blocks(text: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(text):
        language, *marks = match["info"].split() or [""]
        found.append(Block(language, tuple(marks), match["body"], text.count("\n", 0, match.start()) + 1))
    return found


def pages() -> list[Path]:
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    marked = [page for page in candidates if page.is_file() and any(b.runs or b.file for b in blocks(page.read_text()))]
    return marked or candidates[:1]


def execute(block: Block, folder: Path, environment: dict[str, str]) -> None:
    if block.file is not None:
        (folder / block.file).write_text(block.body)
        return
    command = {"python": [sys.executable, "-c", block.body], "bash": ["bash", "-euo", "pipefail", "-c", block.body]}
    done = subprocess.run(
        command[block.language],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"the block in line {block.line} failed:\n{done.stdout}\n{done.stderr}"


def environment_with_service(database: Database, folder: Path) -> dict[str, str]:
    settings = psycopg.conninfo.conninfo_to_dict(database.dsn)
    service = folder / "pg_service.conf"
    service.write_text("[shop]\n" + "".join(f"{name}={value}\n" for name, value in settings.items()))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{database.server.programs}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": programs, "PGSERVICEFILE": str(service)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_blocks_of_the_page_work(page: Path, database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    environment = environment_with_service(database, tmp_path)
    marked = [block for block in blocks(page.read_text()) if block.runs or block.file is not None]
    assert marked, "no block of the page is marked"
    for block in marked:
        execute(block, folder, environment)  # fails if the block does


def test_a_block_is_known_by_its_marks() -> None:
    text = "a\n```bash run\necho 1\n```\n```toml file=x.toml\na = 1\n```\n```python\nnot run\n```\n"
    first, second, third = blocks(text)
    assert (first.language, first.runs, first.body, first.line) == ("bash", True, "echo 1\n", 2)
    assert (second.file, second.runs) == ("x.toml", False)
    assert (third.runs, third.file) == (False, None)


def test_a_block_that_fails_fails_the_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="line 7"):
        execute(Block("bash", ("run",), "false\ntrue\n", 7), tmp_path, dict(os.environ))


def test_blocks_of_a_page_share_a_folder_and_reach_the_service(database: Database, tmp_path: Path) -> None:
    environment = environment_with_service(database, tmp_path)
    execute(Block("sql", ("file=query.sql",), "SELECT current_database()", 1), tmp_path, environment)
    execute(Block("bash", ("run",), "psql -At service=shop -f query.sql > answer", 2), tmp_path, environment)
    assert (tmp_path / "answer").read_text().strip() == database.name

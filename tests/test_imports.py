"""Imports go one way: each room of the house may use those that the table names, and no others."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

NOUNS = frozenset({"lsn", "change", "schema", "types", "config", "errors", "failpoints", "metrics"})
EVERYTHING = None
ALLOWED: dict[str, frozenset[str] | None] = {
    **dict.fromkeys(NOUNS, NOUNS),
    "decode": NOUNS,
    "replication": NOUNS,
    "transactions": NOUNS | {"log.block", "log.files"},
    "log": NOUNS,
    "snapshot": NOUNS | {"replication", "decode", "log"},
    # A source beside Postgres: it needs the buffer and the log, and nothing that talks to Postgres.
    "redo": NOUNS | {"transactions", "log"},
    "capture": NOUNS | {"replication", "decode", "transactions", "log", "snapshot"},
    "sinks": NOUNS,
    # The first load and verify read Postgres from Spark's workers; sessions are built in one place, pgtide.local.
    "spark": NOUNS | {"log", "decode", "sinks", "local", "replication", "snapshot"},
    "relay": NOUNS | {"log", "spark"},
    "local": NOUNS,
    "cli": EVERYTHING,
    "console": EVERYTHING,
    "demo": EVERYTHING,
    "bench": EVERYTHING,
}
FOR_PEOPLE = {"cli", "console", "demo", "bench"}


def modules() -> list[str]:
    """All modules of pgtide, without the package's name in front: `log.block`."""
    found = []
    for file in sorted((SOURCE / "pgtide").rglob("*.py")):
        parts = file.relative_to(SOURCE / "pgtide").with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in found if name]


def file_of(module: str) -> Path:
    path = SOURCE / "pgtide" / Path(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def imports_of(module: str, text: str) -> Iterator[str]:
    """The modules of pgtide that `text` imports anywhere, inside functions too."""
    known = set(modules())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            base = node.module or ""
            inner = base.removeprefix("pgtide").lstrip(".")
            joined = [f"{inner}.{alias.name}".lstrip(".") for alias in node.names]
            names = (
                [f"pgtide.{name}" if name in known else base for name in joined] if base.startswith("pgtide") else []
            )
        else:
            continue
        for name in names:
            if name.startswith("pgtide."):
                yield name.removeprefix("pgtide.")


def may_import(module: str, imported: str) -> bool:
    room = module.split(".")[0]
    if imported.split(".")[0] == room:
        return True
    allowed = ALLOWED[room]
    if allowed is EVERYTHING:
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in allowed)


def test_every_room_is_in_the_table() -> None:
    assert {name.split(".")[0] for name in modules()} - {"__main__"} <= set(ALLOWED)


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_what_the_table_allows(module: str) -> None:
    if module == "__main__":
        return
    text = file_of(module).read_text()
    wrong = sorted({name for name in imports_of(module, text) if not may_import(module, name)})
    assert not wrong, f"pgtide.{module} imports {wrong}"


def test_the_table_is_held_against_a_module_that_breaks_it() -> None:
    text = "from pgtide.errors import LogError\ndef f():\n    from pgtide.spark import fold\n"
    assert [name for name in imports_of("log.block", text) if not may_import("log.block", name)] == ["spark.fold"]


def test_nothing_imports_what_is_made_for_people() -> None:
    assert all(allowed is None or not FOR_PEOPLE & allowed for allowed in ALLOWED.values())


def test_importing_pgtide_brings_neither_spark_nor_arrow() -> None:
    program = (
        "import sys, pgtide; print(sorted({'pyspark', 'pyarrow', 'numpy', 'psycopg', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

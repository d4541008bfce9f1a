"""The documented table of types is the one that the code has."""

from __future__ import annotations

from pathlib import Path

from pgtide.types.reference import types_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "types.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == types_page(), "run: python -m pgtide.types.reference > docs/reference/types.md"

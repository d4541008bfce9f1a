"""The page about the data source names every option, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from pgtide.spark import options

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "source.md"


def test_every_option_of_the_source_is_on_its_page() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(options.NAMES)

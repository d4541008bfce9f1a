"""What a benchmark found, in the form that can be compared over time."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa


@dataclass
class Result:
    name: str
    ratios: dict[str, float] = field(default_factory=dict)  # ours / theirs, rows per second, median of the repetitions
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)  # every repetition, in order
    not_run: dict[str, str] = field(default_factory=dict)  # peers that could not be run, and why
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment |= environment()

    def add_ratio(self, name: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
        """Pairs of one repetition are compared, so that a slow phase of the machine meets both."""
        pairs = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        self.ratios[name] = round(statistics.median(pairs), 3)
        self.spread[name] = [round(pair, 3) for pair in pairs]

    def add_figure(self, name: str, values: Sequence[float]) -> None:
        self.figures[name] = round(statistics.median(values), 3)
        self.spread[name] = [round(value, 3) for value in values]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(self.to_json() + "\n")
        return path


def environment() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
    }


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


def say(text: str) -> None:
    """Tells whoever watches how far it is; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)

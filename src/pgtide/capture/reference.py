"""The page `docs/reference/metrics.md`, made from the metrics: `python -m pgtide.capture.reference > FILE`."""

from __future__ import annotations

import sys

import pgtide.capture.pipeline
import pgtide.log.load_progress  # noqa: F401 - those of loads, which the mirror's process has
from pgtide.metrics import described

_HEAD = """# Metrics

With `capture.metrics_port` set, `pgtide capture` and `pgtide run` serve them for Prometheus at `/metrics` of that port
([more](../daemon.md)). The mirror loads tables, so the numbers of loads (`pgtide_snapshot_…`) are in its process:
`pgtide run` has all at its one port, and a `pgtide mirror` by itself has these at `mirror.metrics_port`.

This page is made from the code: `python -m pgtide.capture.reference`.

| name | kind | what it tells |
|---|---|---|
"""


def metrics_page() -> str:
    return _HEAD + "".join(f"| `{name}` | {kind} | {meaning} |\n" for name, kind, meaning in described())


if __name__ == "__main__":
    sys.stdout.write(metrics_page())

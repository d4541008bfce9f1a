"""Benchmarks in a size that only shows that they run: what they print, not how fast it was."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pgtide.cli.app import app


def figures_of(*arguments: str) -> dict[str, dict[str, float]]:
    done = CliRunner().invoke(app, ["bench", *arguments, "--small", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.heavy
def test_capture_is_measured_beside_every_peer() -> None:
    found = figures_of("capture")
    peers = {"pg_recvlogical", "pg_recvlogical_defaults", "pg_recvlogical_single_row", "pg_recvlogical_interleaved"}
    assert peers | {"debezium"} == set(found["ratios"]) | set(found["not_run"])
    assert peers <= set(found["ratios"])
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert found["figures"]["rows_per_s"] > 0


def test_a_big_transaction_is_counted_exactly() -> None:
    figures = figures_of("big-transaction")["figures"]
    for suffix in ("", "_savepoints"):
        assert figures[f"rows_in_log{suffix}"] == figures[f"rows_expected{suffix}"] > 0


@pytest.mark.heavy
def test_mirror_is_measured_with_where_its_time_goes() -> None:
    found = figures_of("mirror")
    for suffix in ("", "_interleaved", "_updates"):
        assert found["ratios"][f"pg_recvlogical{suffix}"] > 0
        parts = {f"{part}{suffix}" for part in ("rows_per_s", "capture_s", "read_s", "write_s", "point_s", "batch_s")}
        assert parts <= set(found["figures"])
    assert {"idle_batch_ms_1_table", "idle_batch_ms_20_tables"} <= set(found["figures"])


@pytest.mark.heavy
def test_latency_is_measured_to_the_log_and_to_the_mirror() -> None:
    figures = figures_of("latency")["figures"]
    assert 0 < figures["log_p50_ms"] <= figures["log_p95_ms"]
    assert 0 < figures["mirror_p50_ms"] <= figures["mirror_p95_ms"]

"""The benchmark of the first load in a size that only shows that it runs; it checks the loaded rows itself."""

from __future__ import annotations

import os

import pytest

from pgtide.bench import benchmarks
from pgtide.bench.memory import PeakMemory


@pytest.mark.heavy
def test_a_load_is_measured_beside_copy_and_the_jdbc_source() -> None:
    result = benchmarks()["snapshot"](True)
    for suffix in ("", "_4_tables"):
        assert result.ratios[f"copy_binary{suffix}"] > 0
        assert f"spark_jdbc{suffix}" in result.ratios or f"spark_jdbc{suffix}" in result.not_run
        assert result.figures[f"rows_per_s{suffix}"] > 0
        for kind in ("driver", "jvm", "postgres", "python_worker"):
            assert result.figures[f"peak_rss_mb_{kind}{suffix}"] > 0


def test_memory_of_this_process_is_seen() -> None:
    memory = PeakMemory()
    memory.look(os.getpid())
    assert memory.peaks[os.getpid()][1] > 10
    assert 1 not in memory.peaks, "only processes that come from those asked for"

"""The benchmark of planning runs where there is no Postgres; what it measures is asserted by no test."""

from __future__ import annotations

from pgtide.bench import benchmarks


def test_planning_is_measured_warm_and_cold_for_each_number_of_segments() -> None:
    result = benchmarks()["planning"](True)
    for segments in (10, 100):
        for name in ("warm", "cold_newest", "cold_oldest", "cold_position", "cold_shapes"):
            assert result.figures[f"{name}_ms_{segments}"] > 0
            assert result.figures[f"{name}_cpu_ms_{segments}"] > 0

"""How far a load is: what is told of it, from ranges and rows alone."""

from __future__ import annotations

from pgtide.log.load_progress import LoadProgress, load_line
from pgtide.metrics import exposition


def test_rate_and_time_left_are_those_of_this_run() -> None:
    now = [100.0]
    progress = LoadProgress(lambda: now[0])
    progress.begin("public.progress_test", 1 << 30, ranges=4, ranges_total=16, rows=4000)
    told = progress.report()
    assert (told["rows"], told["ranges"], told["bytes"]) == (4000, 4, 1 << 28)
    assert told["rows_per_s"] is None
    assert told["eta_seconds"] is None
    assert b'pgtide_snapshot_eta_seconds{table="public.progress_test"} -1.0' in exposition()
    now[0] += 10
    progress.loaded(4, 8000)
    told = progress.report()
    assert (told["rows_per_s"], told["eta_seconds"], told["bytes"]) == (400.0, 20.0, 1 << 29)
    assert load_line(told) == "8,000 rows, 0.50 of 1.00 GiB, 8 of 16 ranges, 400 rows/s, about 0:20 min left"
    assert b'pgtide_snapshot_rows{table="public.progress_test"} 8000.0' in exposition()
    progress.made_way()
    progress.made_way()
    assert "8 of 16 ranges, 2 times left to others who lock the table, 400 rows/s" in load_line(progress.report())
    progress.end()
    assert b"progress_test" not in exposition(), "a load that is over is not told any more"
    assert not progress.is_under_way

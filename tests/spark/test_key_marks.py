"""Whether runs of changes have keys in common, told by numbers that stand for keys."""

from __future__ import annotations

import uuid
from itertools import combinations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtide.spark.key_marks import have_none_in_common, joined, key_marks

_LONGS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
_RUNS = st.lists(st.lists(st.tuples(_LONGS, st.integers(0, 3)), max_size=6), min_size=1, max_size=4)


def run(rows: list[tuple[int, int]]) -> pa.Table:
    a, b = zip(*rows, strict=True) if rows else ((), ())
    return pa.table({"c1": pa.array(a, pa.int64()), "c2": pa.array(b, pa.int32())})


@given(_RUNS)
def test_runs_have_keys_in_common_or_not_as_their_keys_say(runs: list[list[tuple[int, int]]]) -> None:
    marks = [joined([key_marks(run(rows), ["c1", "c2"])]) for rows in runs]
    assert have_none_in_common(marks) == all(not set(one) & set(other) for one, other in combinations(runs, 2))


def test_keys_that_rows_had_before_count_and_rows_without_key_do_not() -> None:
    moved = pa.table({"c1": [1, 2, None], "_old.c1": pa.array([None, 7, None], pa.int64())})
    marks = joined([key_marks(moved, ["c1"])])
    assert not have_none_in_common([marks, joined([key_marks(pa.table({"c1": [7]}), ["c1"])])])
    assert have_none_in_common([marks, joined([key_marks(pa.table({"c1": [8, None]}), ["c1"])])])


def test_uuids_are_told_apart_also_in_slices() -> None:
    values = [uuid.uuid4().bytes for _ in range(20)]
    table = pa.table({"c1": pa.array(values, pa.binary(16))})
    first, second, third = (joined([key_marks(table.slice(start, 10), ["c1"])]) for start in (0, 10, 9))
    assert have_none_in_common([first, second])
    assert not have_none_in_common([first, third])


def test_many_keys_that_grow_are_left_to_their_ends() -> None:
    growing, spread = pa.table({"c1": range(2000)}), pa.table({"c1": [n * 7919 % 2000 for n in range(2000)]})
    assert joined([key_marks(growing, ["c1"])]) is None
    assert joined([key_marks(spread, ["c1"])]) is not None


@pytest.mark.parametrize("column", [pa.array(["a"]), pa.array([1.5])])
def test_other_types_are_not_known(column: pa.Array) -> None:
    marks = joined([key_marks(pa.table({"c1": column}), ["c1"])])
    assert marks is None
    assert not have_none_in_common([marks, marks])

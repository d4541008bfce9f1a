"""Arithmetic of ctid ranges, compared with sets of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pgtide.snapshot.ctid_ranges import CtidRange, missing, parse_range, together

END = 12  # "open" reaches as far as any range of the test


@st.composite
def ranges(draw: st.DrawFn) -> CtidRange:
    first = draw(st.integers(0, 9))
    return CtidRange(
        draw(st.integers(1, 2)), draw(st.integers(7, 8)), first, draw(st.none() | st.integers(first + 1, 10))
    )


def blocks(of: list[CtidRange]) -> list[tuple[int, int, int]]:
    return [
        (one.relation_oid, one.file, block)
        for one in of
        for block in range(one.first_block, END if one.end_block is None else one.end_block)
    ]


@given(ranges())
def test_name_tells_the_range(one: CtidRange) -> None:
    assert parse_range(one.name) == one


def test_name_of_something_else_is_no_range() -> None:
    assert parse_range("16384:0-") is None


@given(st.lists(ranges()))
def test_put_together_they_are_the_same_blocks_each_once(some: list[CtidRange]) -> None:
    found = blocks(together(some))
    assert len(found) == len(set(found))
    assert set(found) == set(blocks(some))


@given(st.lists(ranges()), st.lists(ranges()))
def test_missing_is_what_is_wanted_and_not_loaded(wanted: list[CtidRange], loaded: list[CtidRange]) -> None:
    wanted = together(wanted)
    found = blocks(missing(wanted, loaded))
    assert sorted(found) == sorted(set(blocks(wanted)) - set(blocks(loaded)))


@given(ranges(), st.integers(1, 8))
def test_halves_are_the_range(one: CtidRange, about_blocks: int) -> None:
    halves = one.halves(about_blocks)
    if halves is None:
        assert about_blocks < 2 or one.end_block == one.first_block + 1
    else:
        assert halves[0].end_block is not None
        wide = END + 8
        both = [
            block
            for half in halves
            for block in range(half.first_block, wide if half.end_block is None else half.end_block)
        ]
        assert both == list(range(one.first_block, wide if one.end_block is None else one.end_block))

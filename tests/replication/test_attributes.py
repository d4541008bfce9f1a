"""Attribute numbers of a relation message that is older than the catalog."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pgtide.replication.attributes import Attribute, attribute_numbers

INT, TEXT = 23, 25


@dataclass(frozen=True)
class Told:
    name: str
    type_oid: int = INT
    typmod: int = -1
    key: bool = False


def live(attnum: int, name: str, type_oid: int = INT, generated: bool = False) -> Attribute:
    return Attribute(attnum, name, type_oid, -1, 0, False, False, generated)


def dropped(attnum: int) -> Attribute:
    return Attribute(attnum, f"........pg.dropped.{attnum}........", 0, -1, 0, False, True, False)


def numbers(names: str, *attributes: Attribute) -> list[int]:
    return attribute_numbers([Told(name) for name in names], attributes)


def test_columns_are_found_by_name() -> None:
    assert numbers("abc", live(1, "a"), dropped(2), live(3, "b"), live(4, "c"), live(5, "d")) == [1, 3, 4]


def test_a_renamed_column_is_found_by_its_place() -> None:
    assert numbers("abc", live(1, "a"), live(2, "new"), live(3, "c")) == [1, 2, 3]
    assert numbers("abc", live(1, "a"), live(2, "b"), live(3, "new"), live(4, "added")) == [1, 2, 3]


def test_a_column_dropped_since_is_found_by_its_place() -> None:
    assert numbers("abc", live(1, "a"), dropped(2), live(3, "c")) == [1, 2, 3]
    assert numbers("ab", live(1, "a"), dropped(2)) == [1, 2]


def test_a_rename_beside_an_old_hole_is_the_live_one() -> None:
    assert numbers("abc", live(1, "a"), dropped(2), live(3, "new"), live(4, "c")) == [1, 3, 4]


def test_a_column_dropped_and_added_again_is_not_the_new_one() -> None:
    assert numbers("abc", live(1, "a"), dropped(2), live(3, "c"), live(4, "b")) == [1, 2, 3]


def test_what_cannot_be_told_gets_a_number_that_no_attribute_has() -> None:
    assert numbers("abc", live(1, "a"), dropped(2), dropped(3), live(4, "c")) == [1, -2, 4]
    assert numbers("ab", live(1, "a"), dropped(2), live(3, "new")) == [1, -2]
    assert numbers("ab") == [-1, -2]


def test_a_place_with_another_type_is_not_trusted() -> None:
    assert numbers("abc", live(1, "a"), live(2, "new", TEXT), live(3, "c")) == [1, -2, 3]


def test_generated_columns_fill_no_gap_but_are_found_by_name() -> None:
    table = (live(1, "a"), live(2, "g", generated=True), live(3, "c"))
    assert numbers("abc", *table) == [1, -2, 3]
    assert numbers("agc", *table) == [1, 2, 3]


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "drop", "rename"]), st.integers(0, 9)), max_size=12),
       told_at=st.integers(0, 12))  # fmt: skip
def test_a_number_is_right_or_refused_whatever_was_altered(steps: list[tuple[str, int]], told_at: int) -> None:
    """New names are always fresh here: a name that is used again may fool us, and only that."""
    attributes = [live(1, "c1"), live(2, "c2")]
    message = list(attributes)
    for number, (step, place) in enumerate(steps):
        if number == told_at:
            message = [attribute for attribute in attributes if not attribute.dropped]
        present = [at for at, attribute in enumerate(attributes) if not attribute.dropped]
        if step == "add" or not present:
            attributes.append(live(len(attributes) + 1, f"n{number}"))
            continue
        at = present[place % len(present)]
        attnum = attributes[at].attnum
        attributes[at] = dropped(attnum) if step == "drop" else live(attnum, f"n{number}")
    if told_at >= len(steps):
        message = [attribute for attribute in attributes if not attribute.dropped]
    found = attribute_numbers([Told(column.name) for column in message], attributes)
    for position, (number, column) in enumerate(zip(found, message, strict=True)):
        assert number in (column.attnum, -(position + 1))

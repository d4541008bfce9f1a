"""Attribute numbers of a relation message that is older than the catalog."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pgtide.replication.attributes import Attribute, KnownShapes, attribute_numbers, numbered
from pgtide.schema import Column, TableShape
from pgtide.types import PgType

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


@dataclass(frozen=True)
class Message:
    columns: list[Told]
    in_progress: bool = False
    prepared_xid: int = 0
    relation_oid: int = 7
    namespace: str = "public"
    name: str = "t"
    replica_identity: str = "d"


def shape(columns: list[Told], attnums: list[int]) -> TableShape:
    numbered_columns = [
        Column(attnum, column.name, PgType(column.type_oid, "any"))
        for column, attnum in zip(columns, attnums, strict=True)
    ]
    return TableShape(7, "public", "t", "d", tuple(numbered_columns))


def told(*columns: str, type_oid: int = INT) -> list[Told]:
    return [Told(name, type_oid) for name in columns]


def test_a_shape_that_was_known_keeps_its_numbers_when_the_catalog_has_moved_on() -> None:
    known = KnownShapes()
    known.remember(shape(told("a", "b", "c"), [1, 2, 4]))
    now = [live(1, "a"), live(2, "x", TEXT), dropped(3), dropped(4), live(5, "b", TEXT), live(6, "c")]
    assert numbered(Message(told("a", "b", "c")), now, known, None) == [1, 2, 4]


def test_a_column_that_took_the_name_of_a_dropped_one_is_a_new_one() -> None:
    before = shape(told("a", "b", "c"), [1, 2, 3])
    now = [live(1, "a"), dropped(2), live(3, "c"), live(4, "b", TEXT), live(5, "d")]
    message = Message([*told("a", "c"), Told("b", INT)])
    assert numbered(message, now, KnownShapes(), before) == [1, 3, 4]


def test_a_name_that_a_newer_column_has_taken_over_is_still_that_of_the_old_one() -> None:
    known = KnownShapes()
    known.remember(shape(told("id", "a"), [1, 2]))
    now = [live(1, "id"), live(2, "renamed"), live(3, "a")]
    assert numbered(Message(told("id", "a")), now, known, None) == [1, 2]
    assert numbered(Message(told("id", "renamed", "a")), now, known, None) == [1, 2, 3]


def test_a_column_that_is_not_published_is_no_sign_of_an_alteration() -> None:
    now = [live(1, "id"), live(2, "secret"), live(3, "a")]
    assert numbered(Message(told("id", "a")), now, KnownShapes(), None) == [1, 3]


def test_columns_that_have_swapped_names_keep_their_numbers() -> None:
    now = [live(1, "id"), live(2, "b"), live(3, "a"), live(4, "c")]
    assert numbered(Message(told("id", "a", "b", "c")), now, KnownShapes(), None) == [1, 2, 3, 4]
    now = [live(1, "id"), live(2, "b"), live(3, "a", TEXT), live(4, "c")]
    assert numbered(Message(told("id", "a", "b", "c")), now, KnownShapes(), None) == [1, -2, -3, 4]
    now = [live(1, "id"), live(2, "b"), live(3, "other")]
    before = shape(told("id", "a", "b"), [1, 2, 3])
    assert numbered(Message(told("id", "b", "a")), now, KnownShapes(), before) == [1, 2, 3]


def test_what_a_transaction_in_progress_has_altered_is_not_guessed() -> None:
    before, now = shape(told("a", "b"), [1, 2]), [live(1, "a"), live(2, "b")]
    for altered, numbers in (
        (told("a", "b", "new"), [1, 2, -3]),
        (told("a", "renamed"), [1, -2]),
        ([Told("a"), Told("b", TEXT)], [1, -2]),
        (told("a"), [1]),
        (told("b"), [2]),
    ):
        assert numbered(Message(altered, in_progress=True), now, KnownShapes(), before) == numbers


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "drop", "rename", "retype"]), st.integers(0, 9), st.booleans()), max_size=14
)


@given(steps=STEPS, ahead=st.lists(st.integers(0, 14), min_size=15, max_size=15), known_at_start=st.booleans())
def test_numbers_along_a_stream_are_right_or_refused_however_far_the_catalog_is_ahead(
    steps: list[tuple[str, int, bool]], ahead: list[int], known_at_start: bool
) -> None:
    """A message after some of the alterations, each read with the catalog of that moment or of any later one."""
    states = [[live(1, "c1"), live(2, "c2")]]
    for number, (step, place, _) in enumerate(steps):
        state = list(states[-1])
        present = [at for at, attribute in enumerate(state) if not attribute.dropped]
        if step == "add" or not present:
            state.append(live(len(state) + 1, f"n{number}"))
        else:
            at = present[place % len(present)]
            attnum, name, type_oid = state[at].attnum, state[at].name, state[at].type_oid
            state[at] = {
                "drop": dropped(attnum),
                "rename": live(attnum, f"n{number}", type_oid),
                "retype": live(attnum, name, TEXT if type_oid == INT else INT),
            }[step]
        states.append(state)
    known, before = KnownShapes(), None
    if known_at_start:
        known.remember(shape(told("c1", "c2"), [1, 2]))
    seen_at = 0
    for number, state in enumerate(states):
        if number and not steps[number - 1][2]:
            continue
        seen_at = max(seen_at, min(number + ahead[number], len(states) - 1))  # time does not go back
        columns = [attribute for attribute in state if not attribute.dropped]
        message = Message([Told(column.name, column.type_oid) for column in columns])
        found = numbered(message, states[max(seen_at, number)], known, before)
        for position, (attnum, column) in enumerate(zip(found, columns, strict=True)):
            assert attnum in (column.attnum, -(position + 1))
        before = shape(message.columns, found)
        known.remember(before)

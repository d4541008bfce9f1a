"""Folding: what is left of many changes is what applying them one by one leaves."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtide.errors import TableError
from pgtide.schema import Column, TableShape
from pgtide.spark.fold import Folded, fold
from pgtide.types import PgType
from tests.spark.logs import INT4, TEXT, Change, Row, delete, insert, model, offset_rows, table_shape, truncate, update

ORDERS = table_shape()
HSTORE = PgType(16387, "hstore")


def folded(*changes: Change, shape: TableShape = ORDERS) -> Folded:
    """The changes come in pieces of two, as blocks of a log would bring them."""
    pieces = [changes[start : start + 2] for start in range(0, len(changes), 2)]
    return fold(shape, [(piece[0].shape, offset_rows(piece[0].shape, piece)) for piece in pieces])


def applied(before: dict[tuple[Any, ...], Row], result: Folded) -> dict[tuple[Any, ...], Row]:
    """What a MERGE of the folded rows leaves: all rows at once, each value from the state before."""
    shape = result.shape
    names = {column.storage_name: column.name for column in shape.columns}
    keys = [column.storage_name for column in shape.key_columns]
    after = {} if result.truncated else dict(before)
    seen = set()
    for index, stored in enumerate(result.rows.to_pylist()):
        key = tuple(stored[name] for name in keys)
        assert key not in seen, "two rows for one key"
        seen.add(key)
        if result.deleted[index]:
            after.pop(key, None)
            continue
        row = {names[name]: value for name, value in stored.items() if name in names}
        for name, flags in result.kept.items():
            if flags[index]:
                assert result.origins is not None
                origin = tuple(result.origins.column(key_name)[index].as_py() for key_name in keys)
                row[names[name]] = before[origin][names[name]]
        after[key] = row
    return after


def test_a_column_that_nobody_knows_is_refused_and_not_left_out() -> None:
    *others, body = ORDERS.columns
    untold = replace(ORDERS, columns=(*others, replace(body, attnum=-4, name="then")))
    with pytest.raises(TableError, match="then cannot be told"):
        folded(insert(untold, id=1, region="n", amount=1, then="lost"), shape=ORDERS)
    # Dropped since, for all that the table has is there.
    result = folded(
        insert(untold, id=1, region="n", amount=1, then="gone"), shape=replace(ORDERS, columns=tuple(others))
    )
    assert result.rows.column_names == ["c1", "c2", "c3"]


def with_text(rows: pa.RecordBatch, name: str, *texts: str | None) -> pa.RecordBatch:
    """Beside a null, what a storage type could not hold."""
    return rows.append_column(name, pa.array(texts, pa.string()))


@pytest.mark.parametrize("text", ["infinity", "-infinity", "0044-03-15 BC", "NaN"])
def test_row_that_leaves_a_key_that_the_lake_cannot_hold_is_refused(text: str) -> None:
    shape = table_shape(key=("id", "region"))
    change = update(shape, old_key={"id": 1, "region": None}, id=1, region="now")
    rows = with_text(offset_rows(shape, [change]), "_old._text.c2", text)
    with pytest.raises(TableError, match=r"public\.orders\.region: a key has a value") as refused:
        fold(shape, [(shape, rows)])
    assert "pgtide snapshot start public.orders --type bulk" in refused.value.remedy


def test_a_value_that_the_lake_cannot_hold_is_refused_in_keys_only_and_not_before_a_truncate() -> None:
    shape = table_shape(key=("id",))
    rows = with_text(offset_rows(shape, [insert(shape, id=1, region=None)]), "_text.c2", "infinity")
    assert fold(shape, [(shape, rows)]).rows.column("_text.c2").to_pylist() == ["infinity"]
    wider = table_shape(key=("id", "region"))
    with pytest.raises(TableError, match="a key has a value"):
        fold(wider, [(wider, rows)])
    after = offset_rows(wider, [truncate(wider), insert(wider, id=2, region="n")])
    assert fold(wider, [(wider, rows), (wider, after)]).rows.column("c1").to_pylist() == [2]


SPAN = PgType(3904, "int4range", "range", element=INT4)
PLACE = PgType(16500, "place", "composite", fields=(("town", TEXT), ("since", PgType(1082, "date"))))
NUMBERS = PgType(1007, "_int4", "array", element=INT4)


def span(lower: int | None, upper: int | None) -> dict[str, Any]:
    return {"lower": lower, "upper": upper, "lower_inclusive": True, "upper_inclusive": False, "empty": False}


@pytest.mark.parametrize(
    ("of", "one", "other", "third"),
    [
        (SPAN, span(1, 5), span(1, None), span(None, None)),
        (PLACE, {"town": "a", "since": date(2024, 2, 29)}, {"town": "a", "since": None}, {"town": None, "since": None}),
        (NUMBERS, [1, 2], [1, None], []),
    ],
)
def test_keys_of_nested_types_are_told_apart_and_followed_when_they_change(
    of: PgType, one: Any, other: Any, third: Any
) -> None:
    columns = (Column(1, "id", INT4, key=True), Column(2, "part", of, key=True), Column(3, "body", TEXT))
    shape = TableShape(16384, "public", "parts", "d", columns)
    result = folded(
        insert(shape, id=1, part=one, body="first"),
        insert(shape, id=1, part=other, body="second"),
        update(shape, id=1, part=one, body="later"),
        update(shape, old_key={"id": 1, "part": other}, unchanged=["body"], id=1, part=third),
        update(shape, old_key={"id": 2, "part": one}, unchanged=["body"], id=2, part=other),
        shape=shape,
    )
    rows = [(row["c1"], row["c2"], row["c3"]) for row in result.rows.to_pylist()]
    found = {
        (id, repr(part)): None if gone else body
        for (id, part, body), gone in zip(rows, result.deleted.tolist(), strict=True)
    }
    assert len(found) == len(rows), "two rows for one key"
    assert found == {
        (1, repr(one)): "later",
        (1, repr(other)): None,
        (1, repr(third)): "second",
        (2, repr(one)): None,
        (2, repr(other)): None,  # the target has it, under the key it had
    }
    assert result.origins is not None
    kept = np.flatnonzero(result.kept["c3"])
    assert result.origins.take(kept).to_pylist() == [{"c1": 2, "c2": one}]


def test_zero_with_either_sign_is_one_key() -> None:
    columns = (Column(1, "x", PgType(701, "float8"), key=True), Column(2, "body", TEXT))
    shape = TableShape(16384, "public", "places", "d", columns)
    result = folded(
        insert(shape, x=0.0, body="first"), update(shape, old_key={"x": 0.0}, x=-0.0, body="later"), shape=shape
    )
    assert [(row["c1"], row["c2"]) for row in result.rows.to_pylist()] == [(0.0, "later")]
    assert not result.deleted.any()


@pytest.mark.parametrize("of", [HSTORE, PgType(16501, "_hstore", "array", element=HSTORE)])
def test_keys_that_spark_cannot_compare_are_refused(of: PgType) -> None:
    shape = TableShape(16384, "public", "tagged", "d", (Column(1, "tags", of, key=True), Column(2, "body", TEXT)))
    with pytest.raises(TableError, match=r"public\.tagged\.tags: Spark cannot compare keys of type _?hstore"):
        folded(insert(shape, body="x"), shape=shape)


def test_last_change_of_a_key_wins() -> None:
    result = folded(
        insert(ORDERS, id=1, region="n", amount=1),
        insert(ORDERS, id=2, region="n", amount=2),
        update(ORDERS, id=1, region="n", amount=3),
        delete(ORDERS, id=2),
    )
    assert result.rows.select(["c1", "c3"]).to_pylist() == [{"c1": 1, "c3": 3}, {"c1": 2, "c3": None}]
    assert result.deleted.tolist() == [False, True]
    assert result.changes == 4


def test_unchanged_value_comes_from_an_earlier_change_through_two_keys() -> None:
    result = folded(
        insert(ORDERS, id=1, body="large"),
        update(ORDERS, old_key={"id": 1}, unchanged=["body"], id=2, amount=5),
        update(ORDERS, old_key={"id": 2}, unchanged=["body"], id=3, amount=6),
    )
    assert applied({}, result) == {(3,): {"id": 3, "region": None, "amount": 6, "body": "large"}}
    assert result.kept == {}


def test_unchanged_value_of_swapped_keys_comes_from_the_row_it_was_in() -> None:
    before = {(1,): {"id": 1, "body": "one"}, (2,): {"id": 2, "body": "two"}}
    result = folded(
        update(ORDERS, old_key={"id": 1}, unchanged=["body"], id=9),
        update(ORDERS, old_key={"id": 2}, unchanged=["body"], id=1),
        update(ORDERS, old_key={"id": 9}, unchanged=["body"], id=2),
    )
    after = applied(before, result)
    assert {key: row["body"] for key, row in after.items()} == {(1,): "two", (2,): "one"}


def test_nothing_before_a_truncate_counts() -> None:
    result = folded(insert(ORDERS, id=1), truncate(ORDERS), insert(ORDERS, id=2))
    assert result.truncated
    assert result.rows.column("c1").to_pylist() == [2]


def test_rows_of_an_earlier_shape_have_nulls_in_new_columns() -> None:
    later = TableShape(
        ORDERS.relation_oid, "public", "orders", "d", (*ORDERS.columns, Column(7, "note", TEXT))
    )  # fmt: skip
    result = folded(insert(ORDERS, id=1), insert(ORDERS, id=2), insert(later, id=3, note="new"), shape=later)
    assert result.rows.column("c7").to_pylist() == [None, None, "new"]


def test_equal_rows_of_a_table_without_key_all_stay() -> None:
    keyless = table_shape(key=())
    assert folded(insert(keyless, id=1), insert(keyless, id=1), shape=keyless).rows.num_rows == 2


@st.composite
def histories(draw: st.DrawFn) -> tuple[TableShape, dict[tuple[Any, ...], Row], list[Change]]:
    """A table with rows, and changes that Postgres could send for it."""
    shape = table_shape(key=draw(st.sampled_from([("id",), ("id", "region")])))
    keys = (
        st.tuples(st.integers(1, 4), st.sampled_from(["n", "s"])) if len(shape.key_columns) > 1 else st.integers(1, 5)
    )

    def row_of(key: Any) -> Row:
        named = {"id": key, "region": "n"} if isinstance(key, int) else {"id": key[0], "region": key[1]}
        return named | {"amount": draw(st.integers(0, 99)), "body": draw(st.sampled_from(["a", "b", None, "large"]))}

    def key_of(row: Row) -> Row:
        return {column.name: row[column.name] for column in shape.key_columns}

    before = model(shape, [insert(shape, **row_of(key)) for key in draw(st.lists(keys, max_size=5))])
    changes: list[Change] = []
    for _ in range(draw(st.integers(1, 25))):
        now = model(shape, changes, before.values())
        row = row_of(draw(keys))
        exists = tuple(key_of(row).values()) in now
        kind = draw(st.sampled_from(["write", "write", "write", "delete", "move", "move", "truncate"]))
        if kind == "truncate" and draw(st.integers(0, 3)) == 0:
            changes.append(truncate(shape))
        elif kind == "delete" and exists:
            changes.append(delete(shape, **key_of(row)))
        elif kind == "move" and now and not exists:
            source = draw(st.sampled_from(sorted(now.values(), key=str)))
            kept = draw(st.sampled_from([(), ("body",)]))
            shown = {name: value for name, value in row.items() if name not in kept}
            changes.append(update(shape, old_key=key_of(source), unchanged=kept, **shown))
        elif exists:
            kept = draw(st.sampled_from([(), ("body",)]))
            changes.append(update(shape, unchanged=kept, **{k: v for k, v in row.items() if k not in kept}))
        else:
            changes.append(insert(shape, **row))
    return shape, before, changes


@given(histories())
def test_folding_equals_applying_one_by_one(
    history: tuple[TableShape, dict[tuple[Any, ...], Row], list[Change]],
) -> None:
    shape, before, changes = history
    assert applied(before, folded(*changes, shape=shape)) == model(shape, changes, before.values())

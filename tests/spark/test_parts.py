"""A table's changes are cut where its shape changes, and fitted to a table that is ahead of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pgtide.errors import TableError
from pgtide.log.reader import LogReader
from pgtide.schema import Column
from pgtide.spark.fold import fold
from pgtide.spark.parts import fitting, parts_by_shape
from tests.spark.conftest import Mirrored
from tests.spark.logs import INT4, INT8, TEXT, WrittenLog, delete, insert, offset_rows, table_shape, update

ORDERS = table_shape()
LATER = replace(ORDERS, columns=(*ORDERS.columns, Column(5, "vat", INT4, missing="19")))


def test_changes_are_cut_where_the_shape_changes_also_within_a_transaction(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path)
    log.commit(insert(ORDERS, id=1))
    log.commit(insert(ORDERS, id=2), insert(LATER, id=3), insert(LATER, id=4))
    log.commit(insert(LATER, id=5))
    end = log.commit(insert(ORDERS, id=6))
    reader = LogReader(str(tmp_path))
    parts = parts_by_shape(reader.plan(1, end, ORDERS.relation_oid), end)
    assert [(part.fingerprint, part.start, part.end) for part in parts] == [
        (ORDERS.fingerprint, 1, 2),
        (LATER.fingerprint, 2, 5),
        (ORDERS.fingerprint, 5, 6),
    ]
    assert parts_by_shape([], end) == []


def test_changes_from_before_are_fitted_to_a_table_that_has_the_newer_shape_already() -> None:
    wider = replace(LATER, columns=tuple(replace(c, type=INT8) if c.name == "amount" else c for c in LATER.columns))
    shapes = [ORDERS, LATER, wider]
    assert fitting(ORDERS, LATER.fingerprint, shapes) == (LATER.fingerprint, LATER)
    assert fitting(wider, LATER.fingerprint, shapes) == (wider.fingerprint, wider)
    assert fitting(LATER, "of nobody", shapes) == (LATER.fingerprint, LATER)
    rows = offset_rows(ORDERS, [insert(ORDERS, id=1, amount=5)])
    folded = fold(wider, [(ORDERS, rows)]).rows
    assert folded.to_pylist() == [{"c1": 1, "c2": None, "c3": 5, "c4": None, "c5": 19}]


def test_column_that_nobody_can_tell_is_left_out_only_if_the_table_has_lost_it() -> None:
    untold = replace(ORDERS, columns=(*ORDERS.columns, Column(-5, "secret", TEXT)))
    assert fitting(untold, "", [untold, ORDERS]) == (untold.fingerprint, ORDERS)
    for shapes in ([ORDERS, untold], [ORDERS, untold, LATER]):
        with pytest.raises(TableError, match="secret was then cannot be told"):
            fitting(untold, ORDERS.fingerprint, shapes)


BY_REGION = table_shape(key=("region",))


def test_changes_are_fitted_with_the_key_that_they_came_with() -> None:
    keyless, without_region = table_shape(key=()), replace(ORDERS, columns=ORDERS.columns[:1] + ORDERS.columns[2:])
    for captured in (BY_REGION, keyless):
        assert fitting(captured, ORDERS.fingerprint, [captured, ORDERS]) == (ORDERS.fingerprint, captured)
        fitted = fitting(captured, LATER.fingerprint, [captured, ORDERS, LATER])[1]
        assert (fitted.key_columns, len(fitted.columns)) == (captured.key_columns, 5)
    with pytest.raises(TableError, match="has lost region, by which its earlier changes say whose they are"):
        fitting(BY_REGION, without_region.fingerprint, [BY_REGION, without_region])


def test_a_change_without_its_key_is_refused_and_not_passed_over() -> None:
    with pytest.raises(TableError, match=r"orders\.id: a change does not say the key of its row"):
        fold(ORDERS, [(BY_REGION, offset_rows(BY_REGION, [delete(BY_REGION, region="n")]))])


def test_rows_are_found_by_each_key_when_a_table_changes_its_key_and_changes_it_back(mirrored: Mirrored) -> None:
    rows = {number: {"id": number, "region": f"r{number}"} for number in range(1, 5)}
    mirrored.log.commit(*(insert(ORDERS, **row) for row in rows.values()))
    mirrored.run()
    mirrored.log.commit(
        delete(BY_REGION, region="r1"),
        update(BY_REGION, id=20, region="r2"),
        update(BY_REGION, {"region": "r3"}, id=3, region="r33"),
    )
    mirrored.log.commit(insert(ORDERS, id=5, region="r5"))
    mirrored.run()
    regions = {key[0]: row["region"] for key, row in mirrored.rows(ORDERS).items()}
    assert regions == {3: "r33", 4: "r4", 5: "r5", 20: "r2"}

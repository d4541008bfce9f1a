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
from tests.spark.logs import INT4, INT8, TEXT, WrittenLog, insert, offset_rows, table_shape

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

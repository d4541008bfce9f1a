"""What has to happen to a mirror table's columns, by their attribute numbers; what could lose something is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pyspark.sql.types import LongType

from pgtide.config import TableOptions
from pgtide.errors import TableError
from pgtide.schema import Column, TableShape
from pgtide.sinks import Alterations, Version
from pgtide.spark.rows import table_schema
from pgtide.spark.targets import layout_for
from pgtide.types import PgType
from tests.spark.logs import INT4, INT8, TEXT, table_shape

ORDERS = table_shape()
pytestmark = pytest.mark.usefixtures("spark")


def altered(shape: TableShape, *columns: Column, without: str = "") -> TableShape:
    """The shape with other columns under the same numbers, and with new ones."""
    now = {column.attnum: column for column in shape.columns if column.name != without}
    now |= {column.attnum: column for column in columns}
    return replace(shape, columns=tuple(now[number] for number in sorted(now)))


def version_of(shape: TableShape, before: Version | None = None) -> Version:
    """A table that has this shape."""
    layout = layout_for(shape, before)
    return Version("`lake`.`public`.`orders`", 1, True, None, properties=layout.properties)


def test_the_same_shape_needs_nothing() -> None:
    layout = layout_for(ORDERS, version_of(ORDERS))
    assert layout.alterations == Alterations()
    assert layout.properties == version_of(ORDERS).properties


def test_columns_that_swap_their_names_are_renamed() -> None:
    layout = layout_for(altered(ORDERS, Column(2, "body", TEXT), Column(4, "region", TEXT)), version_of(ORDERS))
    assert layout.alterations == Alterations(renamed={"region": "body", "body": "region"})


def test_types_become_wider_and_never_narrower() -> None:
    wider = altered(ORDERS, Column(3, "amount", INT8))
    assert layout_for(wider, version_of(ORDERS)).alterations == Alterations(widened={"amount": LongType()})
    with pytest.raises(TableError, match="amount was bigint and is int"):
        layout_for(altered(wider, Column(3, "amount", INT4)), version_of(wider))


def test_default_fills_older_rows_and_what_the_lake_cannot_default_is_written() -> None:
    numbers = PgType(1007, "_int4", "array", element=INT4, dimensions=1)
    later = altered(
        ORDERS, Column(5, "n", INT4, missing="7"), Column(6, "ns", numbers, missing="{1,2}"), Column(7, "x", INT4)
    )
    layout = layout_for(later, version_of(ORDERS))
    assert layout.alterations == Alterations(defaults={"n": 7})
    assert {name: value.to_pylist() for name, value in layout.unfilled.items()} == {"ns": [[1, 2]]}
    broken_off = replace(version_of(ORDERS), properties=layout.interim)
    again = layout_for(later, broken_off)
    assert (again.alterations, list(again.unfilled)) == (Alterations(), ["ns"])
    assert again.properties == layout.properties
    assert layout_for(later, replace(broken_off, properties=layout.properties)).unfilled == {}


def test_dropped_column_stays_and_makes_way_for_a_new_one_of_its_name() -> None:
    without = altered(ORDERS, without="body")
    layout = layout_for(without, version_of(ORDERS))
    assert layout.alterations == Alterations()
    assert (layout.live.names, layout.columns.names) == (["id", "region", "amount"], ["id", "region", "amount", "body"])
    anew = layout_for(altered(without, Column(5, "Body", INT4)), version_of(without, version_of(ORDERS)))
    assert anew.alterations == Alterations(renamed={"body": "body_dropped_4"})
    assert anew.columns.names == ["id", "region", "amount", "Body", "body_dropped_4"]


def test_dropped_column_goes_if_that_is_wanted() -> None:
    drop = TableOptions(dropped_columns="drop")
    layout = layout_for(altered(ORDERS, Column(5, "body", INT4), without="body"), version_of(ORDERS), drop)
    assert layout.alterations == Alterations(dropped=frozenset({"body"}))
    assert layout.columns.names == layout.live.names == ["id", "region", "amount", "body"]


def test_column_that_comes_back_is_told_and_not_guessed() -> None:
    without = altered(ORDERS, without="body")
    for options in (None, TableOptions(dropped_columns="drop")):
        gone = replace(version_of(ORDERS), properties=layout_for(without, version_of(ORDERS), options).properties)
        with pytest.raises(TableError, match="body is sent again"):
            layout_for(ORDERS, gone, options)


@pytest.mark.parametrize("name", ["_file", "_POS", "_row_id"])
def test_names_that_are_iceberg_s_own_are_refused(name: str) -> None:
    with pytest.raises(TableError, match=f"a column {name.lower()}, which is a name of Iceberg's own") as refused:
        layout_for(altered(ORDERS, Column(5, name, TEXT)), None)
    assert "Rename it in the source" in refused.value.remedy


ADDRESS = PgType(
    17001, "address", "composite",
    fields=(("city", TEXT), ("street name", TEXT), ("no.", PgType(17002, "no", "composite", fields=(("a`b", INT4),)))),
)  # fmt: skip


def test_fields_may_have_any_names() -> None:
    shape = altered(ORDERS, Column(5, "address", PgType(17003, "_address", "array", element=ADDRESS)))
    version = version_of(shape)
    assert layout_for(shape, version).alterations == Alterations()
    dropped = layout_for(altered(shape, without="address"), version)
    assert dropped.columns["address"] == table_schema(shape)["address"]
    with pytest.raises(TableError, match=r"address was array<struct<city:string,`street name`:string.* and is bigint"):
        layout_for(altered(shape, Column(5, "address", INT8)), version)


def test_types_that_were_noted_without_quotes_are_those_that_they_were() -> None:
    shape = altered(ORDERS, Column(5, "address", ADDRESS))
    noted = json.loads(version_of(shape).properties["pgtide.attnums"])
    noted["5"]["type"] = table_schema(shape)["address"].dataType.simpleString()
    older = replace(version_of(shape), properties={"pgtide.attnums": json.dumps(noted)})
    layout = layout_for(shape, older)
    assert layout.alterations == Alterations()
    assert layout.properties == version_of(shape).properties
    with pytest.raises(
        TableError, match="address, which the source no longer has, has a type that an older version noted"
    ):
        layout_for(altered(shape, without="address"), older)
    with pytest.raises(TableError, match=r"address was struct<.* and is bigint"):
        layout_for(altered(shape, Column(5, "address", INT8)), older)

"""The views of a point: one per table, under names that stay."""

from __future__ import annotations

from typing import Any

import pytest

from pgtide.errors import PgtideError
from pgtide.spark.at import Point, view_names


def test_views_have_the_tables_names_or_the_schemas_too_where_these_collide_in_any_case() -> None:
    assert view_names(["a.items", "a.Orders", "b.orders"]) == {
        "a.items": "items",
        "a.Orders": "a_Orders",
        "b.orders": "b_orders",
    }


@pytest.mark.parametrize(
    ("tables", "both"),
    [
        (["public.Orders", "public.orders"], "public.Orders and public.orders would be the same view"),
        (["a.x", "b.x", "c.a_x"], "a.x and c.a_x would be the same view, a_x"),
    ],
)
@pytest.mark.parametrize("covered", [1, None])
def test_tables_that_would_share_a_view_are_refused_before_any_is_made(
    tables: list[str], both: str, covered: int | None
) -> None:
    """Whether or not the point covers all of them: what works must not depend on what is parked."""
    no_session: Any = None
    versions = {name: number for number, name in enumerate(tables[:covered])}
    others = tuple(tables[len(versions) :])
    point = Point(100, None, 1, versions, others, no_session, no_session)
    with pytest.raises(PgtideError, match=both):
        point.create_views()

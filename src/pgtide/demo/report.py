"""What the demo says at its end: to people in a few lines, to programs as one JSON object.  Only what was checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal

from pgtide.demo.books import Books
from pgtide.demo.proof import Proof


def as_json(proof: Proof, restarts: int, seconds: float) -> str:
    tables = {
        name: {"source_rows": found.source_rows, "mirror_rows": found.mirror_rows, "mismatches": found.mismatches}
        for name, found in proof.tables.items()
    }
    return json.dumps(
        {
            "tables": tables,
            "mismatches": proof.mismatches,
            "books_balance": proof.books_balance,
            "restarts": restarts,
            "consistent_lsn": proof.latest.lsn,
            "seconds": round(seconds, 1),
        },
        indent=2,
    )


def as_text(proof: Proof, restarts: int, transactions: int, seconds: float) -> Iterator[tuple[str, bool]]:
    """Lines, each with whether it is good news."""
    from pgtide.spark.comparison import described, shown

    kills = f"{restarts} kill{'' if restarts == 1 else 's'}"
    head = f"after {transactions:,} transactions and {kills}, in {seconds:.0f} s"
    yield (f"Proved {head}:" if proof.holds else f"NOT proved {head}:"), proof.holds
    yield from _books("the latest consistent point", proof.latest)
    yield from _books("a point from before the kill", proof.earlier)
    rows = sum(found.source_rows for found in proof.tables.values())
    if not proof.mismatches:
        names = ", ".join(proof.tables)
        yield f"  Every mirror equals its source, {rows:,} rows compared row for row, column for column: {names}.", True
    for name, found in proof.tables.items():
        if found.mismatches:
            yield f"  {name}: {described(found)}", False
            yield from ((f"    {shown(example)}", False) for example in found.examples)


def _books(where: str, books: Books) -> Iterator[tuple[str, bool]]:
    at = f"{where} ({books.lsn})"
    if books.balance:
        yield (
            (
                f"  At {at} the books balance: {books.orders:,} orders of {_money(books.ordered)} = their items "
                "= their payments; "
                f"stock and ordered goods are {books.goods:,} pieces, as on the first day."
            ),
            True,
        )
        return
    yield f"  At {at} the books do not balance:", False
    yield f"    orders {_money(books.ordered)}, items {_money(books.itemised)}, payments {_money(books.paid)}", False
    yield f"    {books.unbalanced:,} orders that their items or payments do not add up to", False
    yield (
        f"    {books.without_customer:,} orders without customer, {books.without_product:,} items without product",
        False,
    )
    yield f"    {books.goods:,} pieces of goods, {books.goods_expected:,} expected", False


def _money(amount: Decimal | None) -> str:
    return "nothing" if amount is None else f"{amount:,.2f}"

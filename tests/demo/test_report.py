"""What the demo says at its end is what was found, and the exit code follows it."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from pgtide import demo
from pgtide.demo import report
from pgtide.demo.books import Books
from pgtide.demo.proof import Proof, proof_from_json
from pgtide.demo.shop import TABLES
from pgtide.demo.story import Story
from pgtide.spark.comparison import Comparison, Difference

BALANCED = Books("0/AB", 3, Decimal(60), Decimal(60), Decimal(60), 0, 0, goods=20, without_product=0, goods_expected=20)
EQUAL = Comparison(5, 5, missing=0, extra=0, differing=0)
GOOD = Proof(BALANCED, replace(BALANCED, lsn="0/AA"), {table.name: EQUAL for table in TABLES})
LOST = Difference("missing", {"id": "7"}, {"id": "7", "note": None}, None)
LOST_A_ROW = replace(
    GOOD,
    tables=GOOD.tables | {"orders": replace(EQUAL, mirror_rows=4, missing=1, examples=(LOST,))},
)
UNBALANCED = replace(GOOD, earlier=replace(BALANCED, unbalanced=2))
PARTIAL = replace(GOOD, tables={"orders": EQUAL})


def text_of(proof: Proof) -> str:
    return "\n".join(line for line, _ in report.as_text(proof, 1, 100, 60.0))


def test_a_proof_survives_its_way_between_processes() -> None:
    for proof in (GOOD, LOST_A_ROW, UNBALANCED):
        assert proof_from_json(proof.to_json().encode()) == proof


def test_json_has_the_agreed_keys() -> None:
    found = json.loads(report.as_json(LOST_A_ROW, restarts=1, seconds=61.234))
    assert found == {
        "tables": {
            table.name: {"source_rows": 5, "mirror_rows": 5, "mismatches": 0}
            for table in TABLES
            if table.name != "orders"
        }
        | {"orders": {"source_rows": 5, "mirror_rows": 4, "mismatches": 1}},
        "mismatches": 1,
        "books_balance": True,
        "restarts": 1,
        "consistent_lsn": "0/AB",
        "seconds": 61.2,
    }


def test_a_proof_that_holds_is_told_as_one() -> None:
    assert GOOD.holds
    text = text_of(GOOD)
    assert text.startswith("Proved after 100 transactions and 1 kill")
    assert "25 rows compared" in text
    assert "NOT" not in text


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (LOST_A_ROW, "orders: 5 rows in the source, 4 in the mirror; 1 missing"),
        (LOST_A_ROW, "id = '7': only in the source: id = '7', note = NULL"),
        (UNBALANCED, "At a point from before the kill (0/AB) the books do not balance"),
    ],
)
def test_a_proof_that_fails_says_what_is_wrong(proof: Proof, words: str) -> None:
    assert not proof.holds
    text = text_of(proof)
    assert text.startswith("NOT proved")
    assert words in text


def test_a_proof_that_left_a_table_out_does_not_hold() -> None:
    assert not PARTIAL.holds


@pytest.mark.parametrize(("proof", "code"), [(GOOD, 0), (LOST_A_ROW, 1), (UNBALANCED, 1), (PARTIAL, 1)])
def test_the_exit_code_is_0_only_if_the_proof_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proof: Proof, code: int
) -> None:
    monkeypatch.setattr(Story, "tell", lambda _: proof)
    assert demo.run(as_json=True) == code
    assert json.loads(capsys.readouterr().out)["mismatches"] == proof.mismatches

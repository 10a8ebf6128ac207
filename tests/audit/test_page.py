"""The page: threat model first, then the verdict, the table, pictures and remedies; reasons where nothing applies."""

from __future__ import annotations

import re

import torch

from situs.audit.gate import Limit, Ruling
from situs.audit.gradients import Audit, Pair, Step
from situs.audit.metrics import measure_all
from situs.audit.page import COLUMNS, make_page, reasons, table

REAL = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def example(*pairs: Pair) -> Audit:
    scores = {"mean image": measure_all(REAL.flip(0), REAL, 8)}
    return Audit("a-model", Step(), ["a", "b", "c"], REAL, list(pairs), scores, {"none": "as it is"})


SCORES = measure_all(REAL, REAL, 8)
FACTS = [{"rank": 4 - i, "unknowns": 4, "condition": (20.0, 10.0, None)[i]} for i in range(3)]
WORKED = Pair("patchembed", "none", None, "a caveat", SCORES, FACTS, REAL)
REFUSED = Pair("april", "none", "there is <no> table")


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_order_of_the_page() -> None:
    text = make_page(example(WORKED, REFUSED), {"seed": 0}, Ruling(Limit("psnr", 20), ["a leak"], True)).render()
    assert headings(text) == [
        "Threat model",
        "Verdict",
        "Attacks and defences",
        "Pictures",
        "What would reduce the leak",
        "How this page was made",
    ]
    assert "3 of 3 images recovered exactly from one step" in text
    assert "there is &lt;no&gt; table" in text
    assert "The gate psnr=20 is not passed: a leak." in text
    assert text.count("<img") == 1


def test_a_model_without_an_attack_has_reasons_and_no_empty_table() -> None:
    text = make_page(example(REFUSED), {}, Ruling(Limit("psnr", 20), [], False)).render()
    assert "No attack applies" in text
    assert "there is &lt;no&gt; table" in text
    assert "Pictures" not in headings(text)
    assert "passed only because no attack applies" in text


def test_table_and_reasons() -> None:
    header, rows = table(example(WORKED, REFUSED))
    assert len(header) == 3 + len(COLUMNS) + 2
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][:4] == ["patchembed", "none", "3 of 3", "200 [200, 200]"]
    assert rows[0][-2:] == ["2 of 4", "20"]  # the least rank, the median condition
    assert rows[1][2] == "does not apply"
    assert rows[2][:2] == ["baseline", "mean image"]
    assert reasons(example(WORKED, REFUSED)) == [
        ("patchembed against none", "a caveat"),
        ("april against none", "there is <no> table"),
    ]

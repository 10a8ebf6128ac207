"""The page: threat model first, then the verdict, the table, pictures and remedies; reasons where nothing applies."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from situs.audit.gate import Limit, Ruling
from situs.audit.gradients import Audit, Pair, Step, verdict
from situs.audit.metrics import measure_all
from situs.audit.page import COLUMNS, grid, make_page, reasons, table

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


def test_the_same_reason_of_several_defences_is_said_once() -> None:
    refused = [Pair("april", defence, "no table") for defence in ("none", "noise")]
    assert reasons(example(*refused, REFUSED)) == [
        ("april against none | noise", "no table"),
        ("april against none", "there is <no> table"),
    ]
    labels = ("none", "noise", "clip")
    audit = replace(example(*(Pair("april", name, "no table") for name in labels)), about=dict.fromkeys(labels, ""))
    assert reasons(audit) == [("april against every defence", "no table")]


def test_an_attack_that_solves_a_system_for_some_images_only() -> None:
    """adaptive-mjp: rank and condition where nothing is hidden, other facts where something is."""
    facts = [{"hidden": 3}, {"rank": 3, "unknowns": 4, "condition": 7.0}, {"hidden": 2}]
    _, rows = table(example(Pair("adaptive-mjp", "mjp", None, None, SCORES, facts, REAL)))
    assert rows[0][-2:] == ["3 of 4", "7"]
    _, rows = table(example(Pair("adaptive-mjp", "mjp", None, None, SCORES, facts[:1] * 3, REAL)))
    assert rows[0][-2:] == [None, None]


def test_a_pair_that_was_stopped() -> None:
    """Its count in the table, its iterations as a range, and no vote for the attack that merely saw more images."""
    short = {name: None if values is None else values[:1] for name, values in SCORES.items()}
    searched = [{"distance": 0.5, "iterations": done, "restarts": 2} for done in (9, 4, 4)]
    poor = Pair("matching", "none", None, None, measure_all(REAL.flip(0), REAL, 8), searched, REAL.flip(0))
    cut = Pair("patchembed", "none", None, None, short, FACTS[:1], REAL[:1], partial="1 of 3 images")
    found = replace(example(poor, cut), stopped="Ctrl-C", undone=[("april", "none")])
    assert "1 of 1 images recovered exactly from one step (best attack patchembed" in verdict(found)
    assert table(found)[1][1][2] == "1 of 1, stopped"
    assert grid(found) == (
        ["attack", "none"],
        [
            ["matching", f"{poor.mean_psnr:.3g} dB, 1 of 3"],
            ["patchembed", "200 dB, 1 of 1, stopped"],
            ["april", "not attacked"],
        ],
    )
    text = make_page(found, {}).render()
    assert (
        "The worst that was found: 1 of 1 images recovered exactly from one step (patchembed, no defence added)."
        in text
    )
    assert "4 to 9 iterations from 2 starts" in text
    assert "Of a pair that was stopped they are over the images it had come to" in text
    assert "Stopped after 1 of 3 images." in text
    assert "not attacked before the stop: april against none." in text


def test_what_was_not_measured_has_no_column() -> None:
    text = make_page(example(WORKED), {}).render()
    assert "LPIPS was not measured" in text and ">LPIPS</th>" not in text
    scores = {**SCORES, "lpips": [0.0, 0.1, 0.2]}
    text = make_page(example(replace(WORKED, scores=scores)), {}).render()
    assert "LPIPS was not measured" not in text and ">LPIPS</th>" in text


def test_the_headline_names_bytes_or_what_is_left_to_see() -> None:
    read = replace(WORKED, facts=[{**fact, "bytes": True} for fact in FACTS])
    assert "3 of 3 images recovered exactly from one step, all to the last byte (patchembed, no defence added)" in (
        make_page(example(read), {}).render()
    )
    poor = Pair("matching", "noise", None, None, measure_all(REAL * 0.5, REAL, 8), [{}] * 3, REAL * 0.5)
    text = make_page(example(poor), {}).render()
    assert "no image recovered exactly from one step; mean PSNR" in text and "(matching, against noise)" in text


def test_remedies_are_for_what_was_found() -> None:
    assert "gradient of the position table" in make_page(example(WORKED), {}).render()
    none = make_page(example(REFUSED), {}).render()
    assert "gradient of the position table" not in none and "differential privacy" in none

"""What the page says in words follows from the rows, with the mask known and hidden."""

from __future__ import annotations

from typing import Any

import torch

from situs.measure.consistency import Consistency, ConsistencyCurve
from situs.pages import make_page as page


def row(ratio: float, mask_known: bool, share: float | None, norm: float) -> Consistency:
    return Consistency(ratio, int(16 * ratio), mask_known, 200, share, norm, norm**2, share, 4.0)


def curve(rows: list[Consistency], **fields: Any) -> ConsistencyCurve:
    given: dict[str, Any] = {"reads": "CLS token", "unknown": None, "no_mask": None, "grid": (4, 4)}
    return ConsistencyCurve(rows, **{**given, **fields})


def test_a_network_that_cannot_know_the_mask_says_why() -> None:
    rows = [row(ratio, False, 1 - ratio, 2 * ratio) for ratio in (0.0, 0.25, 0.5)]
    why = "only its pixels are shuffled"
    found = curve(rows, no_mask=why, no_top1="no labels", example=torch.rand(3, 32, 32))
    drawn = page(found)
    text = drawn.render()
    assert drawn.lead == found.summary().sentence
    assert drawn.lead == (
        "With 25 % of the patches shuffled and the mask hidden from the model, 75.0 % of 200 answers stay the same, "
        "and the CLS token changes by 0.5 (12.5 % of its length)."
    )
    assert f"Mask known: {why}." in text
    assert "There is no top-1: no labels." in text
    assert sorted(drawn.pictures) == ["images", "norms", "shares"]


def test_a_mask_of_one_patch_or_none_is_no_shuffle() -> None:
    """At γ = 0.05 and 0.1 a mask holds none and one of 16 patches: that no answer changed says nothing."""
    still = [row(ratio, False, 1.0, 0.0) for ratio in (0.05, 0.1)]
    said = curve(still).summary().sentence
    assert said.startswith("Nothing was shuffled") and "one of 16 patches" in said
    found = curve([*still, row(0.5, False, 0.25, 1.0)])
    assert "50 % of the patches shuffled and the mask hidden from the model, 25.0 % of" in found.summary().sentence
    assert "A mask with fewer than two patches has no patches to shuffle." in page(found).render()


def test_mask_known_and_without_classifier() -> None:
    found = curve([row(0.5, known, None, 1.0 + known) for known in (False, True)], unknown="a zero vector")
    assert found.summary().sentence == (
        "With 50 % of the patches shuffled and the mask hidden from the model, the CLS token changes by 1 (25.0 % of "
        "its length). With the mask known, the CLS token changes by 2."
    )
    drawn = page(found)
    text = drawn.render()
    assert " gets a zero vector." in text
    assert sorted(drawn.pictures) == ["norms"]  # no empty axes where there are no answers

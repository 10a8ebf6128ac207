"""What the page says in words follows from the rows, with the mask known and hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
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
        "and the CLS token changes by 0.5 (12.5 % of its norm)."
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
        "its norm). If the model knows the mask, the CLS token changes by 2."
    )
    drawn = page(found)
    text = drawn.render()
    assert " gets a zero vector." in text
    assert sorted(drawn.pictures) == ["norms"]  # no empty axes where there are no answers


@pytest.mark.parametrize("kinds", [(False,), (True, False)])
def test_what_the_figures_draw(kinds: tuple[bool, ...]) -> None:
    ratios = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    rows = [row(ratio, known, 1 - ratio / (1 + known), ratio + known) for ratio in ratios for known in kinds]
    picture = torch.rand(3, 16, 16)
    shares, norms, images = curve(rows, example=picture, seed=4).figures()
    for known in kinds:
        words = "mask known" if known else "mask hidden"
        right = [100 * (1 - ratio / (1 + known)) for ratio in ratios]
        for name in ("consistency", "top-1"):
            assert shares.values[0][f"{name}, {words}"] == (ratios, pytest.approx(right))
        assert norms.values[0][words] == (ratios, pytest.approx([ratio + known for ratio in ratios]))
    assert len(shares.values[0]) == 2 * len(kinds) and len(norms.values[0]) == len(kinds) + 1
    assert norms.values[0]["‖F(x)‖ itself, for scale"] == ([each.ratio for each in rows], [4.0] * len(rows))
    shown, titles, masks, grid = images.values
    assert titles == [f"γ = {ratio:g}" for ratio in ratios[:8]] and grid == (4, 4)  # eight fit in a row
    assert [int(mask.sum()) for mask in masks] == [int(16 * ratio) for ratio in ratios[:8]]
    for moved, mask in zip(shown, masks, strict=True):
        inside = mask.view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1).bool()
        assert torch.equal(moved[:, ~inside], picture[:, ~inside])
        assert torch.equal(moved.flatten().sort().values, picture.flatten().sort().values)
    assert not torch.equal(shown[7], picture)
    other = curve(rows, example=picture, seed=5).figures()[-1].values[2]
    assert any(not torch.equal(a, b) for a, b in zip(masks, other, strict=True))


def test_the_first_screen_has_the_fewest_answers_that_stay() -> None:
    rows = [
        row(0.25, False, 0.5, 1.0),
        row(0.5, False, 0.25, 3.0),
        row(0.75, False, 0.25, 2.0),
        row(0.9, True, 0.0, 9.0),
    ]
    assert curve(rows).summary().numbers == (
        ("25.0 %", "of answers stay the same at γ = 0.75 with the mask hidden"),  # of equal ones the largest γ
        ("50.0 %", "relative change of the CLS token at γ = 0.75 with the mask hidden"),
    )
    assert curve([rows[-1], replace(row(0.5, False, None, 0.0), clean_norm=0.0)]).summary().numbers == ()
    early = [row(0.25, False, 0.25, 1.0), row(0.9, False, 0.5, 1.0)]
    assert curve(early).summary().numbers[0] == ("25.0 %", "of answers stay the same at γ = 0.25 with the mask hidden")


def test_the_sentence_speaks_of_the_ratio_nearest_to_the_papers() -> None:
    rows = [row(ratio, False, 0.5, 1.0) for ratio in (0.13, 0.18, 0.9)]
    assert curve(rows).summary().sentence.startswith("With 13 % of the patches")
    rows = [row(ratio, False, 0.5, 1.0) for ratio in (0.9, 0.19, 0.14)]
    assert curve(rows).summary().sentence.startswith("With 14 % of the patches")

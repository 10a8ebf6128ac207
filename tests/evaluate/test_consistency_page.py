"""What the page says in words follows from the rows, told or not."""

from __future__ import annotations

import torch

from situs.backbones import create_backbone
from situs.evaluate.consistency import Consistency, shuffled
from situs.evaluate.consistency_page import finding, make_page


def row(ratio: float, told: bool, share: float | None, norm: float) -> Consistency:
    return Consistency(ratio, int(16 * ratio), told, 200, share, norm, norm**2, share, 4.0)


def test_a_network_that_cannot_be_told_says_why() -> None:
    view = shuffled(create_backbone("resnet18", num_classes=3), grid=(4, 4), size=(32, 32))
    rows = [row(ratio, False, 1 - ratio, 2 * ratio) for ratio in (0.0, 0.25, 0.5)]
    page, pictures = make_page(rows, view, "resnet", {}, no_top1="no labels", example=torch.rand(3, 32, 32))
    text = page.render()
    assert page.lead == (
        "With 25 % of the patches shuffled and the model not told, 75.0 % of 200 answers stay the same, and the mean "
        "of the last feature map moves by 0.5 (12.5 % of its length)."
    )
    assert "it is a convolutional network: only its pixels are shuffled" in text
    assert "There is no top-1: no labels." in text
    assert sorted(pictures) == ["images", "norms", "shares"]


def test_told_and_without_classifier() -> None:
    backbone = create_backbone("vit_tiny_patch16_224", img_size=8, patch_size=2, model_args={"depth": 1})
    view = shuffled(backbone, size=(8, 8))
    rows = [row(0.5, told, None, 1.0 + told) for told in (True, False)]
    assert finding(rows, view) == (
        "With 50 % of the patches shuffled and the model not told, the CLS token moves by 1 (25.0 % of its length). "
        "Told which places to distrust, it moves by 2."
    )
    page, pictures = make_page(rows, view, "vit", {})
    assert "a zero vector instead of its row of the table" in page.render()
    assert sorted(pictures) == ["norms"]  # no empty axes where there are no answers

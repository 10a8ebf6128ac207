"""Which published strengths an image gets, and how lengths follow its size."""

from __future__ import annotations

import pytest
import torch

from situs.measure.corruptions import (
    Draw,
    describe,
    gaussian,
    length_factor,
    parameters,
    scaled,
    table_for,
)


def test_tables_by_size_and_lengths_scaled_with_the_side() -> None:
    found = {side: table_for(side).name for side in (28, 32, 45, 46, 64, 119, 120, 224, 384)}
    assert found == {
        28: "CIFAR-C",
        32: "CIFAR-C",
        45: "CIFAR-C",
        46: "Tiny-ImageNet-C",
        64: "Tiny-ImageNet-C",
        119: "Tiny-ImageNet-C",
        120: "ImageNet-C",
        224: "ImageNet-C",
        384: "ImageNet-C",
    }
    assert [length_factor(side) for side in (28, 32, 64, 224)] == [1.0] * 4
    assert length_factor(448) == 2.0 and length_factor(112) == 1.75 and length_factor(168) == 0.75
    assert parameters("defocus_blur", 3, 224) == (6, 0.5)
    assert parameters("defocus_blur", 3, 448) == (12, 1.0)
    assert parameters("gaussian_noise", 5, 448) == (0.38,)
    assert scaled("glass_blur", (1.0, 2, 3), 0.6) == (0.6, 1.2, 3)
    assert scaled("elastic_transform", (10, 2, 4), 2.0) == (40, 4, 8)
    assert "× 2" in describe(448) and "as published" in describe(224)


def test_elastic_displacements_grow_with_the_side() -> None:
    """The same scene at twice the side is displaced twice as far in pixels: as far, measured in the picture."""
    spread = []
    for side in (224, 448):
        alpha, sigma, _ = parameters("elastic_transform", 5, side)
        noise = 2 * Draw(0, 5, torch.arange(2), "x").uniform("y", side, side) - 1
        spread.append((alpha * gaussian(noise, sigma, 3.0, "mirror")).std().item())
    assert spread[1] / spread[0] == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("side", [32, 64, 224])
def test_the_strain_of_elastic_transforms_grows_with_severity(side: int) -> None:
    noise = 2 * torch.rand(side, side, generator=torch.Generator().manual_seed(0)) - 1
    strains = []
    for severity in (1, 2, 3, 4, 5):
        alpha, sigma, _ = parameters("elastic_transform", severity, side)
        moved = alpha * gaussian(noise, sigma, 3.0, "mirror")
        strains.append(moved.diff(dim=-1).std().item())
    assert sorted(strains) == strains and strains[4] > 2 * strains[1]

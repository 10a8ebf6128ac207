"""The segmentation probe: at the minimum of a loss written anew, scored at the masks' own size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import small_vit
from masked import write_ade
from torch.nn import functional as F

from situs.data.batch import VOID, Batch
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.mask import MaskConfig
from situs.errors import SitusError
from situs.measure.probe.classes import _centres, evaluate_probe, fit_patches, grid_logits
from situs.models import Model


def test_it_is_fitted_to_the_minimum_of_the_upsampled_loss() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(5, 6, 4, generator=draw, dtype=torch.float64) * 3 + 1
    masks = torch.randint(VOID, 3, (5, 8, 12), generator=draw).to(torch.int16)
    decay, grid = 1e-2, (2, 3)
    found = fit_patches(features, masks, 3, decay, grid)

    def loss(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        flat = features.flatten(0, 1)
        scaled = (features - flat.mean(0)) / flat.std(0, correction=0)
        logits = (scaled @ weight.T + bias).permute(0, 2, 1).reshape(5, 3, *grid)
        upsampled = F.interpolate(logits, (8, 12), mode="bilinear", align_corners=False)
        return F.cross_entropy(upsampled, masks.long(), ignore_index=VOID) + decay / 2 * weight.square().sum()

    weight, bias = found.weight.clone().requires_grad_(), found.bias.clone().requires_grad_()
    value = loss(weight, bias)
    for gradient in torch.autograd.grad(value, (weight, bias)):
        assert float(gradient.abs().max()) < 1e-5  # convex, so that this is the minimum
    assert float(value) < float(loss(torch.zeros_like(weight), torch.zeros_like(bias))) - 1e-3
    half = fit_patches(features[:3], masks[:3], 3, 1.0, grid)
    again = fit_patches(features, masks, 3, decay, grid, start=half)
    torch.testing.assert_close(
        grid_logits(again, features, grid), grid_logits(found, features, grid), rtol=0, atol=1e-3
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ade(tmp_path_factory.mktemp("ade"), {"training": 12, "validation": 4})


def model() -> Model:
    torch.manual_seed(0)
    return Model("tiny", small_vit(24, patch_size=4, depth=1, width=24, num_classes=0), None, DataConfig(img_size=24))


def test_crops_and_classes_lie_upon_each_other(data: Path) -> None:
    config = DataConfig(str(data), target="mask", img_size=24, workers=0, masks=MaskConfig(1, (0,)))
    [batch] = list(make_loader(config, None))
    inputs, masks = _centres(batch, (24, 24), (24, 24))
    assert inputs.shape == (4, 3, 24, 24)
    red = inputs[:, 0] > inputs[:, 2]  # the disc is red and the ground is not
    known = masks != VOID
    assert float((red == (masks == 1))[known].float().mean()) > 0.97


def test_a_class_is_that_of_the_pixel_under_the_middle_of_its_cell() -> None:
    """Two images of 8 × 10 pixels that came from larger ones, cut to their centre; a mask has its own size."""
    inputs = torch.arange(2 * 80).reshape(2, 1, 8, 10).float()
    whole, count = [(32, 50), (8, 10)], (3, 2)
    masks = [torch.arange(high * wide).reshape(high, wide) for high, wide in whole]
    targets = {"mask": masks, "sides": torch.tensor([(8, 10)] * 2), "whole": torch.tensor(whole)}
    crops, found = _centres(Batch(inputs, torch.arange(2), targets), (6, 8), count)  # type: ignore[arg-type]
    assert torch.equal(crops, inputs[:, :, 1:7, 1:9])
    for mask, (high, wide), classes in zip(masks, whole, found, strict=True):
        for row in range(3):
            for column in range(2):
                y, x = 1 + (2 * row + 1), 1 + (4 * column + 2)  # of the input
                assert classes[row, column] == mask[y * high // 8, x * wide // 10]


def test_colours_are_read_off_frozen_patches(data: Path) -> None:
    found = evaluate_probe(model(), data, kind="segments", masks=MaskConfig(1, (0,)), batch=6)
    ((name, probe),) = found.probes.items()
    assert found.classes == ("ground", "disc") and (probe.train_count, probe.score.count) == (12, 4)
    assert 0.6 < probe.scores.miou < 1.0 and probe.scores.accuracy > 0.85
    assert len(probe.fitted.tried) == 5
    held = found.to_json()["models"][name]
    assert held["miou"] == probe.scores.miou and [row["class"] for row in held["classes"]] == ["ground", "disc"]
    assert "mIoU" in found.summary().sentence


def test_data_without_masks_is_refused(data: Path) -> None:
    with pytest.raises(SitusError, match="must contain a folder of images"):
        evaluate_probe(model(), data / "images", kind="segments")

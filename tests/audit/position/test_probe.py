"""Where a model's knowledge of place comes from, on models that were made to know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_swin, small_vit

from situs.analyze.layers import Layer, patch_layers
from situs.audit.position.probe import OWN, REMOVED, SHUFFLED, Reading, conditions_of, probe_places
from situs.audit.position.reader import Reader, Sums
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.data.batch import Batch
from situs.errors import SitusError

N = 12


def make(name: str = "vit_tiny_patch16_224", std: float = 2.0, **more: Any) -> Backbone:
    torch.manual_seed(0)
    settings = {"img_size": (12, 16), "width": 24, "heads": 3, **more}
    found = small_vit(name=name, **settings).double().eval()
    if name.startswith("vit_tiny"):
        with torch.no_grad():
            found.model.pos_embed.normal_(std=std)
    return found


def batches(count: int, sizes: int = 7, *, bright: bool = False) -> list[Batch]:
    """Noise; bright: patches whose brightness grows with their place, so that contents alone tell it."""
    images = torch.randn(count, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if bright:
        ramp = torch.arange(N, dtype=torch.float64).reshape(3, 4)
        images = images + 2 * ramp.repeat_interleave(4, 0).repeat_interleave(4, 1)
    ids = torch.arange(count)
    return [Batch(part, which) for part, which in zip(images.split(sizes), ids.split(sizes), strict=True)]


def ends(found: Any) -> dict[str, tuple[Reading, Reading]]:
    return {condition: (readings[0], readings[-1]) for condition, readings in found.readings.items()}


def test_positions_alone() -> None:
    """A strong table under noise: known as it is and under shuffled patches, gone with the positions."""
    found = probe_places(make(), batches(60))
    assert (found.fitted, found.tested) == (30, 30)
    assert [each.depth for each in found.readings[OWN]] == ["embedding", "1", "2", "norm"]
    for condition, known in ((OWN, True), (SHUFFLED, True), (REMOVED, False)):
        for reading in found.readings[condition]:
            assert (reading.right > 0.95) == known, (condition, reading)
            assert (reading.right < 3 / N) == (not known), (condition, reading)
            assert (reading.left < 0.8) == known, (condition, reading)


def test_contents_alone() -> None:
    """A weak table under patches that show their place: shuffling takes it away, removing the positions does not."""
    found = ends(probe_places(make(std=1e-3), batches(60, bright=True)))
    assert found[OWN][0].right > 0.8
    assert found[REMOVED][0].right == pytest.approx(found[OWN][0].right, abs=0.05)
    assert found[SHUFFLED][0].right < 3 / N


def test_embedding_slowly() -> None:
    """Images 0, 2, 4 … fit, in halves of every other; 1, 3, 5 … are read; whatever the batches."""
    backbone = make(std=0.3)
    found, again = (probe_places(backbone, batches(21, size)).readings[OWN] for size in (5, 8))
    images = torch.cat([batch.inputs for batch in batches(21)])
    with torch.no_grad():
        layers: list[Layer] = []
        patch_layers(backbone, backbone.embed(images), backbone.positions(), layers.append)
    for reading, same, layer in zip(found, again, layers, strict=True):
        halves = [Sums(layer.grid), Sums(layer.grid)]
        for half, start in zip(halves, (0, 2), strict=True):
            half.add(layer.patches[start::4])
        reader = Reader(*halves)
        reader.read(layer.patches[1::2])
        expected = reader.reading(layer.depth)
        assert reading.ridge == expected.ridge
        assert (reading.error, reading.right) == pytest.approx((expected.error, expected.right), rel=1e-9)
        assert (same.error, same.right) == pytest.approx((expected.error, expected.right), rel=1e-9)


def test_model_trained_without_positions_has_one_condition() -> None:
    backbone = make()
    assert conditions_of(backbone, True) == (OWN, REMOVED, SHUFFLED)
    assert conditions_of(backbone, False) == (OWN,)
    found = probe_places(backbone, batches(40), positions=False)
    assert list(found.readings) == [OWN]
    assert found.readings[OWN][-1].right < 3 / N  # its strong table was left out


def test_relative_bias_and_windows_are_read_from_their_features() -> None:
    relative = make("vit_relpos_small_patch16_224", img_size=(32, 48), patch_size=16)
    sets = [Batch(torch.randn(8, 3, 32, 48).double(), torch.arange(8))]
    assert list(probe_places(relative, sets).readings) == [OWN, REMOVED, SHUFFLED]
    torch.manual_seed(0)
    swin = small_swin((32, 48), depths=(1, 2), heads=(2, 3), model_args={"window_size": 4}).double().eval()
    found = probe_places(swin, sets).readings
    assert list(found) == [OWN]
    assert [(each.depth, each.grid) for each in found[OWN]] == [("embedding", (8, 12)), ("norm", (4, 6))]


def test_one_image_and_a_convolution_are_refused() -> None:
    for sets in ([], batches(1)):
        with pytest.raises(SitusError, match="at least two images"):
            probe_places(make(), sets)
    with pytest.raises(SitusError, match="has no tokens"):
        probe_places(create_backbone("resnet18").eval(), batches(2))

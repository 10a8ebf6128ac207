from __future__ import annotations

import pytest
import torch
from builders import small_swin, small_vit

from situs.measure.layers import Layer, patch_layers


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
@pytest.mark.parametrize("told", [True, False])
def test_depths_of_a_flat_model(name: str, told: bool) -> None:
    torch.manual_seed(0)
    backbone = small_vit((56, 84), name=name, depth=3, width=24, heads=3, patch_size=14).double().eval()
    tokens = backbone.embed(torch.randn(2, 3, 56, 84, dtype=torch.float64))
    places = backbone.positions() if told else None
    found: list[Layer] = []
    patch_layers(backbone, tokens, places, found.append)
    assert [layer.depth for layer in found] == ["embedding", "1", "2", "3", "norm"]
    assert {layer.grid for layer in found} == {(4, 6)}
    assert places is None or places.table is not None
    entering = tokens if places is None else tokens + places.table
    assert torch.equal(found[0].patches, entering)
    assert torch.equal(found[-1].patches, backbone.encode(tokens, places).patches)
    # The wrapped model's own blocks, one by one.
    z = backbone.assemble(tokens, places).z
    for block, layer in zip(backbone.model.blocks, found[1:-1], strict=True):
        z = block(z)
        assert torch.allclose(layer.patches, z[:, backbone.num_prefix :], atol=1e-12)


def test_swin_shows_its_two_ends_on_their_own_grids() -> None:
    backbone = small_swin((32, 48), depths=(1, 2), heads=(2, 3), model_args={"window_size": 4}).eval()
    tokens = backbone.embed(torch.randn(2, 3, 32, 48))
    found: list[Layer] = []
    patch_layers(backbone, tokens, backbone.positions(), found.append)
    first, last = found
    assert (first.depth, first.grid, tuple(first.patches.shape)) == ("embedding", (8, 12), (2, 96, 12))
    assert (last.depth, last.grid, tuple(last.patches.shape)) == ("norm", (4, 6), (2, 24, 24))

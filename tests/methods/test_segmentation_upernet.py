"""The decoder: its resizing and pooling are torch's own, its maps come together at the finest."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from situs.errors import SitusError
from situs.methods.segmentation import BatchNorm, Pyramid, UperNet, norm_of, pool, resize

MAPS = torch.randn(2, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(20, 9), (4, 11), (7, 5), (1, 1), (14, 10), (3, 2)])
def test_resizing_is_torchs(size: tuple[int, int]) -> None:
    wanted = F.interpolate(MAPS, size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(resize(MAPS, size), wanted, rtol=0, atol=2e-6)  # its places are float32


@pytest.mark.parametrize("side", [1, 2, 3, 5, 6, 9])
def test_pooling_is_torchs(side: int) -> None:
    torch.testing.assert_close(pool(MAPS, side), F.adaptive_avg_pool2d(MAPS, side))


@pytest.mark.parametrize(("width", "groups"), [(1, 1), (16, 1), (32, 2), (40, 2), (48, 3), (256, 16), (263, 1)])
def test_a_group_has_sixteen_channels_or_more(width: int, groups: int) -> None:
    norm = norm_of(width, "group")
    assert isinstance(norm, torch.nn.GroupNorm) and (norm.num_groups, norm.num_channels) == (groups, width)


def test_maps_are_joined_as_upernet_says() -> None:
    """By hand: pools of 1, 2, 3 and 6 cells beside the coarsest, a path from coarse to fine, and all of it at once."""
    torch.manual_seed(0)
    net = UperNet([4, 6, 8], 16).double()
    maps = [torch.randn(2, c, s, s + 1, dtype=torch.float64) for c, s in ((4, 8), (6, 4), (8, 2))]
    state = net.state_dict()

    def sized(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return F.interpolate(values, like.shape[2:], mode="bilinear", align_corners=False)

    def layer(name: str, values: torch.Tensor) -> torch.Tensor:
        weight = state[f"{name}.0.weight"]
        values = F.conv2d(values, weight, padding=weight.shape[-1] // 2)
        return F.group_norm(values, 1, state[f"{name}.1.weight"], state[f"{name}.1.bias"]).relu()

    pools = [layer(f"pools.{n}", F.adaptive_avg_pool2d(maps[2], side)) for n, side in enumerate((1, 2, 3, 6))]
    coarse = layer("bottleneck", torch.cat([maps[2], *(sized(each, maps[2]) for each in pools)], 1))
    middle = layer("laterals.1", maps[1]) + sized(coarse, maps[1])
    fine = layer("laterals.0", maps[0]) + sized(middle, maps[0])
    ways = [layer("smooth.0", fine), layer("smooth.1", middle), coarse]
    wanted = layer("fuse", torch.cat([sized(each, maps[0]) for each in ways], 1))
    torch.testing.assert_close(net(maps), wanted, rtol=0, atol=1e-5)  # its places are float32


def test_a_pyramid_has_four_sizes_of_any_grid() -> None:
    torch.manual_seed(0)
    for high, wide in ((4, 6), (3, 5), (1, 1)):
        sizes = [each.shape[2:] for each in Pyramid([8] * 4)([torch.randn(1, 8, high, wide) for _ in range(4)])]
        halves = (-(-high // 2), -(-wide // 2))
        assert sizes == [(4 * high, 4 * wide), (2 * high, 2 * wide), (high, wide), halves]


def test_every_map_reaches_the_result_and_no_sample_another() -> None:
    torch.manual_seed(0)
    net = UperNet([4, 6, 8], 16).double()
    maps = [torch.randn(2, c, s, s + 1, dtype=torch.float64, requires_grad=True) for c, s in ((4, 8), (6, 4), (8, 2))]
    found = net(maps)
    assert found.shape == (2, 16, 8, 9)
    for gradient in torch.autograd.grad(found[0].square().sum(), maps):
        assert float(gradient[0].abs().sum()) > 0 and float(gradient[1].abs().max()) < 1e-12
    alone = net([each[1:] for each in maps])
    torch.testing.assert_close(alone[0], found[1], rtol=0, atol=1e-10)


def test_batches_are_normalised_as_torch_does() -> None:
    torch.manual_seed(0)
    ours, plain, inputs = BatchNorm(4), torch.nn.BatchNorm2d(4), torch.randn(6, 4, 3, 5).mul_(3).add_(1)
    torch.testing.assert_close(ours(inputs), plain(inputs))
    torch.testing.assert_close(ours.eval()(inputs), plain.eval()(inputs))


def test_one_sample_is_no_batch() -> None:
    net = UperNet([4, 6, 8], 16, "batch")
    maps = [torch.randn(1, width, side, side) for width, side in ((4, 8), (6, 4), (8, 2))]
    with pytest.raises(SitusError, match="norm='batch': needs more than one sample per step"):
        net(maps)
    assert net.eval()(maps).shape == (1, 16, 8, 8)
    assert not any(isinstance(part, torch.nn.GroupNorm) for part in net.modules())

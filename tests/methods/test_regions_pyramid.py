"""The pyramids of detection: strides, sizes, and what they are made of, by hand."""

from __future__ import annotations

import pytest
import torch
from builders import small_swin
from torch.nn import functional as F

from situs.methods.regions import SimplePyramid, StagePyramid, channel_norm


@pytest.mark.parametrize(
    ("patch", "strides"),
    [(16, [4, 8, 16, 32, 64]), (14, [3.5, 7, 14, 28, 56]), (8, [4, 8, 16, 32, 64]), (32, [4, 8, 16, 32, 64]),
     (4, [4, 8, 16, 32, 64])],
)  # fmt: skip
def test_strides_are_four_to_sixty_four_whatever_the_patch(patch: int, strides: list[float]) -> None:
    pyramid = SimplePyramid(16, 8, patch)
    assert pyramid.strides == strides
    height, width = 6 * 32 // patch, 8 * 32 // patch
    maps = pyramid([torch.randn(2, 16, height, width)])
    for each, stride in zip(maps, strides, strict=True):
        assert each.shape[1] == 8
        wanted = [patch * side / stride for side in (height, width)]
        assert [abs(have - want) < 1 for have, want in zip(each.shape[2:], wanted, strict=True)] == [True, True]


def test_a_norm_is_over_the_channels_of_a_place() -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 5, 3, 4)
    found = channel_norm(5)(values)
    for y in range(3):
        for x in range(4):
            own = values[1, :, y, x]
            wanted = (own - own.mean()) / (own.var(correction=0) + 1e-6).sqrt()
            torch.testing.assert_close(found[1, :, y, x], wanted)


def test_the_fine_maps_are_transposed_convolutions_and_the_coarse_ones_maxima() -> None:
    torch.manual_seed(0)
    pyramid = SimplePyramid(8, 6, 16).double()
    own = torch.randn(1, 8, 3, 5, dtype=torch.float64)
    state = dict(pyramid.named_parameters())

    def norm(values: torch.Tensor) -> torch.Tensor:
        centred = values - values.mean(1, keepdim=True)
        return centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()

    def doubled(values: torch.Tensor, name: str) -> torch.Tensor:
        """Each place becomes 2 × 2, none of which sees another place."""
        parts = torch.einsum("bchw,cdyx->bdhywx", values, state[f"{name}.weight"]).flatten(4, 5).flatten(2, 3)
        return parts + state[f"{name}.bias"][:, None, None]

    inside = [
        doubled(F.gelu(norm(doubled(own, "scales.0.0"))), "scales.0.3"),
        doubled(own, "scales.1.0"),
        own,
        torch.stack([torch.stack([own[..., 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].amax((2, 3)) for x in range(3)], -1)
                     for y in range(2)], -2),
    ]  # fmt: skip
    wanted = [
        norm(F.conv2d(norm(F.conv2d(each, state[f"smooth.{n}.0.weight"])), state[f"smooth.{n}.2.weight"], padding=1))
        for n, each in enumerate(inside)
    ]
    wanted.append(wanted[-1][..., ::2, ::2])
    for found, want in zip(pyramid([own]), wanted, strict=True):
        torch.testing.assert_close(found, want)


def test_stages_are_joined_from_coarse_to_fine() -> None:
    torch.manual_seed(0)
    levels = small_swin((64, 32), depths=(1, 1, 1), heads=(1, 2, 3)).levels()
    pyramid = StagePyramid(levels, 8, 4)
    assert pyramid.strides == [4, 8, 16, 32]
    maps = [torch.randn(1, level.dim, 16 >> level.halved, 8 >> level.halved) for level in levels]
    found = pyramid(maps)
    assert [tuple(each.shape[1:]) for each in found] == [(8, 16, 8), (8, 8, 4), (8, 4, 2), (8, 2, 1)]
    moved = pyramid([*maps[:-1], maps[-1] + torch.randn(1, levels[-1].dim, 1, 1)])
    assert not any(torch.allclose(a, b) for a, b in zip(found, moved, strict=True))  # the coarsest reaches all

"""The order attack: exact where the truth is known, a permutation in is the same out, pixels are a regression's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from sent import classifier, pictures, sent
from sklearn.linear_model import LinearRegression

from situs.audit.split.joint import (
    PublicSide,
    assign_places,
    order_rows,
    public_side,
    read_pixels,
    set_apart,
)
from situs.audit.split.stage import streams
from situs.core.permutation import invert
from situs.core.tokens import patchify
from situs.locks.veil import parse_veil

BACKBONE = classifier()


def known(defence: str = "none", images: torch.Tensor | None = None) -> PublicSide:
    public = pictures(80, seed=1) if images is None else images
    z = streams(BACKBONE, [public])
    return public_side(BACKBONE, z, patchify(public, 4), parse_veil(defence))


@pytest.mark.parametrize("defence", ["none", "lowpass=0.6"])
def test_every_row_is_found_and_the_picture_read(defence: str) -> None:
    side, private = known(defence), pictures(5, seed=2)
    seen, truth = sent(streams(BACKBONE, [private]), defence, "rows")
    found = order_rows(seen, side)
    assert torch.equal(found, truth.row)
    tokens = torch.empty_like(seen).scatter_(1, found[..., None].expand_as(seen), seen)[:, 1:]
    pixels = read_pixels(tokens.flatten(0, 1), torch.arange(16).repeat(5), side).view(5, 16, -1)
    error = (pixels - patchify(private, 4)).square().mean()
    assert error < (1e-5 if defence == "none" else 2e-2)


def test_rows_in_another_order_give_the_same_answer_in_that_order() -> None:
    side, seen = known("noise=0.3"), streams(BACKBONE, [pictures(3, seed=3)])
    seen = seen + 0.1 * torch.randn(seen.shape, generator=torch.Generator().manual_seed(0), dtype=seen.dtype)
    order = torch.randperm(seen.shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.equal(order_rows(seen[:, order], side), order_rows(seen, side)[:, order])


def test_places_are_those_of_least_distance_over_all_orders() -> None:
    side = known("noise=0.5")
    few = replace(side, places=side.places[:4])
    tokens = few.places + torch.randn(4, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    inverse = torch.linalg.inv(side.covariance + side.noise * torch.eye(24))

    def cost(order: tuple[int, ...]) -> float:
        left = tokens - few.places[list(order)]
        return float((left @ inverse * left).sum())

    best = min(itertools.permutations(range(4)), key=cost)
    assert assign_places(tokens, few).tolist() == list(best)
    twice = torch.cat([few.places, few.places.flip(0)])
    assert assign_places(twice, few, copies=2).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]


def test_pixels_are_the_regression_of_patches_on_tokens() -> None:
    """Of images of noise, whose covariance has its full rank."""
    public = torch.rand(50, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    side = known(images=public)
    tokens, patches = side.tokens[:, 1:].flatten(0, 1), patchify(public, 4).flatten(0, 1)
    places = torch.arange(16).repeat(50)
    moved = tokens - side.places[places]
    reference = LinearRegression().fit(moved.numpy(), patches.numpy()).predict(moved.numpy())
    torch.testing.assert_close(read_pixels(tokens, places, side), torch.from_numpy(reference), rtol=0, atol=1e-5)


def test_noise_is_in_units_of_the_tokens_spread() -> None:
    side = known("noise=0.5")
    assert side.noise == pytest.approx(0.25 * float(side.tokens[:, 1:].var()))
    assert known().noise == 0


def test_fixed_rows_are_set_apart() -> None:
    chance = torch.Generator().manual_seed(2)
    rows, fixed = (torch.randn(n, 8, generator=chance, dtype=torch.float64) for n in (6, 2))
    order = torch.randperm(8, generator=chance)
    mixed = torch.cat([fixed, rows])[order]
    chosen, others = set_apart(mixed + 1e-3, fixed)
    assert torch.equal(chosen, invert(order)[:2]) and others.tolist() == sorted(invert(order)[2:].tolist())
    none, every = set_apart(rows, fixed[:0])
    assert len(none) == 0 and torch.equal(every, torch.arange(6))

"""The whole image at once: an exact Gaussian, the likeliest of all orders, and more places and dB than tokens alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from sent import pictures, stage
from sklearn.linear_model import Ridge
from torch import Tensor

from situs.audit.split.attackers import attack, share_up_to_names
from situs.audit.split.audit import audit_split
from situs.audit.split.joint import (
    AROUND,
    Borders,
    Fitted,
    Joint,
    Moments,
    PublicSide,
    Regressed,
    Whole,
    assign_places,
    balanced,
    beside,
    chosen,
    joint,
    place_costs,
    read_pixels,
)
from situs.audit.split.stage import Scene, Stage
from situs.core.tokens import patchify
from situs.locks.veil import parse_veil
from situs.models import open_model

WIDTH = 6


def markov(count: int, grid: tuple[int, int], seed: int, keeps: float = 0.9) -> Tensor:
    """[n, N, D] content of a Gauss-Markov field: a product of two chains of first order, D of them, mixed."""
    chance = torch.Generator().manual_seed(seed)
    mix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    white = torch.randn(count, *grid, WIDTH, generator=chance, dtype=torch.float64)
    left, right = (torch.linalg.cholesky(chain(size, keeps)) for size in grid)
    return torch.einsum("yv,xu,nvuk,kl->nyxl", left, right, white, mix).flatten(1, 2)


def chain(size: int, keeps: float) -> Tensor:
    steps = torch.arange(size)
    return keeps ** (steps[:, None] - steps).abs().double()


def side_of(content: Tensor, noise: float, seed: int = 5, size: float = 0.5) -> PublicSide:
    """Public tokens with places of their own; pixels are the content."""
    chance = torch.Generator().manual_seed(seed)
    places = size * torch.randn(content.shape[1], WIDTH, generator=chance, dtype=torch.float64)
    flat = content.flatten(0, 1)
    covariance = flat.T @ flat / len(flat)
    empty = torch.empty(0, WIDTH, dtype=torch.float64)
    return PublicSide(empty, places, covariance, noise, covariance, torch.zeros(WIDTH).double(), 1.0, content + places)


def whole_of(grid: tuple[int, int], noise: float = 0.3, count: int = 1500, **fields: Any) -> Whole:
    return Fitted.of(side_of(markov(count, grid, 0), noise, **fields), grid).whole(WIDTH, 0.5)


def dense(whole: Whole) -> Tensor:
    """[N, k, N, k], the precision in full."""
    count, k = len(whole.inner), whole.axes.shape[1]
    full = torch.zeros(count, k, count + 1, k, dtype=torch.float64)
    for place, near in enumerate(beside(whole.grid)):
        full[place, :, place] = whole.inner[place]
        for slot, other in enumerate(near):
            full[place, :, other] += whole.outer[place, slot]
    return full[:, :, :count]


@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_without_noise_the_precision_is_the_inverse_of_the_covariance_of_a_markov_field(grid: tuple[int, int]) -> None:
    """Its moments given exactly: a product of two chains is regressed on left, above and between without a rest."""
    count = grid[0] * grid[1]
    inner = torch.tensor([[2.0, 0.3], [0.3, 1.0]]).double()
    exact = torch.kron(torch.kron(chain(grid[0], 0.9), chain(grid[1], 0.8)), inner)
    root = torch.linalg.cholesky(exact).T.contiguous()  # as many images as there are numbers: their moments are exact
    moments = Moments.of((root * len(root) ** 0.5).view(-1, count, 2), grid)
    found = Regressed.of(moments, torch.zeros(2, 2).double(), 2)
    ready = Whole(torch.eye(2).double(), *found.precision(grid), 1.0, side_of(markov(9, grid, 0), 0.1), grid)
    torch.testing.assert_close(dense(ready).reshape(2 * count, 2 * count), torch.linalg.inv(exact), rtol=0, atol=1e-8)
    likelihood = 0.5 * (torch.linalg.slogdet(torch.kron(torch.eye(count), inner)).logabsdet - torch.logdet(exact))
    assert found.gain(moments, torch.zeros(2, 2).double(), grid) == pytest.approx(float(likelihood) / count)


def energy(whole: Whole, tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[n]: minus twice the log likelihood, but for a constant, of tokens [n, N, D] in an order [n, N]."""
    costs = place_costs(tokens, whole.side).gather(2, order[..., None])[..., 0].sum(dim=1)
    along = (tokens.gather(1, order[..., None].expand_as(tokens)) - whole.side.places) @ whole.axes
    return costs + (along * (whole._multiplied(along) - along)).sum(dim=(1, 2))


@pytest.mark.parametrize("grid", [(2, 3), (4, 3)])
def test_costs_and_pairs_give_what_a_swap_changes_of_the_energy(grid: tuple[int, int]) -> None:
    whole, count = whole_of(grid), grid[0] * grid[1]
    tokens = markov(3, grid, 7) + whole.side.places
    order = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    along, full = tokens @ whole.axes, dense(whole)
    placed = along.gather(1, order[..., None].expand_as(along)) - whole.side.places @ whole.axes
    costs = whole.alone(tokens) + 2 * whole.outside(placed) @ along.mT
    every = torch.arange(3)
    for p, q in itertools.combinations(range(count), 2):
        swapped = order.clone()
        swapped[:, [p, q]] = order[:, [q, p]]
        i, j = order[:, p], order[:, q]
        change = costs[every, p, j] + costs[every, q, i] - costs[every, p, i] - costs[every, q, j]
        apart = along[every, j] - along[every, i]
        change = change - 2 * torch.einsum("nk,kl,nl->n", apart, full[p, :, q], apart)
        torch.testing.assert_close(change, energy(whole, tokens, swapped) - energy(whole, tokens, order))


def test_the_energy_is_the_likelihood_of_all_tokens_at_once() -> None:
    whole = whole_of((2, 3))
    tokens, order = markov(2, (2, 3), 8) + whole.side.places, torch.tensor([[2, 0, 1, 5, 4, 3], [0, 1, 2, 3, 4, 5]])
    left = (tokens.gather(1, order[..., None].expand_as(tokens)) - whole.side.places) @ whole.axes
    direct = torch.einsum("npk,pkql,nql->n", left, dense(whole), left)
    torch.testing.assert_close(energy(whole, tokens, order), direct)  # all six directions are shared ones


@pytest.mark.parametrize(("noise", "size"), [(0.1, 1.0), (0.02, 0.6)])
def test_beliefs_are_those_of_the_likeliest_of_all_orders(noise: float, size: float) -> None:
    """A planted field on 2 × 3, all 720 orders tried; tokens alone are put elsewhere. size: of the position vectors."""
    whole = whole_of((2, 3), noise, size=size)
    clear = markov(30, (2, 3), 11) + whole.side.places
    chance = torch.Generator().manual_seed(3)
    tokens = clear + noise**0.5 * torch.randn(clear.shape, generator=chance, dtype=torch.float64)
    orders = torch.tensor(list(itertools.permutations(range(6))))
    best = torch.stack([orders[energy(whole, each.expand(720, -1, -1), orders).argmin()] for each in tokens])
    alone = torch.stack([assign_places(each, whole.side).argsort() for each in tokens])
    assert float((chosen(whole.beliefs(tokens)) == best).double().mean()) > 0.99
    assert float((alone == best).double().mean()) < 0.9


def test_beliefs_add_up_and_follow_the_order_of_the_rows() -> None:
    whole = whole_of((3, 4))
    tokens = markov(2, (3, 4), 12) + whole.side.places
    belief = whole.beliefs(tokens)
    torch.testing.assert_close(belief.sum(dim=2), torch.ones(2, 12).double())
    assert (belief.sum(dim=1) - 1).abs().max() < 0.1
    mixed = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(whole.beliefs(tokens[:, mixed]), belief[:, :, mixed], rtol=0, atol=1e-8)
    costs = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(balanced(costs).sum(dim=1), torch.ones(2, 5).double())


def test_pixels_are_the_posterior_mean_of_all_tokens_at_once() -> None:
    """Of content with noise whose precision is known: mean = content's covariance times the precision of all."""
    whole = whole_of((2, 3))
    tokens = markov(3, (2, 3), 13) + whole.side.places
    left = (tokens - whole.side.places).flatten(1)
    axes = torch.block_diag(*[whole.axes] * 6)
    precision = axes @ dense(whole).reshape(36, 36) @ axes.T
    clear = left - whole.side.noise * left @ precision  # Tweedie
    torch.testing.assert_close(whole.read(tokens), clear.view(3, 6, WIDTH), rtol=0, atol=1e-6)


def decided(content: Tensor, noise: float, grid: tuple[int, int]) -> tuple[Joint, PublicSide]:
    side = side_of(content, noise)
    part = replace(side, tokens=side.tokens[16:])
    return joint(side, part, side.tokens[:16], content[:16], grid), side


def test_what_gains_nothing_on_public_images_is_not_used() -> None:
    grid = (3, 4)
    found, side = decided(markov(200, grid, 1), 0.3, grid)
    assert found.orders is not None and found.reads is not None
    nothing, side = decided(torch.randn(200, 12, WIDTH, generator=torch.Generator().manual_seed(0)).double(), 0.3, grid)
    assert nothing == Joint()
    tokens = side.tokens[:2]
    plain = read_pixels(tokens.flatten(0, 1), torch.arange(12).repeat(2), side).unflatten(0, (2, 12))
    assert torch.equal(nothing.read(tokens, side), plain)
    assert decided(markov(200, grid, 1), 0.0, grid)[0] == Joint()


def other_stage(name: str, size: tuple[int, int]) -> Stage:
    """Slow waves before another model of new weights."""
    torch.manual_seed(0)
    backbone = small_vit(size, name=name, width=48, heads=3, depth=1)
    with torch.no_grad():
        backbone.model.pos_embed.normal_(std=0.05)
    model = open_model(backbone.model, img_size=size)
    model.backbone.double()
    wide = torch.cat([pictures(120, max(size), seed=1), pictures(12, max(size), seed=2)])
    half = torch.full((3,), 0.5)
    return Stage(model, wide[..., : size[0], : size[1]] * 2 - 1, 120, half, half)


def places_and_pixels(held: Stage, sigma: float, *permute: str, alone: bool) -> tuple[float, float]:
    veil = parse_veil(f"noise={sigma}", permute)
    if alone:
        held._joints[str(veil.defence)] = Joint()
    else:
        held._joints.pop(str(veil.defence), None)
    scores = attack("order", Scene.of(held, veil)).figures
    return scores.get("places", 1.0), scores["psnr"]


@pytest.mark.slow
@pytest.mark.shared_data
def test_photographs_behind_noise_are_put_in_order(shared_data: Path) -> None:
    """DINOv2: tokens alone put a third of the patches in their places, and the pictures were not seen."""
    weights = shared_data / "weights" / "vit_small_patch14_dinov2_fp16.safetensors"
    found = audit_split(
        open_model("vit_small_patch14_dinov2", img_size=140, weights=weights),
        str(shared_data / "imagenet-samples"),
        split="train",
        defences=("noise=0.5",),
        permute=("rows",),
        attacks=("order",),
        count=16,
    )
    plain, rows = (each.findings[0].figures for each in found.settings)
    assert rows["places"] > 0.7 and rows["psnr"] > 21 and plain["psnr"] > 24
    assert found.tone == "bad"


@pytest.mark.parametrize("sigma", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_a_small_model_behind_noise_gives_more_than_its_tokens_alone(sigma: float) -> None:
    held = stage(private=12, public=80)
    before, now = (places_and_pixels(held, sigma, "rows", alone=alone) for alone in (True, False))
    assert now[0] >= before[0] and now[1] > before[1] + 1
    assert places_and_pixels(held, sigma, alone=False)[1] > places_and_pixels(held, sigma, alone=True)[1] + 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("deit3_small_patch16_224", (24, 24)), ("vit_small_patch14_reg4_dinov2", (16, 32))]
)
def test_another_model_and_a_grid_that_is_no_square(name: str, size: tuple[int, int]) -> None:
    held = other_stage(name, size)
    for permute in (("rows",), ("rows", "columns")):
        before, now = (places_and_pixels(held, 1.0, *permute, alone=alone) for alone in (True, False))
        assert now[0] > before[0] + 0.2 and now[1] > before[1] + 5


def test_neighbours_are_those_on_the_grid() -> None:
    near = beside((2, 3))
    assert [sorted(each[each < 6].tolist()) for each in near] == [
        [1, 3, 4], [0, 2, 3, 4, 5], [1, 4, 5], [0, 1, 4], [0, 1, 2, 3, 5], [1, 2, 4],
    ]  # fmt: skip
    assert near.shape == (6, len(AROUND))


SHAPE = (4, 4, 3)


@pytest.mark.parametrize("count", [2, 5])
def test_patches_find_their_picture(count: int) -> None:
    borders = Borders.of(patchify(pictures(80, seed=1), 4), SHAPE, (4, 4))
    patches = patchify(pictures(count, seed=2), 4).flatten(0, 1)
    order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))
    found = borders.group(patches[order], order % 16, count)
    assert share_up_to_names(found, order // 16) == 1
    for place in range(16):  # a picture has each place once
        assert torch.equal(found[order % 16 == place].sort().values, torch.arange(count))


def test_a_fit_goes_on_from_the_last_lines_to_the_next_first() -> None:
    public = pictures(40, side=8, seed=3)
    borders = Borders.of(patchify(public, 4), SHAPE, (2, 2))
    images = public.permute(0, 2, 3, 1)  # [n, H, W, C]
    for axis, (last, first) in enumerate(
        [
            (torch.cat([images[:, 2:4, :4], images[:, 2:4, 4:]]), torch.cat([images[:, 4:6, :4], images[:, 4:6, 4:]])),
            (torch.cat([images[:, :4, 2:4], images[:, 4:, 2:4]]), torch.cat([images[:, :4, 4:6], images[:, 4:, 4:6]])),
        ]
    ):
        x, y = last.flatten(1), first.flatten(1)
        reference = Ridge(alpha=1e-4 * len(x)).fit(x.numpy(), y.numpy())
        torch.testing.assert_close(
            borders.fits[axis].weights, torch.from_numpy(reference.coef_.T), rtol=1e-6, atol=1e-8
        )
        left = y - torch.from_numpy(reference.predict(x.numpy()))
        inverse = torch.linalg.inv(left.T @ left / len(left) + 1e-4 * torch.eye(x.shape[1]))
        direct = torch.einsum("nf,fg,ng->n", left, inverse, left)
        torch.testing.assert_close(borders.fits[axis].cost(x, y).diagonal(), direct, rtol=1e-5, atol=1e-8)

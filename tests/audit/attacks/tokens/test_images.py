"""Which tokens are one image: parted by what attention gave them, and held to the block's own forward pass."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from victims import vit

from situs.audit.attacks import ordering
from situs.audit.attacks.solver import Tokens
from situs.audit.attacks.tokens import images
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.images import agree, distinct_images, make_images
from situs.audit.attacks.tokens.search import Roots
from situs.core.tokens import patchify


@torch.no_grad()
def scene(batch: int, **given: Any) -> tuple[Block, Roots, torch.Tensor]:
    """True tokens of a batch in any order."""
    block = Block(vit(**given).requires_grad_(False))
    chance = torch.Generator().manual_seed(2)
    x = torch.rand(batch, 3, 1, 1, generator=chance, dtype=torch.float64) * 2 - 1
    x = x + 0.3 * torch.randn(batch, 3, 16, 16, generator=chance, dtype=torch.float64)
    patches = patchify(x, (4, 4))
    m, o = (part[:, 1:].flatten(0, 1) for part in block.middle(patches))
    flat = patches.flatten(0, 1)
    order = torch.randperm(len(flat), generator=chance)
    tokens = Tokens(flat, o, flat @ block.weight.T + block.base.repeat(batch, 1), m).at(order)
    place = torch.arange(16).repeat(batch)[order]
    wanted = torch.full((16,), batch)
    return block, Roots(place, tokens, torch.ones(len(flat)).double(), wanted), patches


@torch.no_grad()
def test_tokens_of_three_images_come_together() -> None:
    block, roots, patches = scene(3)
    found, proved = make_images(block, roots, 3)
    assert bool(proved.all())
    for image in patches:
        assert float((found - image).flatten(1).norm(dim=1).min()) < 1e-9
    assert agree(block, found, roots.tokens)


@torch.no_grad()
def test_a_wrong_parting_does_not_agree() -> None:
    block, roots, patches = scene(2)
    tokens = roots.tokens
    assert agree(block, patches, tokens)
    for count in (1, 8):
        wrong = patches.clone()
        wrong[0, :count], wrong[1, :count] = patches[1, :count], patches[0, :count]
        assert not agree(block, wrong, tokens)
    block.into.mul_(1e-9)  # attention that says next to nothing, and noise beside it
    noisy = tokens._replace(m=tokens.m * (1 + 1e-3 * torch.randn_like(tokens.m)))
    assert not agree(block, patches, noisy)


@torch.no_grad()
def test_what_was_not_found_is_not_proved() -> None:
    block, roots, patches = scene(2)
    keep = torch.arange(len(roots.place)) != 5
    fewer = Roots(roots.place[keep], roots.tokens.at(keep.nonzero()[:, 0]), roots.fit[keep], roots.wanted)
    found, proved = make_images(block, fewer, 2)
    assert int((~proved).sum()) == 1
    [[image, place]] = (~proved).nonzero().tolist()
    torch.testing.assert_close(found[image, place], found[1 - image, place])  # for want of better: images may be alike
    same = (found[:, None] - patches[None]).norm(dim=-1) < 1e-9
    assert int(same.any(dim=1).sum()) == 32 and int(same.sum(dim=-1).amax(dim=1).sum()) == 31


@pytest.mark.parametrize(("batch", "count", "fall"), [(4, 1, 101), (4, 3, 101), (2, 1, 99), (3, 3, 1), (1, 1, 101)])
def test_different_images_are_counted_by_where_singular_values_fall(batch: int, count: int, fall: float) -> None:
    """Of five tokens an image; where they fall by less than a hundred, every image is another."""
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=chance).double())[0] for size in (24, 30))
    values = torch.where(torch.arange(24) < 5 * count, 1.0, 1 / fall)
    block: Any = SimpleNamespace(places=4, prefix=[0], layers=SimpleNamespace(fc2="w"))
    upload = {"w": left @ torch.diag(values).double() @ right[:24]}
    assert distinct_images(block, upload, batch, even=True) == (count if fall > 100 else batch)
    assert distinct_images(block, {}, batch, even=True) == batch


@torch.no_grad()
def test_images_of_which_no_token_was_found_stay_empty() -> None:
    block, roots, _ = scene(4)
    for count in (1, 2, 6):
        keep = torch.stack([roots.at(place)[0] for place in range(count)])  # one token of each place, where four are
        fewer = Roots(roots.place[keep], roots.tokens.at(keep), roots.fit[keep], roots.wanted)
        found, proved = make_images(block, fewer, 4)
        assert int(proved.sum()) == count and bool(found.isfinite().all())


@torch.no_grad()
def test_a_method_that_names_places_orders_what_no_position_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise: no border fits another, and whoever knows the patches puts them right."""
    monkeypatch.setattr(ordering, "ROUNDS", 1)
    block, roots, patches = scene(1, positions="none")
    loose = Roots(torch.zeros_like(roots.place), roots.tokens, roots.fit, torch.zeros(16).long())
    loose.wanted[0] = 16

    def place_logits(image: torch.Tensor) -> torch.Tensor:
        return -1e3 * torch.cdist(patchify(image, (4, 4)), patches)

    knows: Any = SimpleNamespace(parameters=lambda: iter([patches]), backbone=block.backbone, place_logits=place_logits)
    found, _ = make_images(block, loose, 1, knows)
    assert torch.equal(found, patches)
    guessed, _ = make_images(block, loose, 1)
    assert not torch.equal(guessed, patches) and torch.equal(guessed.sort(1).values, patches.sort(1).values)


@pytest.mark.parametrize("linked", [False, True])
def test_points_of_one_image_are_near_each_other(linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what attention gave the tokens, or where it is known, by which of them are one image."""
    chance = torch.Generator().manual_seed(0)
    image = torch.arange(12) % 2
    sure = torch.arange(12) < 10
    o = 5 * torch.randn(2, 7, generator=chance).double()[image] + 0.1 * torch.randn(12, 7, generator=chance).double()
    links = (image[sure, None] == image[sure]).double() if linked else None
    monkeypatch.setattr(images, "same_image", lambda *_: links)
    block: Any = None

    def points(o: torch.Tensor) -> torch.Tensor:
        tokens = Tokens(o, o, o, o)
        return images._points(block, Roots(torch.arange(12) // 2, tokens, torch.ones(12), torch.ones(6)), 2, sure)

    near = points(o)
    away, same = torch.cdist(near, near), image[:, None] == image
    counted = sure[:, None] & sure if linked else torch.ones_like(same)
    assert float(away[same & counted].max()) < 0.3 * float(away[~same & counted].min())
    moved = torch.cdist(points(o + 100), points(o + 100))
    torch.testing.assert_close(moved, away, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [2, 3])
def test_a_cluster_has_one_token_of_each_place(batch: int) -> None:
    """Against all ways to give the tokens of each place to the images."""
    chance = torch.Generator().manual_seed(batch)
    place = torch.arange(4).repeat(batch)
    points = 4 * torch.randn(batch, 2, generator=chance).double().repeat_interleave(4, dim=0)
    points = points + torch.randn(4 * batch, 2, generator=chance).double()
    tokens = Tokens(points, points, points, points)
    roots = Roots(place, tokens, torch.ones(4 * batch), torch.full((4,), batch))
    owner, cost = images._cluster(points, roots, batch, roots.at(0))
    for each in range(4):
        assert sorted(owner[roots.at(each)].tolist()) == list(range(batch))
    centres = torch.stack([points[owner == image].mean(dim=0) for image in range(batch)])
    away = torch.cdist(points, centres).square()
    assert float(away.gather(1, owner[:, None]).sum()) == pytest.approx(cost)
    for each in range(4):
        rows = roots.at(each)
        costs = away[rows].tolist()
        ways = [sum(cost[at] for cost, at in zip(costs, way, strict=True)) for way in permutations(range(batch))]
        assert sum(float(away[row, owner[row]]) for row in rows) == pytest.approx(min(ways))

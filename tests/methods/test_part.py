from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor

from situs.backbones import create_backbone
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import PART, Batch, PARTConfig
from situs.methods.part import cut


def make(size: tuple[int, int] = (8, 12), patch: Any = 4, channels: int = 3, **config: Any) -> PART:
    torch.manual_seed(0)
    return PART(small_vit(size, patch_size=patch, in_chans=channels), PARTConfig(**config)).double()


def batch(size: tuple[int, int] = (8, 12), channels: int = 3) -> Batch:
    torch.manual_seed(1)
    return Batch(torch.randn(3, channels, *size, dtype=torch.float64), torch.tensor([5, 900, 31]))


def pixel(image: Tensor, y: float, x: float) -> Tensor:
    """An image [C, H, W] between its pixels' centres (at .5, 1.5, …), the border held on: [C]."""
    (h, w), value = image.shape[1:], torch.zeros(len(image), dtype=image.dtype)
    for row in (math.floor(y - 0.5), math.floor(y - 0.5) + 1):
        for column in (math.floor(x - 0.5), math.floor(x - 0.5) + 1):
            share = max(0.0, 1 - abs(y - 0.5 - row)) * max(0.0, 1 - abs(x - 0.5 - column))
            value = value + share * image[:, min(max(row, 0), h - 1), min(max(column, 0), w - 1)]
    return value


def slow_part(method: PART, images: Tensor, draws: dict[str, Tensor], patch: tuple[int, int]) -> Tensor:
    """PART from its description: one image, one patch, one token, one head, one pair at a time."""
    vit, head, errors = method.backbone.model, method.relation_head, []
    count, context = method.backbone.num_tokens, method.backbone.num_tokens - int(method.config.mask_ratio * 6)
    for image, corners, sizes, pairs in zip(images, draws["corners"], draws["sizes"], draws["pairs"], strict=True):
        z = [vit.cls_token[0, 0] + vit.pos_embed[0, 0]]
        for corner, size in zip(corners.double().tolist(), sizes.double().tolist(), strict=True):
            piece = torch.stack(
                [
                    torch.stack(
                        [
                            pixel(
                                image,
                                corner[0] * patch[0] + size[0] * (r + 0.5),
                                corner[1] * patch[1] + size[1] * (c + 0.5),
                            )
                            for c in range(patch[1])
                        ],
                        dim=-1,
                    )
                    for r in range(patch[0])
                ],
                dim=1,
            )
            z.append((vit.patch_embed.proj.weight * piece).sum(dim=(1, 2, 3)) + vit.patch_embed.proj.bias)
        for block in vit.blocks:
            q, k, v = zip(*((block.attn.qkv(block.norm1(token))).split(16) for token in z), strict=True)
            mixed = []
            for i in range(count + 1):
                parts = []
                for h in (slice(0, 8), slice(8, 16)):
                    shares = torch.stack([q[i][h] @ k[j][h] / math.sqrt(8) for j in range(1 + context)]).softmax(0)
                    parts.append(sum(share * v[j][h] for j, share in enumerate(shares)))
                mixed.append(block.attn.proj(torch.cat(parts)))
            z = [token + out for token, out in zip(z, mixed, strict=True)]
            z = [token + block.mlp(block.norm2(token)) for token in z]
        tokens = [vit.norm(token) for token in z[1:]]
        weight, bias = head.attention.in_proj_weight.split(16), head.attention.in_proj_bias.split(16)
        for i, j in pairs.tolist():
            query = weight[0] @ head.query(torch.cat([tokens[i], tokens[j]])) + bias[0]
            keys = [weight[1] @ token + bias[1] for token in tokens]
            shares = torch.stack([query @ key / math.sqrt(16) for key in keys]).softmax(0)
            value = sum(share * (weight[2] @ token + bias[2]) for share, token in zip(shares, tokens, strict=True))
            answer = head.answer(head.attention.out_proj(value))
            centre = corners.double() + sizes.double() / 2
            wanted = [*(centre[j] - centre[i])]
            if method.config.scale > 1:
                wanted += [*(sizes[j].double() / sizes[i].double()).log()]
            wanted = [value for axis, value in enumerate(wanted) if method.grid[axis % 2] > 1]
            errors += [(a - b) ** 2 for a, b in zip(answer, wanted, strict=True)]
    return torch.stack(errors).mean()


@pytest.mark.parametrize(
    "settings",
    [{}, {"mask_ratio": 0.5, "pairs": 4}, {"scale": 1.7, "mask_ratio": 0.2}],
    ids=["plain", "context", "sizes"],
)
def test_loss_and_gradients_match_an_independent_slow_part(settings: dict[str, Any]) -> None:
    method = make(**settings)
    draws = method.draw(batch(), When(seed=3, epoch=7))
    names, parameters = zip(*method.named_parameters(), strict=True)
    fast, slow = method(batch(), draws).loss, slow_part(method, batch().inputs, draws, (4, 4))
    assert float(fast.detach()) == pytest.approx(float(slow.detach()), abs=1e-6)
    pairs = zip(*(torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (fast, slow)), strict=True)
    for name, (a, b) in zip(names, pairs, strict=True):
        assert (a is None) == (b is None or not b.any()) or not a.any(), name
        if a is not None and b is not None:
            assert torch.allclose(a, b, atol=1e-6), name


def test_a_series_is_asked_for_times_alone() -> None:
    method = make((1, 24), (1, 4), 2, scale=1.5)
    draws = method.draw(batch((1, 24), 2), When())
    assert (draws["sizes"][..., 0] == 1).all() and (draws["corners"][..., 0] == 0).all()
    assert method.relation_head.answer.out_features == 2  # an offset in time and a ratio of lengths
    fast, slow = method(batch((1, 24), 2), draws).loss, slow_part(method, batch((1, 24), 2).inputs, draws, (1, 4))
    assert float(fast.detach()) == pytest.approx(float(slow.detach()), abs=1e-6)


def test_patches_on_the_grid_are_the_image_itself() -> None:
    images = batch().inputs
    corners = torch.tensor([[r, c] for r in range(2) for c in range(3)]).expand(3, -1, -1)
    assert torch.allclose(cut(images, (2, 3), corners, torch.ones_like(corners)), images, atol=1e-12)


def test_positions_take_no_part_and_the_rest_of_the_context_is_seen_by_nobody() -> None:
    method = make(mask_ratio=0.5)
    draws = method.draw(batch(), When())
    before = method(batch(), draws).extras["answers"]
    with torch.no_grad():
        method.backbone.model.pos_embed[:, 1:].normal_()
    assert torch.equal(method(batch(), draws).extras["answers"], before)
    assert not method.sees_positions
    tokens = method.backbone.embed(cut(batch().inputs, method.grid, draws["corners"], draws["sizes"]))
    context = method.backbone.encode(tokens, None, 3).patches
    tokens[:, 5] += 1
    assert torch.allclose(method.backbone.encode(tokens, None, 3).patches[:, :5], context[:, :5], atol=1e-12)


def test_places_fill_the_image_and_pairs_are_of_two_patches() -> None:
    method = make(scale=1.8, pairs=50)
    many = Batch(torch.zeros(500), torch.arange(500))
    draws = method.draw(many, When(seed=1))
    corners, sizes, pairs = draws["corners"], draws["sizes"], draws["pairs"]
    assert pairs.shape == (500, 50, 2) and (pairs[..., 0] != pairs[..., 1]).all()
    chances = torch.zeros(6, 6).index_put(tuple(pairs.flatten(0, 1).T), torch.tensor(1.0), accumulate=True) / 25_000
    assert torch.allclose(chances, (1 - torch.eye(6)) / 30, atol=5e-3)
    assert (corners >= 0).all() and (corners + sizes <= torch.tensor([2.0, 3.0]) + 1e-5).all()
    share = corners / (torch.tensor([2.0, 3.0]) - sizes)
    assert torch.allclose(share.mean((0, 1)), torch.full((2,), 0.5), atol=0.02)
    assert torch.allclose(share.std((0, 1)), torch.full((2,), 12**-0.5), atol=0.02)
    logs = sizes.log() / math.log(1.8)
    assert logs.abs().max() <= 1 + 1e-5 and torch.allclose(logs.std((0, 1)), torch.full((2,), 3**-0.5), atol=0.02)


def test_a_blind_head_explains_nothing_and_a_perfect_one_all() -> None:
    method = make()
    draws = method.draw(batch(), When())
    with torch.no_grad():
        method.relation_head.answer.weight.zero_()
    blind = method(batch(), draws)
    assert float(blind.metrics["explained"]) == pytest.approx(0, abs=1e-6)
    assert float(blind.metrics["offset_error"]) == pytest.approx(float(blind.loss.detach()) ** 0.5, rel=1e-6)
    method.relation_head.forward = lambda tokens, pairs: method.relations(draws)
    assert float(method(batch(), draws).metrics["explained"]) == 1


@pytest.mark.parametrize(
    ("create", "sentence"),
    [
        (lambda: make((4, 4)), "does not cut its input into a grid of two or more patches"),
        (lambda: make(scale=2.5), "scale=2.5: must be at most 2, the number of patches along the shorter side"),
        (lambda: PARTConfig(mask_ratio=1.0), "mask_ratio=1.0"),
        (lambda: PART(create_backbone("swin_tiny_patch4_window7_224", img_size=64)), "does not support attending to"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(create: Any, sentence: str) -> None:
    with pytest.raises(SitusError, match=sentence):
        create()


@pytest.mark.parametrize(("size", "axes"), [((4, 24), 1), ((24, 4), 1), ((4, 8), 1), ((8, 12), 2)])
@torch.no_grad()
def test_the_error_is_that_of_offsets_alone_with_sizes_too(size: tuple[int, int], axes: int) -> None:
    """Of a line, even of two patches, one number; the ratios of sizes come after them."""
    method = make(size, scale=1.5)
    output = method(batch(size), method.draw(batch(size), When(seed=2)))
    answers, relations = output.extras["answers"], output.extras["relations"]
    assert answers.shape[-1] == relations.shape[-1] == 2 * axes
    square = (answers - relations)[..., :axes].square().mean()
    assert float(output.metrics["offset_error"]) == pytest.approx(float(square.sqrt()), rel=1e-9)
    explained = 1 - square / relations[..., :axes].square().mean()
    assert float(output.metrics["explained"]) == pytest.approx(float(explained), rel=1e-9)
    ratios = relations[..., axes:].abs()
    assert 0 < float(ratios.max()) <= 2 * math.log(1.5) + 1e-6

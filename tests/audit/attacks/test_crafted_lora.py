"""A server that chooses the weights, of which LoRA's gradients come back."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from situs.audit.attacks.base import Knowledge, Ready, Refused
from situs.audit.attacks.crafted import codes_of, projections
from situs.audit.attacks.crafted_lora import ChosenLora, _centre_first, _edges
from situs.audit.client import victim_gradients
from situs.audit.defences import Step
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.backbones.lora import add_lora
from situs.core.tokens import patchify


def lora(
    rank: int = 4, heads: int = 4, depth: int = 5, targets: tuple[str, ...] = ("qkv",), **changes: Any
) -> Backbone:
    torch.manual_seed(0)
    shape = {"depth": depth, "embed_dim": 96, "num_heads": heads} | changes
    model = create_backbone("vit_tiny_patch16_224", img_size=16, patch_size=4, num_classes=10, model_args=shape).eval()
    add_lora(model, rank, 16.0, targets)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("parametrizations.weight.0" in name)
    return model


def photographs(count: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=chance) + torch.randn(count, 1, 1, 1, generator=chance)
    return F.interpolate(coarse, size=16, mode="bicubic")


def written(model: Backbone, batch: int) -> tuple[ChosenLora, Knowledge]:
    attack, known = ChosenLora(), Knowledge(step=Step(batch=batch), public=photographs(64, 9))
    sent = [name for name, p in model.named_parameters() if p.requires_grad]
    assert isinstance(attack.prepare(model, sent, known), Ready)
    attack.write(model, sent, known)
    return attack, known


def test_one_image_is_read_exactly_from_loras_gradients_alone() -> None:
    model, image = lora(), photographs(1)
    attack, known = written(model, 1)
    upload = victim_gradients(model, image, torch.tensor([3]))
    assert all(".parametrizations.weight.0." in name for name in upload)
    recovery = attack.recover(model, [upload], known)
    assert recovery.facts[0]["fits"] is True and recovery.facts[0]["verdict"] == ""
    assert float((recovery.images - image).square().mean()) < 1e-8


def test_the_products_add_nothing_and_every_row_is_one_token() -> None:
    """Independent of the reading: in float64 each gradient row is a multiple of the hooked input of its place."""
    model = lora()
    attack, known = written(model, 1)
    model, image = model.double(), photographs(1).double()
    reading = attack.planned(model, 1)
    assert reading.seen == list(range(16))
    inputs: list[torch.Tensor] = []
    hooks = [block.norm1.register_forward_hook(lambda _, __, out: inputs.append(out)) for block in model.parts()]
    logits = model(image)
    for hook in hooks:
        hook.remove()
    downs = [block.attention.qkv[0].parametrizations.weight[0].down for block in model.parts()]
    gradients = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([3])), downs)
    for slot in reading.slots:
        token, row = inputs[slot.block][0, slot.place + 1], gradients[slot.block][slot.row]
        assert float(F.cosine_similarity(token, row, dim=0).abs()) > 1 - 1e-12
    assert isinstance(attack, ChosenLora) and known.step.batch == 1


@pytest.mark.parametrize(("depth", "edges"), [(5, 1), (9, 2), pytest.param(13, 3, marks=pytest.mark.slow)])
def test_of_a_batch_the_images_between_edges_are_read_and_no_mixture_is_called_one(depth: int, edges: int) -> None:
    model = lora(depth=depth)
    attack, known = written(model, 6)
    reading = attack.planned(model, 6)
    assert reading.edges == edges and len(reading.slots) == edges * 16
    alone = 0
    for seed in range(12):
        images = photographs(6, 100 + seed)
        upload = victim_gradients(model, images, torch.arange(6))
        singles, _ = attack.read(model, reading, upload, 6)
        truth = patchify(images, 4).double()
        for patches in singles:
            assert float((truth - patches)[:, reading.seen].square().mean(dim=(1, 2)).min()) < 1e-3
        alone += len(singles)
        recovery = attack.recover(model, [upload], known)
        assert recovery.images.shape == images.shape
        assert str(recovery.facts[0]["verdict"]).endswith("may read the other images")  # every place has its head
    assert alone >= 1


@pytest.mark.parametrize("batch", [2, 3, 6, 40])
def test_above_each_edge_one_image_more_of_a_batch_is_expected(batch: int) -> None:
    """By a normal distribution of the public images' codes; of a batch no larger than the edges one more is assumed."""
    model = lora(depth=9)
    plan = ChosenLora().planned(model, 6)
    edges = _edges(model, plan, batch, photographs(64, 9))
    codes = codes_of(model, plan, photographs(64, 9))
    above = [1 - NormalDist(float(codes.mean()), float(codes.std())).cdf(edge) for edge in edges]
    assert above == pytest.approx([2 / max(batch, 3), 1 / max(batch, 3)])


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 3), (2, 1)])
def test_places_nearest_to_the_centre_come_first(grid: tuple[int, int]) -> None:
    places = _centre_first(grid)
    assert sorted(places) == list(range(grid[0] * grid[1]))
    away = [(2 * (p // grid[1]) - grid[0] + 1) ** 2 + (2 * (p % grid[1]) - grid[1] + 1) ** 2 for p in places]
    assert away == sorted(away)


def test_a_bright_image_alone_is_in_one_interval_and_a_dark_one_in_none() -> None:
    """Also one that is above both edges."""
    model = lora(depth=9)
    attack, _ = written(model, 6)
    reading = attack.planned(model, 6)
    assert reading.edges == 2
    images = 0.3 * photographs(13, 100) + torch.linspace(-1, 2, 13).view(-1, 1, 1, 1)
    intervals = []
    for image in images.split(1):
        upload = victim_gradients(model, image, torch.tensor([3]))
        intervals.append(sum(map(len, attack.read(model, reading, upload, 6))))
    assert intervals[:5] == [0] * 5 and intervals[-3:] == [1] * 3 and max(intervals) == 1


def test_where_three_places_are_read_no_mixture_is_called_one() -> None:
    """Three unknowns fit three places, whatever was read."""
    model = lora(depth=2, heads=3)
    attack, known = written(model, 6)
    assert len(attack.planned(model, 6).seen) == 3
    for seed in range(10):
        upload = victim_gradients(model, photographs(6, 100 + seed), torch.arange(6))
        recovery = attack.recover(model, [upload], known)
        assert recovery.facts[0]["separated"] == 0 and recovery.facts[0]["fits"] is False


def test_a_heads_comparison_does_not_see_the_norms_mean() -> None:
    """Of a batch: each row of the keys is a difference of channels, of which the norm takes the same mean away."""
    model = lora(heads=2)
    attack, _ = written(model, 6)
    slots = attack.planned(model, 6).slots
    for block in {slot.block for slot in slots}:
        attention = model.parts()[block].attention
        size = model.dim // attention.heads
        _, keys, _ = projections(attention)
        rows = keys[[slot.head * size + row for slot in slots if slot.block == block for row in (0, 1)]]
        assert bool(rows.any(dim=1).all())
        assert float(rows.sum(dim=1).abs().max()) < 1e-6 * float(rows.abs().max())


def test_places_without_a_head_are_counted_as_unseen() -> None:
    model = lora(heads=2)
    attack, known = written(model, 1)
    recovery = attack.recover(model, [victim_gradients(model, photographs(1), torch.tensor([0]))], known)
    assert recovery.facts[0]["fits"] is False and recovery.facts[0]["unseen"] == 6 * 48
    assert "10 of 16 positions" in str(recovery.facts[0]["verdict"])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: lora(targets=("fc1",)), "has no LoRA on queries"),
        (lambda: lora(class_token=False, global_pool="avg"), "a class token, and the model has none"),
    ],
    ids=["fc1", "mean"],
)
def test_what_cannot_be_read_is_refused(model: Any, reason: str) -> None:
    model = model()
    refused = ChosenLora().prepare(model, [name for name, _ in model.named_parameters()], Knowledge())
    assert isinstance(refused, Refused) and reason in refused.reason


def test_a_model_of_few_neurons_is_read_all_the_same() -> None:
    """Four a block: the heads read, and no neuron."""
    model, image = lora(mlp_ratio=4 / 96), photographs(1)
    assert model.parts()[0].mlp.up[0].out_features == 4
    attack, known = written(model, 1)
    recovery = attack.recover(model, [victim_gradients(model, image, torch.tensor([3]))], known)
    assert float((recovery.images - image).square().mean()) < 1e-8

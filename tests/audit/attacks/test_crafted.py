"""A server that chooses the weights."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from situs.audit.attacks.base import Knowledge, Ready, Refused
from situs.audit.attacks.crafted import (
    ChosenWeights,
    Plan,
    codes_of,
    craft,
    edges_of,
    natural_basis,
    plan_of,
)
from situs.audit.client import victim_gradients
from situs.audit.defences import Step
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.core.tokens import patchify
from situs.errors import SitusError

SMALL = {"depth": 5, "embed_dim": 96, "num_heads": 2}


def vit(name: str = "vit_tiny_patch16_224", **changes: Any) -> Backbone:
    torch.manual_seed(0)
    asked = {"img_size": 16, "patch_size": 4, "num_classes": 10, "model_args": SMALL} | changes
    return create_backbone(name, **asked).eval()


def photographs(count: int, size: int = 16, channels: int = 3) -> Tensor:
    """Smooth random images, of different brightness."""
    chance = torch.Generator().manual_seed(count)
    coarse = torch.randn(count, channels, 4, 4, generator=chance) + torch.randn(count, 1, 1, 1, generator=chance)
    return F.interpolate(coarse, size=size, mode="bicubic")


def recovered(model: Backbone, images: Tensor) -> tuple[Any, Tensor]:
    """What is read of one step on images, and of each image how far the nearest is, squared."""
    upload = victim_gradients(model, images, torch.arange(len(images)) % 10)
    recovery = ChosenWeights().recover(model, [upload], Knowledge(step=Step(batch=len(images))))
    return recovery, (recovery.images[:, None] - images).square().mean(dim=(2, 3, 4)).min(dim=0).values


def test_names_shapes_and_types_are_those_of_the_model() -> None:
    model = vit()
    crafted = craft(model, photographs(32))
    assert crafted is not model
    assert {name: (p.shape, p.dtype) for name, p in crafted.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"model_args": SMALL | {"global_pool": "avg", "class_token": False}},
        {"model_args": SMALL | {"init_values": 1e-5, "reg_tokens": 2, "no_embed_class": True}},
    ],
    ids=["cls", "mean", "registers"],
)
@pytest.mark.parametrize("batch", [1, 6])
def test_every_image_of_a_small_batch_is_read_exactly(model: dict[str, Any], batch: int) -> None:
    images = photographs(batch)
    recovery, distance = recovered(craft(vit(**model), photographs(64)), images)
    [fact] = recovery.facts
    assert fact["fits"] is True and fact["separated"] == batch and fact["verdict"] == ""
    assert float(distance.max()) < 1e-8


@pytest.mark.parametrize(
    ("single", "present", "wide", "alone", "others"),
    [
        ("..1..", "..1..", "", [2], []),
        (".....", ".11..", ".1", [11], []),  # an image on the edge between two bins, none in the first bin
        ("1....", "1.11.", "..1", [0, 12], []),  # beside one that is alone in the first
        (".....", "111..", "11", [10], [2]),  # each bin is in one pair at most
        (".1...", ".11..", ".1", [1], [2]),  # an image that was read is not read again
        ("..1..", ".11..", ".1", [2], [1]),
        (".....", ".11..", "", [], [1, 2]),
        (".....", ".1...", ".1", [], [1]),
        (".....", "..1..", ".1", [], [2]),
        (".....", "...11", "...1", [13], []),
        (".....", "....1", "....1", [], [4]),
    ],
)
def test_an_image_is_read_once_from_its_bin_or_from_the_two_beside_its_edge(
    monkeypatch: pytest.MonkeyPatch, single: str, present: str, wide: str, alone: list[int], others: list[int]
) -> None:
    flags = [torch.tensor([mark == "1" for mark in row.ljust(5, ".")]) for row in (single, wide, present)]

    def bins(_: Any, __: Any, ___: Any, width: int) -> tuple[Tensor, Tensor, Tensor]:
        return (torch.arange(5.0) + (10 if width == 2 else 0)).view(5, 1, 1), flags[width - 1], flags[2]

    monkeypatch.setattr("situs.audit.attacks.crafted._bins", bins)
    monkeypatch.setattr(ChosenWeights, "names", lambda *_: [])
    nothing: Any = None
    found = ChosenWeights().read(nothing, nothing, {}, 5)
    assert [part.flatten().tolist() for part in found] == [alone, others]


def test_images_of_one_code_are_mixed_and_never_called_alone() -> None:
    """Two images of the same mean brightness fall in one bin, and what is read there is no image."""
    first, second = photographs(8), photographs(8).flip(0, 2)
    second = second + (first - second).mean(dim=(1, 2, 3), keepdim=True)
    images = torch.cat([first, second])
    model = craft(vit(), photographs(64))
    recovery, _ = recovered(model, images)
    [fact] = recovery.facts
    assert fact["fits"] is False and "were separated from the others by their bin" in str(fact["verdict"])
    upload = victim_gradients(model, images, torch.arange(16) % 10)
    plan = plan_of(model)
    assert isinstance(plan, Plan)
    alone, mixed = ChosenWeights().read(model, plan, upload, 16)
    truth = patchify(images, 4).double()
    assert all(float((truth - patches).square().mean(dim=(1, 2)).min()) < 1e-8 for patches in alone)
    assert len(mixed) >= 1


def test_a_second_image_that_the_classifier_hardly_sees_is_not_called_alone() -> None:
    """In one bin: an image, and one whose factor at the even places is 200 times smaller. There rounding hides it."""
    model = craft(vit(), photographs(64))
    plan, chance = plan_of(model), photographs(40)
    assert isinstance(plan, Plan)
    first, second = photographs(1), photographs(2)[:1]
    second = second + (first - second).mean(dim=(1, 2, 3), keepdim=True)
    brighter = 1 + 0.02 * torch.arange(40).view(-1, 1, 1, 1) + (first - chance).mean(dim=(1, 2, 3), keepdim=True)
    head: Any = model.model.head

    def factor(image: Tensor, label: int, place: int) -> float:
        upload = victim_gradients(model, image, torch.tensor([label]))
        return float(upload["model.blocks.0.mlp.fc1.bias"][plan.bins * place])

    def excess(weight: float) -> float:
        with torch.no_grad():
            head.weight[9, plan.channels.zero] += head.weight[9, plan.channels.up] - weight
            head.weight[9, plan.channels.up] = weight
        return factor(second, 9, 0) - 0.005 * factor(first, 0, 0)

    low, high = -4.0, 4.0
    sign = excess(low) > 0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if (excess(middle) > 0) == sign else (low, middle)
    assert abs(factor(second, 9, 0) / factor(first, 0, 0) - 0.005) < 0.002
    assert abs(factor(second, 9, 1) / factor(first, 0, 1)) > 0.05  # the other functional shows it
    images, labels = torch.cat([first, second, chance + brighter]), torch.tensor([0, 9] + [0] * 40)
    alone, _ = ChosenWeights().read(model, plan, victim_gradients(model, images, labels), len(images))
    distances = (patchify(images, 4).double()[:, None] - alone).square().mean(dim=(2, 3))
    assert bool((distances.min(dim=0).values < 1e-6).all())


def test_a_neuron_is_switched_on_by_its_place_and_by_codes_above_its_edge() -> None:
    """The law behind it, in the model's own numbers: at each place as many neurons are on as edges lie below."""
    model, images = craft(vit(), photographs(64)), photographs(5)
    plan = plan_of(model)
    assert isinstance(plan, Plan)
    seen: list[Tensor] = []
    hooks = [
        block.mlp.up[0].register_forward_hook(lambda _, __, out: seen.append(out.detach())) for block in model.parts()
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    for place in range(plan.places):
        number, part = divmod(place, plan.per_block)
        on = seen[number][:, :, part * plan.bins : (part + 1) * plan.bins] > 0
        tokens = on.any(dim=2)
        assert not tokens[:, [t for t in range(17) if t != place + 1]].any()
        assert bool((on[:, place + 1].int().diff(dim=1) <= 0).all())  # the lower edges first


@torch.no_grad()
def test_the_code_of_an_image_is_what_the_neurons_of_its_tokens_get() -> None:
    model, images = craft(vit(), photographs(64)), photographs(7)
    plan = plan_of(model)
    assert isinstance(plan, Plan)
    seen: list[Tensor] = []
    hook = model.parts()[0].mlp.up[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(images)
    hook.remove()
    got = (seen[0][:, 1:, plan.channels.code] - seen[0][:, 1:, plan.channels.zero]).double()
    torch.testing.assert_close(got, codes_of(model, plan, images)[:, None].expand_as(got), rtol=0.02, atol=1e-4)
    for public in (None, images[:1]):  # the deviation of one image is none
        assumed = codes_of(model, plan, public)
        torch.testing.assert_close(
            assumed, codes_of(model, plan, torch.full((2, 3, 16, 16), 0.6)) * torch.tensor([-1, 1])
        )


@pytest.mark.parametrize("batch", [1, 96, 97, 300])
def test_edges_part_a_normal_distribution_evenly_or_into_one_image_each(batch: int) -> None:
    """By the mean and deviation of the public images' codes."""
    model, images = vit(), photographs(64)
    plan = plan_of(model)
    assert isinstance(plan, Plan) and plan.bins == 96
    codes, edges = codes_of(model, plan, images), edges_of(model, plan, images, batch)
    below = torch.tensor([NormalDist(float(codes.mean()), float(codes.std())).cdf(float(edge)) for edge in edges])
    if batch > plan.bins:
        expected = 1 - torch.arange(plan.bins, 0, -1) / batch
    else:
        expected = torch.cat([torch.zeros(1), (torch.arange(1, plan.bins) + 0.5) / plan.bins])
    torch.testing.assert_close(below, expected, rtol=0, atol=1e-6)
    assert bool(edges.isfinite().all()) and bool((edges.diff() > 0).all())


def test_a_wide_patch_loses_its_least_natural_directions_and_says_so() -> None:
    model = craft(vit(model_args=SMALL | {"embed_dim": 48}), photographs(64))
    recovery, distance = recovered(model, photographs(3))
    [fact] = recovery.facts
    assert fact["fits"] is False and "too few channels" in str(fact["verdict"]) and fact["unseen"] == 16 * (48 - 35)
    assert float(distance.max()) < 0.05 * float(photographs(3).square().mean())


def test_the_basis_is_orthonormal_and_whole_where_there_is_room() -> None:
    basis = natural_basis((3, 4, 2), 10)
    assert torch.allclose(basis @ basis.T, torch.eye(10, dtype=torch.float64), atol=1e-12)
    assert torch.equal(natural_basis((2, 2, 3), 12), torch.eye(12, dtype=torch.float64))
    smooth = torch.ones(24, dtype=torch.float64) / 24**0.5
    assert float((basis @ smooth).square().sum()) > 0.99
    cells = [(row, column, channel) for row in range(3) for column in range(4) for channel in range(2)]
    alike = torch.tensor([
        [0.95 ** (abs(a[0] - b[0]) + abs(a[1] - b[1])) * (1.0 if a[2] == b[2] else 0.9) for b in cells] for a in cells
    ], dtype=torch.float64)  # fmt: skip
    for count in (1, 5, 10, 23):  # no other directions hold more: the sum of the largest values
        some = natural_basis((3, 4, 2), count)
        held = float((some @ alike @ some.T).trace())
        assert held == pytest.approx(float(torch.linalg.eigvalsh(alike)[-count:].sum()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "vit_small_patch16_rope_mixed_224", "img_size": 32, "patch_size": 16}, "rotates queries and keys"),
        ({"model_args": SMALL | {"depth": 1}}, "fewer than two blocks"),
        ({"model_args": SMALL | {"qk_norm": True}}, "plain attention"),
        ({"model_args": SMALL | {"pre_norm": True}}, "the first block changes the tokens"),
        ({"model_args": SMALL | {"embed_dim": 13, "num_heads": 1}}, r"too few channels \(13\) for 16 positions"),
        ({"model_args": SMALL | {"mlp_ratio": 7.5 / 96}}, r"too few neurons \(7 a block\) for 16 positions"),
    ],
    ids=["rotary", "one block", "normed keys", "norm before", "narrow", "few neurons"],
)
def test_a_model_that_cannot_be_written_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    model = vit(**changes)
    prepared = ChosenWeights().prepare(model, [name for name, _ in model.named_parameters()], Knowledge())
    assert isinstance(prepared, Refused) and re.search(reason, prepared.reason)
    with pytest.raises(SitusError, match=reason):
        craft(model)


@pytest.mark.parametrize(
    ("changes", "patch", "bins"),
    [({"embed_dim": 14, "num_heads": 1}, 1, 14), ({"mlp_ratio": 8.5 / 96}, 48, 2)],
    ids=["narrow", "few neurons"],
)
def test_one_number_a_patch_and_two_neurons_a_place_are_enough(changes: dict[str, Any], patch: int, bins: int) -> None:
    plan = plan_of(vit(model_args=SMALL | changes))
    assert isinstance(plan, Plan) and (plan.channels.patch, plan.bins) == (patch, bins)


def test_what_it_reads_must_be_sent_and_of_one_step() -> None:
    model = vit()
    sent = {name for name, _ in model.named_parameters()}
    ready = ChosenWeights().prepare(model, sent, Knowledge())
    assert isinstance(ready, Ready) and ready.reads is not None
    refused = ChosenWeights().prepare(model, sent - {ready.reads[0]}, Knowledge())
    assert isinstance(refused, Refused) and ready.reads[0] in refused.reason
    steps = Knowledge(step=replace(Step(), local_steps=2))
    assert isinstance(ChosenWeights().prepare(model, sent, steps), Refused)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [9, 40])
def test_a_bin_is_called_one_image_where_the_gradients_of_single_images_say_so(batch: int) -> None:
    """An independent reference: each image's own gradient in float64 shows in which bins it stands."""
    model, images = craft(vit(), photographs(64)), photographs(batch)
    plan, labels = plan_of(model), torch.arange(batch) % 10
    assert isinstance(plan, Plan)
    alone, _ = ChosenWeights().read(model, plan, victim_gradients(model, images, labels), batch)
    precise = craft(vit(), photographs(64)).double()
    stands = torch.zeros(batch, plan.places, plan.bins, dtype=torch.bool)
    for image in range(batch):
        upload = victim_gradients(precise, images[image : image + 1].double(), labels[image : image + 1])
        for place in range(plan.places):
            number, part = divmod(place, plan.per_block)
            bias = upload[f"model.blocks.{number}.mlp.fc1.bias"][part * plan.bins : (part + 1) * plan.bins]
            steps = bias - torch.cat([bias[1:], bias[:1] * 0])
            stands[image, place] = steps.abs() > 1e-6 * bias.abs().max()
    alone_in = stands & (stands.sum(dim=0) == 1)
    whole = (alone_in.sum(dim=2) == stands.sum(dim=2)).all(dim=1)  # no bin of it is shared, at any place
    distances = (patchify(images, 4).double()[:, None] - alone).square().mean(dim=(2, 3))
    read = distances.min(dim=1).values < 1e-8
    assert len(alone) == int(read.sum()) and int(whole.sum()) > batch / 3
    assert not bool((read & ~whole).any())  # nothing is called alone that shares a bin
    assert int((whole & ~read).sum()) <= batch // 10  # but for images that lie on several edges

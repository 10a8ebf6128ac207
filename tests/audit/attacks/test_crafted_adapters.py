"""A server that chooses the weights, of which the gradients of adapters come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.attacks.base import Knowledge, Ready, Refused
from situs.audit.attacks.crafted_adapters import ChosenAdapters
from situs.audit.client import victim_gradients
from situs.audit.defences import Step
from situs.backbones import create_backbone
from situs.backbones.adapters import add_adapters
from situs.backbones.base import Backbone
from situs.core.tokens import patchify


def vit(width: int = 32, **changes: Any) -> Backbone:
    torch.manual_seed(0)
    shape = {"depth": 5, "embed_dim": 96, "num_heads": 2} | changes
    model = create_backbone("vit_tiny_patch16_224", img_size=16, patch_size=4, num_classes=10, model_args=shape).eval()
    names = add_adapters(model, width) if width else []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model


def photographs(count: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=chance) + torch.randn(count, 1, 1, 1, generator=chance)
    return F.interpolate(coarse, size=16, mode="bicubic")


def written(model: Backbone, batch: int) -> tuple[ChosenAdapters, Knowledge]:
    attack, known = ChosenAdapters(), Knowledge(step=Step(batch=batch), public=photographs(64, 9))
    sent = [name for name, p in model.named_parameters() if p.requires_grad]
    assert isinstance(attack.prepare(model, sent, known), Ready)
    attack.write(model, sent, known)
    return attack, known


@pytest.mark.parametrize("changes", [{}, {"act_layer": nn.ReLU}, {"init_values": 1e-5}], ids=["gelu", "relu", "scaled"])
def test_one_image_is_read_exactly_from_the_adapters_alone(changes: dict[str, Any]) -> None:
    model = vit(**changes)
    attack, known = written(model, 1)
    for seed in range(3):
        image = 2 * photographs(1, seed)
        upload = victim_gradients(model, image, torch.tensor([3]))
        assert all(".adapter." in name for name in upload)
        recovery = attack.recover(model, [upload], known)
        assert recovery.facts[0]["fits"] is True and recovery.facts[0]["verdict"] == ""
        assert float((recovery.images - image).square().mean()) < 1e-8


def test_an_adapter_gets_what_its_mlp_gets() -> None:
    """The law behind it, in the model's own numbers, block by block."""
    model, inputs, outputs = vit(), list[Tensor](), list[Tensor]()
    written(model, 4)
    hooks = [block.mlp.up[0].register_forward_hook(lambda _, x, __: inputs.append(x[0])) for block in model.parts()]
    hooks += [
        block.mlp.down.adapter.down.register_forward_hook(lambda _, x, __: outputs.append(x[0]))
        for block in model.parts()
    ]
    with torch.no_grad():
        model(photographs(4))
    for hook in hooks:
        hook.remove()
    assert len(inputs) == len(outputs) == 5
    for before, after in zip(inputs, outputs, strict=True):
        assert torch.allclose(before, after, atol=1e-4, rtol=1e-6) and float(before.std()) > 0.5


@pytest.mark.slow
def test_of_a_batch_some_are_read_and_each_is_an_image_of_it() -> None:
    model = vit(width=64)
    attack, _ = written(model, 12)
    plan, single = attack.planned(model, 12), 0
    for seed in range(6):
        images = photographs(12, 100 + seed)
        upload = victim_gradients(model, images, torch.arange(12) % 10)
        for patches in (alone := attack.read(model, plan, upload, 12)[0]):
            assert float((patchify(images, 4).double() - patches).square().mean(dim=(1, 2)).min()) < 1e-8
        single += len(alone)
    assert single >= 20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 0}, "no adapters"),
        ({"mlp_ratio": 1.5}, "twice as many neurons"),
        ({"act_layer": nn.Tanh}, "activation"),
        ({"width": 4}, "few neurons (4"),
    ],
    ids=["none", "narrow", "tanh", "few"],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], reason: str) -> None:
    model = vit(**changes)
    refused = ChosenAdapters().prepare(model, [name for name, _ in model.named_parameters()], Knowledge())
    assert isinstance(refused, Refused) and reason in refused.reason

"""A server that chooses the weights, of which the gradients of biases come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from situs.audit.attacks.base import Knowledge, Ready, Refused
from situs.audit.attacks.crafted_biases import EXTRA, ChosenBiases
from situs.audit.client import victim_gradients
from situs.audit.defences import Step
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.core.tokens import patchify


def vit(**changes: Any) -> Backbone:
    torch.manual_seed(0)
    shape = {"depth": 5, "embed_dim": 96, "num_heads": 4} | changes
    model = create_backbone("vit_tiny_patch16_224", img_size=16, patch_size=4, num_classes=10, model_args=shape).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def photographs(count: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=chance) + torch.randn(count, 1, 1, 1, generator=chance)
    return F.interpolate(coarse, size=16, mode="bicubic").clamp(-3, 3)


def written(model: Backbone, batch: int) -> tuple[ChosenBiases, Knowledge]:
    attack, known = ChosenBiases(), Knowledge(step=Step(batch=batch), public=photographs(64, 9))
    sent = [name for name, p in model.named_parameters() if p.requires_grad]
    assert isinstance(attack.prepare(model, sent, known), Ready)
    attack.write(model, sent, known)
    return attack, known


@pytest.mark.parametrize("changes", [{}, {"global_pool": "avg", "class_token": False}], ids=["cls", "mean"])
def test_one_image_is_read_exactly_from_biases_alone(changes: dict[str, Any]) -> None:
    model, image = vit(**changes), photographs(1)
    attack, known = written(model, 1)
    upload = victim_gradients(model, image, torch.tensor([3]))
    assert all(gradient.dim() == 1 for gradient in upload.values())
    recovery = attack.recover(model, [upload], known)
    assert recovery.facts[0]["fits"] is True and float((recovery.images - image).square().mean()) < 1e-6


def test_in_float64_every_number_is_read_to_the_last_digits() -> None:
    """Between two points of the table of slopes a line is followed: of 200,000 points the steps are larger by far."""
    model, image = vit().double(), photographs(1).double()
    attack, _ = written(model, 1)
    upload = victim_gradients(model, image, torch.tensor([3]), step=Step(dtype=torch.float64))
    alone, _ = attack.read(model, attack.planned(model, 1), upload, 1)
    torch.testing.assert_close(alone, patchify(image, 4), rtol=0, atol=1e-8)


@pytest.mark.parametrize("number", [*range(EXTRA), EXTRA, EXTRA + 5])
def test_an_image_of_which_one_number_overflowed_is_not_called_exact(number: int) -> None:
    model, image = vit(), photographs(1)
    attack, known = written(model, 1)
    upload, plan = victim_gradients(model, image, torch.tensor([3])), attack.planned(model, 1)
    upload[attack.names(model, plan)[3]][plan.rows(3)[1].start + number] = torch.inf
    recovery = attack.recover(model, [upload], known)
    assert recovery.facts[0]["fits"] is False and recovery.facts[0]["separated"] == 0
    away = (patchify(recovery.images, 4) - patchify(image, 4))[0].norm(dim=1)
    assert float(away[[place for place in range(16) if place != 3]].max()) < 1e-2  # all other patches are there
    if number == EXTRA + 5:  # of that patch a direction
        assert float(away[3]) < 0.5 * float(patchify(image, 4)[0, 3].norm())


def test_a_neurons_input_is_its_number_of_its_patch() -> None:
    """Independent of the reading: the hooked inputs are the pixels, over the deviation that each place has."""
    model, image = vit(), photographs(1)
    written(model, 1)
    plan = ChosenBiases().planned(model, 1)
    seen: list[torch.Tensor] = []
    hooks = [b.mlp.up[0].register_forward_hook(lambda _, __, out: seen.append(out.detach())) for b in model.parts()]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    pixels = patchify(image, 4)[0]
    for place in range(16):
        block, rows = plan.rows(place)
        z = seen[block][0, :, rows]
        assert float(F.cosine_similarity(z[place + 1, EXTRA:], pixels[place], dim=0)) > 1 - 1e-6
        others = [token for token in range(17) if token != place + 1]
        assert float(z[others].max()) < -10  # off for every other token


@pytest.mark.parametrize(("bright", "alone"), [(0, 0), (1, 1), (3, 0)])
def test_one_bright_image_among_dark_ones_is_read_and_three_are_called_a_mixture(bright: int, alone: int) -> None:
    model = vit()
    attack, known = written(model, 6)
    assert [attack.planned(model, batch).first for batch in (1, 2, 6)] == [0, 1, 1]  # a veto needs a block
    images = 0.3 * photographs(6, 1) - 1
    images[:bright] += 3
    upload = victim_gradients(model, images, torch.arange(6))
    single, others = attack.read(model, attack.planned(model, 6), upload, 6)
    assert (len(single), len(others)) == (alone, 1 - alone)
    if alone:
        assert float((patchify(images[:1], 4) - single).square().mean()) < 1e-4
    recovery = attack.recover(model, [upload], known)
    assert recovery.facts[0]["separated"] == alone and recovery.facts[0]["fits"] is False
    assert "by the threshold" in str(recovery.facts[0]["verdict"])


@pytest.mark.slow
def test_of_a_batch_the_image_above_the_edge_is_read_and_no_mixture_is_called_one() -> None:
    model = vit()
    attack, known = written(model, 6)
    plan = attack.planned(model, 6)
    single = 0
    for seed in range(12):
        images = photographs(6, 100 + seed)
        upload = victim_gradients(model, images, torch.arange(6))
        alone, _ = attack.read(model, plan, upload, 6)
        for patches in alone:
            assert float((patchify(images, 4).double() - patches).square().mean(dim=(1, 2)).min()) < 1e-4
        single += len(alone)
        assert attack.recover(model, [upload], known).images.shape == images.shape
    assert single >= 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"act_layer": torch.nn.ReLU}, "not curved"),
        ({"mlp_ratio": 0.1}, "too few neurons"),
        ({"depth": 1}, "fewer than two blocks"),
        ({"proj_bias": False}, "the model's MLPs have no biases"),
    ],
    ids=["relu", "narrow", "shallow", "no biases"],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], reason: str) -> None:
    model = vit(**changes)
    refused = ChosenBiases().prepare(model, [name for name, _ in model.named_parameters()], Knowledge())
    assert isinstance(refused, Refused) and reason in refused.reason

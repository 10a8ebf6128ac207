"""A server that chooses the weights, of which the classifier's gradient comes back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from situs.audit.attacks.base import Knowledge, Ready, Refused, certificate_of
from situs.audit.attacks.crafted_head import ChosenHead
from situs.audit.client import victim_gradients
from situs.audit.defences import Step, create_defence
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.core.tokens import patchify
from situs.errors import SitusError


def vit(**changes: Any) -> Backbone:
    torch.manual_seed(0)
    shape = {"depth": 5, "embed_dim": 96, "num_heads": 4} | changes
    model = create_backbone("vit_tiny_patch16_224", img_size=16, patch_size=4, num_classes=10, model_args=shape).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("head." in name)
    return model


def photographs(count: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(count)
    coarse = torch.randn(count, 3, 4, 4, generator=chance) + torch.randn(count, 1, 1, 1, generator=chance)
    return F.interpolate(coarse, size=16, mode="bicubic")


def recovered(model: Backbone, images: torch.Tensor, labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The recovery, and the best that the copied directions allow of each image, by plain projection."""
    attack, known = ChosenHead(), Knowledge(step=Step(batch=len(images)))
    sent = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sent == ["model.head.weight", "model.head.bias"]
    assert isinstance(attack.prepare(model, sent, known), Ready)
    attack.write(model, sent, known)
    copying = attack.planned(model, len(images))
    truth, basis = patchify(images, 4).double(), copying.basis
    square = torch.tensor(copying.squares)
    members = F.one_hot(square).double()
    means = (members.T / members.sum(dim=0)[:, None]) @ truth
    best = (means[:, square] @ basis.T @ basis) if copying.count > 1 else truth
    return attack.recover(model, [victim_gradients(model, images, labels)], known), best


@pytest.mark.parametrize("changes", [{}, {"global_pool": "avg", "class_token": False}], ids=["cls", "mean"])
def test_images_of_different_classes_come_back_as_small_pictures(changes: dict[str, Any]) -> None:
    images = photographs(5)
    recovery, best = recovered(vit(**changes), images, torch.tensor([4, 0, 7, 2, 9]))
    assert recovery.facts[0]["separated"] == 5 and recovery.facts[0]["fits"] is False
    assert recovery.facts[0]["unseen"] == 16 * 48 - 16 * 4
    certificate = certificate_of(recovery.facts[0])
    assert not certificate.holds and "by their class; 64 of 768 numbers of an image were read" in certificate.verdict
    patches = patchify(recovery.images, 4).double()
    distance = (patches[:, None] - best).square().mean(dim=(2, 3)).min(dim=0).values
    assert float(distance.max()) < 1e-4


def test_an_image_of_which_a_number_overflowed_is_not_called_separated() -> None:
    model, images, labels = vit(), photographs(3), torch.tensor([4, 0, 7])
    recovered(model, images, labels)
    attack, upload = ChosenHead(), victim_gradients(model, images, labels)
    plan = attack.planned(model, 3)
    before, _ = attack.read(model, plan, upload, 3)
    upload["model.head.weight"][4, plan.stored(2).start] = torch.inf
    alone, others = attack.read(model, plan, upload, 3)
    assert torch.equal(alone, before[[0, 2]]) and len(others) == 1
    assert bool(others.isfinite().all())


def test_images_of_one_class_are_counted_and_never_called_separated() -> None:
    images = photographs(4)
    recovery, _ = recovered(vit(), images, torch.tensor([4, 4, 7, 7]))
    assert recovery.facts[0]["separated"] == 0 and "0 of 4 images were separated" in str(recovery.facts[0]["verdict"])


@pytest.mark.slow
def test_fewer_heads_than_places_copy_the_means_of_squares() -> None:
    images = photographs(3)
    recovery, best = recovered(vit(num_heads=2), images, torch.tensor([1, 2, 3]))
    patches = patchify(recovery.images, 4).double()
    distance = (patches[:, None] - best).square().mean(dim=(2, 3)).min(dim=0).values
    assert recovery.facts[0]["separated"] == 3 and float(distance.max()) < 1e-4


@pytest.mark.parametrize(("depth", "heads", "side"), [(4, 4, 1), (5, 3, 2), (2, 2, 2), (3, 1, 4)])
def test_places_share_the_smallest_squares_for_which_there_are_heads(depth: int, heads: int, side: int) -> None:
    """A grid of 4 by 4 in squares of one size, the last of a row and of a column cut off, numbered row by row."""
    plan = ChosenHead().planned(vit(depth=depth, num_heads=heads), 3)
    corners = [(row // side, column // side) for row in range(4) for column in range(4)]
    assert list(plan.squares) == [sorted(set(corners)).index(corner) for corner in corners]


def test_what_cannot_be_read_is_refused() -> None:
    model = vit()
    refused = ChosenHead().prepare(model, ["model.head.weight"], Knowledge())
    assert isinstance(refused, Refused) and "model.head.bias is not sent" in refused.reason
    model.model.head = torch.nn.Linear(96, 10, bias=False)
    refused = ChosenHead().prepare(model, ["model.head.weight"], Knowledge())
    assert isinstance(refused, Refused) and "classifier with a bias" in refused.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"depth": 1}, "the model has fewer than two blocks"),
        ({"embed_dim": 24, "num_heads": 4}, r"too few channels \(24\) for the 16 parts of an image"),
    ],
)
def test_a_model_too_small_to_copy_an_image_is_refused(changes: dict[str, Any], reason: str) -> None:
    model = vit(**changes)
    refused = ChosenHead().prepare(model, ["model.head.weight", "model.head.bias"], Knowledge())
    assert isinstance(refused, Refused) and re.search(reason, refused.reason), refused
    with pytest.raises(SitusError, match="this attack cannot craft the weights of this model, because") as caught:
        ChosenHead().planned(model, 1)
    assert caught.value.fields == ("server",)


def test_where_every_class_has_an_image_none_is_read() -> None:
    """No class shows what the features of none are."""
    images = photographs(10)
    recovery, _ = recovered(vit(), images, torch.arange(10))
    assert recovery.facts[0]["separated"] == 0 and not bool(recovery.images.any())


def test_under_noise_no_image_is_called_separated() -> None:
    model, images = vit(), photographs(2)
    recovered(model, images, torch.tensor([1, 2]))
    defence = create_defence("clip=1:0.3")
    upload = victim_gradients(model, images, torch.tensor([1, 2]), defence=defence)
    recovery = ChosenHead().recover(model, [upload], Knowledge(defence, Step(batch=2)))
    assert recovery.facts[0]["separated"] == 0 and recovery.images.isfinite().all()


def test_a_model_of_few_neurons_is_read_all_the_same() -> None:
    """Four a block: the heads copy, and no neuron."""
    images = photographs(2)
    recovery, _ = recovered(vit(mlp_ratio=4 / 96), images, torch.tensor([4, 0]))
    assert recovery.facts[0]["separated"] == 2

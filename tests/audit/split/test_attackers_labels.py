"""Labels from the gradients of a real classifier, rows in any order, CLS and pooled heads."""

from __future__ import annotations

import pytest
import torch
from sent import CLASSES, classifier, pictures
from torch.nn.functional import cross_entropy

from situs.audit.split.attackers import (
    labels_with_head,
    labels_without_head,
    place_rows,
    read_rows,
    regroup,
    several_with_head,
    share_up_to_names,
)
from situs.backbones.base import Stream
from situs.methods.supervised import multi_label_loss


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_labels_are_read_off_what_comes_back(pool: str) -> None:
    backbone = classifier(global_pool=pool)
    labels = torch.arange(12) % CLASSES
    positions, images = backbone.positions(), pictures(12)
    out = backbone.blocks(backbone.assemble(backbone.embed(images), positions)).z.detach().requires_grad_()
    logits = backbone.head(backbone.finish(Stream(out, 1)))
    torch.testing.assert_close(logits, backbone.model(images))
    [gradient] = torch.autograd.grad(cross_entropy(logits, labels), out)
    assert torch.equal(labels_with_head(backbone, out, gradient), labels)

    read = read_rows(backbone, 17, 24)
    assert read.tolist() == ([True, *[False] * 16] if pool == "token" else [False, *[True] * 16])
    order = torch.rand(12, 17, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[..., None].expand_as(out)
    seen, came = out.gather(1, order), gradient.gather(1, order)
    rows = place_rows(came, read)[..., None].expand_as(out)
    assert torch.equal(labels_with_head(backbone, seen.gather(1, rows), came.gather(1, rows)), labels)
    assert share_up_to_names(labels_without_head(came, CLASSES), labels) == 1


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_any_number_of_labels_is_read_by_least_squares(pool: str, monkeypatch) -> None:
    """The gradients of the loss that training has, some labels unknown; in pieces as at once."""
    backbone = classifier(global_pool=pool, num_classes=9)
    labels = torch.randint(-1, 2, (12, 9), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    out = backbone.blocks(backbone.assemble(backbone.embed(pictures(12)), backbone.positions())).z.detach()
    out.requires_grad_()
    logits = backbone.head(backbone.finish(Stream(out, 1)))
    answers = logits.detach() > 0
    [gradient] = torch.autograd.grad(multi_label_loss(logits, labels, 0.0)[0], out)
    found, known = several_with_head(backbone, out, gradient), labels >= 0
    assert torch.equal(found[known], labels[known].long())
    assert not torch.equal(found[known], answers.long()[known])  # it is not the classifier that is asked
    assert torch.equal(found[~known], answers.long()[~known])  # where nothing comes back there is no more to say
    monkeypatch.setattr("situs.audit.split.attackers.PIECE", 1)
    assert torch.equal(several_with_head(backbone, out, gradient), found)


def test_names_do_not_count_and_mistakes_do() -> None:
    assert share_up_to_names(torch.tensor([2, 2, 0, 1]), torch.tensor([0, 0, 1, 2])) == 1
    assert share_up_to_names(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 2])) == 0.5
    assert share_up_to_names(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])) == 0.5


def test_rows_that_were_exchanged_go_back_to_a_pooled_sample_by_their_gradients() -> None:
    backbone = classifier(global_pool="avg")
    out = backbone.blocks(backbone.assemble(backbone.embed(pictures(8)), backbone.positions())).z.detach()
    out.requires_grad_()
    loss = cross_entropy(backbone.head(backbone.finish(Stream(out, 1))), torch.arange(8) % CLASSES)
    [gradient] = torch.autograd.grad(loss, out)
    chance = torch.Generator().manual_seed(0)
    moved = torch.arange(8 * 17).view(8, 17)
    for start in (0, 4):  # tokens behind the first are exchanged within four samples
        part = moved[start : start + 4, 1:]
        moved[start : start + 4, 1:] = part.flatten()[torch.randperm(64, generator=chance)].view(4, 16)
    index = regroup(gradient.flatten(0, 1)[moved], read_rows(backbone, 17, 24), size=4)
    assert torch.equal(index.flatten().sort().values, torch.arange(8 * 17))
    owner = (moved.flatten()[index] // 17)[:, 1:]
    assert torch.equal(owner, owner[:, :1].expand_as(owner)) and len(owner[:, 0].unique()) == 8

"""Labels from the gradients of a real classifier, rows in any order, CLS and pooled heads."""

from __future__ import annotations

import pytest
import torch
from sent import CLASSES, classifier, pictures
from torch.nn.functional import cross_entropy

from situs.audit.split.labels import labels_with_head, labels_without_head, place_rows, read_rows, share_up_to_names
from situs.backbones.base import Stream


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


def test_names_do_not_count_and_mistakes_do() -> None:
    assert share_up_to_names(torch.tensor([2, 2, 0, 1]), torch.tensor([0, 0, 1, 2])) == 1
    assert share_up_to_names(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 2])) == 0.5
    assert share_up_to_names(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])) == 0.5

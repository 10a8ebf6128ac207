from __future__ import annotations

import math

import pytest
import torch
from builders import small_method, small_vit

from situs.core.when import When
from situs.data.augment.mix import soft_multi_labels
from situs.errors import SitusError
from situs.methods import Batch, Supervised, SupervisedConfig, create_method
from situs.methods.supervised import multi_label_loss


def make(smoothing: float = 0.1) -> Supervised:
    torch.manual_seed(0)
    backbone = small_vit(8, num_classes=5)
    return Supervised(backbone, SupervisedConfig(label_smoothing=smoothing)).double()


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_smoothing_is_the_mixture_it_says(smoothing: float) -> None:
    method = make(smoothing)
    labels = torch.tensor([0, 4, 2, 2])
    loss = method(Batch(images(), torch.arange(4), {"label": labels}), {}).loss
    log_p = method.backbone.model(images()).log_softmax(-1)
    target = (1 - smoothing) * torch.eye(5, dtype=torch.float64)[labels] + smoothing / 5
    assert float(loss) == pytest.approx(float(-(target * log_p).sum(-1).mean()), abs=1e-6)


def test_soft_labels_are_used_as_they_are() -> None:
    method = make(0.4)
    soft = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    soft = soft / soft.sum(-1, keepdim=True)
    loss = method(Batch(images(), torch.arange(4), {"label": soft}), {}).loss
    log_p = method.backbone.model(images()).log_softmax(-1)
    assert float(loss) == pytest.approx(float(-(soft * log_p).sum(-1).mean()), abs=1e-6)


def binary_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> tuple[float, float]:
    """Loss and accuracy by the definition, one label after the other."""
    loss, right, known = 0.0, 0, 0
    for z, y in zip(logits.flatten().tolist(), labels.flatten().tolist(), strict=True):
        if y < 0 or math.isnan(y):
            continue
        share = y if isinstance(y, float) else y * (1 - smoothing) + smoothing / 2
        p = 1 / (1 + math.exp(-z))
        loss -= share * math.log(p) + (1 - share) * math.log(1 - p)
        right, known = right + ((z > 0) == (share > 0.5)), known + 1
    return loss / labels.numel(), right / max(known, 1)


MANY = torch.tensor([[1, 0, -1, 0, 1], [0, 0, 0, 0, 0], [-1] * 5, [1, 1, 0, -1, 0]], dtype=torch.int8)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_any_number_of_classes_is_the_binary_cross_entropy_of_each(smoothing: float, soft: bool) -> None:
    method = make(smoothing)
    labels = soft_multi_labels(MANY, 0.3).double() if soft else MANY
    output = method(Batch(images(), torch.arange(4), {"labels": labels}), {})
    loss, accuracy = binary_cross_entropy(method.backbone.model(images()), labels, smoothing)
    assert float(output.loss) == pytest.approx(loss, abs=1e-6)
    assert float(output.metrics["accuracy"]) == pytest.approx(accuracy, abs=1e-6)


def test_an_unknown_label_moves_nothing_and_parts_come_to_the_whole() -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    loss, _ = multi_label_loss(logits, MANY, 0.1)
    (whole,) = torch.autograd.grad(loss, logits)
    assert torch.equal(whole == 0, MANY < 0)
    parts = [multi_label_loss(logits[at : at + 2], MANY[at : at + 2], 0.1)[0] for at in (0, 2)]
    (cut,) = torch.autograd.grad(sum(parts) / 2, logits)
    torch.testing.assert_close(cut, whole)
    nothing, told = multi_label_loss(logits, torch.full_like(MANY, -1), 0.1)
    assert (float(nothing), float(told["accuracy"])) == (0.0, 0.0)


def test_mjp_learns_any_number_of_classes_too() -> None:
    method = small_method("mjp", small_vit(8, num_classes=5), label_smoothing=0.1)
    batch = Batch(images().float(), torch.arange(4), {"labels": MANY})
    output = method(batch, method.draw(batch, When(seed=0, epoch=0)))
    _, accuracy = binary_cross_entropy(output.extras["logits"], MANY, 0.1)
    assert float(output.metrics["accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    output.loss.backward()
    assert all(p.grad is not None for p in method.backbone.model.head.parameters())


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match="needs labels"):
        make()(Batch(images(), torch.arange(4)), {})
    with pytest.raises(SitusError, match="unknown method 'mp4'; choose one of: detection, droppos, "):
        create_method("mp4", make().backbone)

from __future__ import annotations

import pytest
import torch
from builders import small_vit

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.methods import Batch, Supervised, SupervisedConfig, create_method
from situs.methods.supervised import top1


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


def test_top1_counts() -> None:
    logits = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 1.0], [5.0, 1.0]])
    assert float(top1(logits, torch.tensor([1, 0, 0, 1]))) == 0.5
    assert float(top1(logits, torch.tensor([[0.3, 0.7], [0.9, 0.1], [0.1, 0.9], [0.8, 0.2]]))) == 1.0


def test_convolutional_backbones_work() -> None:
    method = create_method("supervised", create_backbone("resnet50", num_classes=3))
    output = method(Batch(torch.randn(2, 3, 32, 32), torch.arange(2), {"label": torch.tensor([0, 2])}), {})
    assert output.extras["logits"].shape == (2, 3)


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match="needs labels"):
        make()(Batch(images(), torch.arange(4)), {})
    with pytest.raises(SitusError, match="unknown method 'mp4'; choose one of: droppos, mae, mjp, mp3, supervised"):
        create_method("mp4", make().backbone)

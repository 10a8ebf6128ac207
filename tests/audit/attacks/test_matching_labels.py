"""Labels come out of the classifier's gradient: of one image always, of batches by counting, with a bias or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from hypothesis import given
from hypothesis import strategies as st
from outcomes import reason
from torch import nn

from situs.audit import Matching, adapt
from situs.audit.attacks.matching import Classifier, class_gradient, count_labels, find_classifier, infer_labels
from situs.audit.client import victim_gradients
from situs.audit.defences import Clip, Noise
from situs.backbones import create_backbone


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    return small_vit(width=32, heads=4, num_classes=20).eval()


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(count))


def test_the_classifier_is_found_by_what_it_does(backbone: Any) -> None:
    assert find_classifier(backbone, (16, 16)) == Classifier("model.head.weight", "model.head.bias")
    distilled = create_backbone(
        "deit_tiny_distilled_patch16_224", img_size=32, num_classes=192, model_args={"depth": 1}
    )
    found = find_classifier(distilled.eval(), (32, 32))  # as many classes as channels: shapes alone say nothing
    assert str(found.bias) in ("model.head.bias", "model.head_dist.bias")
    assert str(found.weight).startswith("model.head")


def test_a_model_without_a_parameter_of_classes_has_none() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 4, 4, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert find_classifier(adapt(net, 16), (16, 16)) == Classifier(None, None)
    assert "the labels are not known" in str(reason(Matching(), adapt(net, 16)))


def test_a_frozen_model_sends_nothing_to_match(backbone: Any) -> None:
    assert "frozen" in str(reason(Matching(), backbone, sent=()))


@pytest.mark.parametrize("label", range(0, 20, 3))
@pytest.mark.parametrize("with_bias", [True, False])
def test_one_image(label: int, with_bias: bool, backbone: Any) -> None:
    upload = victim_gradients(backbone, images(1), torch.tensor([label]))
    if not with_bias:
        del upload["model.head.bias"]
    found = infer_labels(upload, Classifier("model.head.weight", "model.head.bias"), 1)
    assert found is not None and found.tolist() == [label]


@pytest.mark.parametrize("labels", [[3, 7, 11, 19], [5, 5, 5, 2], [0, 0, 9, 9], [4] * 4, [1, 2, 3, 4, 5, 6, 6, 6]])
@pytest.mark.parametrize("with_bias", [True, False])
def test_batches_with_labels_that_repeat(labels: list[int], with_bias: bool, backbone: Any) -> None:
    upload = victim_gradients(backbone, images(len(labels)), torch.tensor(labels))
    if not with_bias:
        del upload["model.head.bias"]
    found = infer_labels(upload, Classifier("model.head.weight", "model.head.bias"), len(labels))
    assert found is not None and found.tolist() == sorted(labels)


def test_under_defences(backbone: Any) -> None:
    names = Classifier("model.head.weight", "model.head.bias")
    for defence in (Clip(0.1, 0.0), Noise(1e-3)):
        upload = victim_gradients(backbone, images(3), torch.tensor([8, 1, 8]), defence=defence)
        found = infer_labels(upload, names, 3, defence.noise_level(3))
        assert found is not None and found.tolist() == [1, 8, 8]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_uniform_guesses_count_exactly(labels: list[int], factor: float) -> None:
    """A model that knows nothing says 1 / K: then each count is exact, whatever the scale."""
    target = nn.functional.one_hot(torch.tensor(labels), 40).double()
    mean = (torch.full_like(target, 1 / 40) - target).mean(dim=0)
    assert count_labels(factor * mean, len(labels)).tolist() == sorted(labels)


def test_a_sure_label_counts_although_it_is_well_known() -> None:
    """The model is sure of class 2's image: its mass is faint, and still it must be a label, for it is negative."""
    mean = torch.tensor([0.2, -0.4, -0.01, 0.21], dtype=torch.float64)
    assert count_labels(mean, 2).tolist() == [1, 2]
    assert count_labels(mean, 2, noise=0.1).tolist() == [1, 1]  # drowned in noise it is not
    found = [count_labels(mean, 2, noise=0.01 / deviations).tolist() for deviations in (3.9, 4.1)]
    assert found == [[1, 1], [1, 2]]  # four deviations are no noise


def test_nothing_sent_nothing_inferred() -> None:
    assert class_gradient({"other": torch.ones(3)}, Classifier("w", "b")) is None
    assert infer_labels({}, Classifier(None, None), 1) is None


def test_what_overflowed_keeps_its_sign_and_spoils_no_other(backbone: Any) -> None:
    names = Classifier("model.head.weight", "model.head.bias")
    upload = victim_gradients(backbone, images(2), torch.tensor([4, 11]))
    bias, weight = upload["model.head.bias"].clone(), upload["model.head.weight"].clone()
    bias[4] = -torch.inf
    found = infer_labels({"model.head.bias": bias}, names, 2)
    assert found is not None and found.tolist() == [4, 11]
    weight[3, 5], weight[9, 20] = torch.inf, torch.nan
    found = infer_labels({"model.head.weight": weight}, names, 2)
    assert found is not None and found.tolist() == [4, 11]
    assert infer_labels({"model.head.weight": weight * torch.nan}, names, 2) is None

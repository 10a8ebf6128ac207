"""Labels from the classifier's own gradient: ∂l/∂b = mean over the batch of (p - y), negative only where a label is.

With one image exactly one class is negative (Zhao et al., iDLG, arXiv 2001.02610). With more, every negative class is a
label for sure, and the rest of the batch is counted off the negative mass: a label that stands behind two images has
twice as much of it. A classifier that sends no bias gradient has rows (p - y) f of ∂l/∂W instead: the same numbers
along the direction that the images' features share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.patchembed.equations import svd
from situs.audit.defences import Gradients
from situs.audit.stem import noise_for
from situs.backbones.base import Backbone


class Classifier(NamedTuple):
    """Names of the parameters that make the logits; None where the model has no such parameter."""

    weight: str | None
    bias: str | None


def find_classifier(backbone: Backbone, size: tuple[int, int]) -> Classifier:
    """The classifier's parameters, found by behaviour: a bias moves the logits as they are, a weight by one outer
    product with the features. A model with several heads (distillation) names one of them."""
    named = {name: p for name, p in backbone.named_parameters() if p.requires_grad and p.dim() in (1, 2)}
    with torch.enable_grad():
        logits = backbone(noise_for(backbone, 1, backbone.input.channels, *size))
        probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
        able = {name: p for name, p in named.items() if p.shape[0] == logits.shape[1]}
        if not able:
            return Classifier(None, None)
        found = torch.autograd.grad((logits * probe).sum(), list(able.values()), allow_unused=True)
    weight = bias = None
    for name, gradient in zip(able, found, strict=True):
        if gradient is None or not _follows(gradient, probe[0]):
            continue
        if gradient.dim() == 1:
            bias = name
        else:
            weight = name
    return Classifier(weight, bias)


def _follows(gradient: Tensor, probe: Tensor) -> bool:
    """Whether every column of `gradient` [K, ...] is a multiple of `probe` [K], and not all are none."""
    columns = gradient.reshape(gradient.shape[0], -1)
    along = torch.outer(probe, probe @ columns) / probe.square().sum()
    return bool(columns.norm() > 0) and bool((columns - along).norm() <= 1e-3 * columns.norm())


def class_gradient(upload: Gradients, classifier: Classifier) -> Tensor | None:
    """mean (p - y) over the batch, up to a positive factor: [K] in float64; None where nothing of it was sent."""
    if classifier.bias in upload:
        return upload[classifier.bias].double().nan_to_num(0.0, 1e30, -1e30)  # overflow keeps its sign
    if classifier.weight not in upload:
        return None
    weight = known_numbers(upload[classifier.weight])
    weight = weight[:, weight.isfinite().all(dim=0)]
    if not weight.numel():
        return None
    # The direction that the batch's features share. Its sign: labels are few and large, the other classes many.
    u, s, _ = svd(weight)
    along = u[:, 0] * s[0]
    return -along if along.max() > -along.min() else along


def count_labels(classes: Tensor, batch: int, noise: float = 0.0) -> Tensor:
    """The labels of a batch from mean (p - y) [K] up to a positive factor: [batch], rising.

    First every class that is negative beyond what noise does, the most negative first; then, one by one, the class
    that has most negative mass left when each label found so far has taken an even share.
    """
    mass = (-classes).clamp(min=0.0)
    order = mass.argsort(descending=True, stable=True)[:batch]
    sure = [int(label) for label in order if float(mass[label]) > 4 * noise]
    found = sure or [int(order[0])]
    left = mass * (batch / mass.sum().clamp(min=1e-300))
    for label in found:
        left[label] -= 1
    while len(found) < batch:
        best = int(left.argmax())
        found.append(best)
        left[best] -= 1
    return torch.tensor(sorted(found))


def infer_labels(upload: Gradients, classifier: Classifier, batch: int, noise: float = 0.0) -> Tensor | None:
    """The labels behind an upload, [batch], in rising order; None where the classifier's gradient was not sent."""
    classes = class_gradient(upload, classifier)
    return None if classes is None else count_labels(classes, batch, noise)

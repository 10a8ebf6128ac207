"""A model's classifier is initialised with a linear probe on its frozen features.

The first gradients of a random head disturb the pretrained layers before the head has learned anything (Kumar et al.
2022, "Fine-Tuning can Distort Pretrained Features"). Fitting the head first costs one pass over the images.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.weights import HEADS
from situs.data.loader import Loader, make_loader
from situs.data.sampler import sample_of
from situs.errors import SitusError
from situs.measure.accuracy import hard, labels_of
from situs.measure.probe.linear import Linear, fit_probe
from situs.methods.base import Batch, Method
from situs.models.inference import evaluating
from situs.progress import note, task
from situs.train.assemble import RunConfig
from situs.train.step import autocast

SMALL = 5_000
"""Up to so many samples the head is initialised with a probe by default."""


def head_of(backbone: Backbone, classes: int) -> nn.Linear:
    """The linear layer that gives the logits."""
    heads = [
        module
        for name, module in backbone.model.named_modules()
        if f"{name}.".startswith(HEADS) and isinstance(module, nn.Linear) and module.out_features == classes
    ]
    if len(heads) != 1 or heads[0].bias is None:
        raise SitusError(f"{backbone.name}: has no single linear classifier to initialise", field="source")
    return heads[0]


def head_inputs(
    backbone: Backbone, classes: int, batches: Iterable[Batch], precision: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor]:
    """The classifier's inputs [n, D], labels [n] and sample numbers [n], of the samples that can be read."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    inputs: list[Tensor] = []
    hook = head_of(backbone, classes).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with evaluating(backbone):
            for batch in batches:
                with autocast(batch.inputs.device, precision):
                    backbone(batch.inputs)
                parts.append((inputs.pop().float(), hard(labels_of(batch)), sample_of(batch.ids)))
    finally:
        hook.remove()
    if not parts:
        raise SitusError("none of the labelled samples can be read", field="data")
    features, labels, rows = map(torch.cat, zip(*parts, strict=True))
    return features, labels, rows


def fold_in(linear: Linear, head: nn.Linear) -> None:
    """Writes a classifier of standardised features into a head that reads the features themselves."""
    weight = linear.weight / linear.scale
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(linear.bias - weight @ linear.mean)


class ProbeHead:
    """Initialises the classifier of a new run before its first update."""

    def __init__(self, config: RunConfig, train: Loader, precision: str) -> None:
        self.config, self.train, self.precision = config, train, precision

    def begin(self, method: Method) -> None:
        """Fits a linear probe to the training samples without augmentation, and writes it into the head."""
        source, classes = self.train.source, len(self.train.classes or ())
        batches = make_loader(self.config.data, None, self.train.device, source=source)
        try:
            with task("frozen features, to initialise the classifier"):
                features, labels, _ = head_inputs(method.backbone, classes, batches, self.precision)
                probe = fit_probe(features, labels, classes, seed=self.config.train.seed).linear
            fold_in(probe, head_of(method.backbone, classes))
        except SitusError as error:  # another kind of head, or too few samples to choose a weight decay by
            if self.config.tuning.head == "probe":
                raise
            note(f"the classifier starts from random weights: {error}")
            return
        note("the classifier starts from a linear probe on the frozen features (tuning.head)")


def probe_head(config: RunConfig, train: Loader, precision: str) -> list[ProbeHead]:
    """The `ProbeHead` of a run, where its head starts from a probe; else nothing."""
    setting = config.tuning.head
    if setting == "new" or (setting is None and config.init is None):
        return []
    plain = train.source.classes is not None and train.source.target == "label" and not train.source.multi_label
    reasons = {
        "there are no pretrained weights": config.init is None,
        "it needs samples with one class each": not plain or config.data.modality.ids,
        "a probe is not differentially private": config.dp.on,
    }
    if refused := [reason for reason, holds in reasons.items() if holds]:
        if setting == "probe":
            raise SitusError(f"tuning.head=probe: {refused[0]}", field="tuning.head")
        return []
    small = len(train.source) <= SMALL and config.init_positions and train.plan.world == 1
    return [ProbeHead(config, train, precision)] if setting == "probe" or small else []

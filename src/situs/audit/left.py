"""What a client leaves the attacker who trains the classifier alone, or LoRA's products beside frozen matrices.

The classifier's gradient is the product of p - y with the features h that it is fed: ∂W = (p - y) hᵀ, ∂b = p - y. Of
one image each row of ∂W over its entry of ∂b is h itself, and the one negative entry of ∂b is the label. Of a product
up @ down beside a matrix that is fed the tokens X, ∂down = scale · upᵀ Gᵀ X: as many directions of the tokens as the
rank. Nothing here is a verdict on privacy: it says what is sent, and what can be read off it for certain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from situs.audit.cases import TestSet
from situs.audit.client import parameter_names, victim_gradients
from situs.audit.defences import Gradients
from situs.backbones.lora import low_rank_names
from situs.errors import counted, verb
from situs.methods.base import Method


class Read(NamedTuple):
    """What one image's upload shows of the classifier's input. features: [D]; None where there is nothing to read."""

    features: Tensor | None
    label: int


def classifier_of(method: Method) -> str | None:
    """The name of the layer that gives the logits, where its weight and its bias are trained; else None."""
    sent, outputs = parameter_names(method), method.backbone.num_classes
    heads = [
        name
        for name, layer in method.backbone.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == outputs
        and f"{name}.weight" in sent and f"{name}.bias" in sent
    ]  # fmt: skip
    return heads[0] if len(heads) == 1 else None


def read_classifier(upload: Gradients, name: str) -> Read:
    """The features and the label of the one image behind an upload."""
    weight, bias = upload[f"{name}.weight"].double(), upload[f"{name}.bias"].double()
    row = int(bias.abs().argmax())
    features = weight[row] / bias[row] if bias[row] != 0 else None
    return Read(features, int(bias.argmin()))


@torch.no_grad()
def fed_to(method: Method, name: str, images: Tensor) -> Tensor:
    """What the classifier is really fed of images, [n, D]."""
    found: list[Tensor] = []
    layer = method.backbone.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    try:
        method.backbone(images)
    finally:
        handle.remove()
    return found[0]


def what_is_left(method: Method, test: TestSet) -> dict[str, str]:
    """For a reader: what such a client sends, and what is read off it for certain, measured without a defence."""
    sent = parameter_names(method)
    every = sum(1 for name in dict(method.named_parameters()) if name.startswith("backbone."))
    numbers = sum(p.numel() for p in sent.values())
    found = {
        "sent": f"{len(sent)} of {every} tensors ({numbers:,} numbers), {', '.join([*sent][:4])}"
        f"{' …' * (len(sent) > 4)}: "
        "what is frozen has no gradient. An attack that needs it does not apply, which says nothing about privacy"
    }
    if (name := classifier_of(method)) is not None:
        found["left by the classifier"] = _said(method, name, test)
    factors = [part for part in low_rank_names(method.backbone) if part.endswith("down")]
    if factors:
        rank, tokens = sent[factors[0]].shape[0], method.backbone.num_tokens + method.backbone.num_prefix
        shown = "all of them" if rank >= tokens else f"{rank} of them"
        found["left by LoRA"] = (
            f"{len(factors)} matrices have products of rank {rank}: the gradient of each shows at most {rank} "
            f"directions of the {tokens} tokens an image that it is fed, so {shown}; nothing is solved for here, and "
            "what a search makes of them is not known"
        )
    return found


def _said(method: Method, name: str, test: TestSet) -> str:
    truth = fed_to(method, name, test.pixels).double()
    off, again, labels = [], 0, 0
    for i in range(len(test)):
        upload = victim_gradients(method, test.pixels[i : i + 1], test.labels[i : i + 1], ids=torch.tensor([i]))
        read = read_classifier(upload, name)
        labels += read.label == int(test.labels[i])
        if read.features is not None:
            off.append(float((read.features - truth[i]).norm() / truth[i].norm()))
            again += int((truth - read.features).norm(dim=1).argmin()) == i
    error = f"{max(off):.1g}" if off else "unknown"
    return (
        "of one image its gradient is (p - y) times the features: read off without a defence at batch 1 they are those "
        f"of the image to {error} (relative, the worst), the label is right for {labels} of {len(test)}, and {again} "
        f"of {counted(len(test), 'images')} {verb(again, 'are')} found again among themselves by their features. A "
        "picture takes a search (matching)"
    )

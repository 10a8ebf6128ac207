"""What a client still gives away that trains the classifier alone, or LoRA's products beside frozen matrices.

The classifier's gradient is the product of p - y with its input, the features h: ∂W = (p - y) hᵀ, ∂b = p - y. For one
image each row of ∂W over its entry of ∂b is h itself, and the one negative entry of ∂b is the label. For a product
up @ down beside a matrix with input X (tokens), ∂down = scale · upᵀ Gᵀ X: as many directions of the tokens as the rank.
This is no verdict on privacy: it says what is sent, and what can be read off it for certain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from situs.audit.cases import TestSet
from situs.audit.client import parameter_names, victim_gradients
from situs.audit.defences import Gradients
from situs.audit.products import module_inputs
from situs.backbones.lora import low_rank_names
from situs.errors import counted, verb
from situs.methods.base import Method


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


def read_classifier(upload: Gradients, name: str) -> tuple[Tensor | None, int]:
    """The features [D] and the label of the one image behind an upload; no features where every p equals y."""
    weight, bias = upload[f"{name}.weight"].double(), upload[f"{name}.bias"].double()
    row = int(bias.abs().argmax())
    return weight[row] / bias[row] if bias[row] != 0 else None, int(bias.argmin())


@torch.no_grad()
def classifier_inputs(method: Method, name: str, images: Tensor) -> Tensor:
    """The true input of the classifier for images, [n, D]."""
    with module_inputs(method.backbone.get_submodule(name)) as inputs:
        method.backbone(images)
    return inputs[0]


def describe_upload(method: Method, test: TestSet) -> dict[str, str]:
    """For a reader: what such a client sends, and what can be read off it for certain, without a defence."""
    sent = parameter_names(method)
    every = sum(1 for name in dict(method.named_parameters()) if name.startswith("backbone."))
    numbers = sum(p.numel() for p in sent.values())
    notes = {
        "sent": f"{len(sent)} of {every} tensors ({numbers:,} numbers), "
        f"{', '.join([*sent][:4])}{' …' * (len(sent) > 4)}: frozen parameters have no gradient. An attack "
        "that needs it does not apply; other attacks may"
    }
    if (name := classifier_of(method)) is not None:
        notes["left by the classifier"] = _classifier_note(method, name, test)
    factors = [part for part in low_rank_names(method.backbone) if part.endswith("down")]
    if factors:
        rank, tokens = sent[factors[0]].shape[0], method.backbone.num_tokens + method.backbone.num_prefix
        shown = "all of them" if rank >= tokens else f"{rank} of them"
        notes["left by LoRA"] = (
            f"{len(factors)} matrices have products of rank {rank}: the gradient of each shows at most {rank} "
            f"directions of the {tokens} tokens of an image, so {shown}; no attack here solves for them, and "
            "what a search can recover from them is not known"
        )
    return notes


def _classifier_note(method: Method, name: str, test: TestSet) -> str:
    truth = classifier_inputs(method, name, test.pixels).double()
    errors, reidentified, right = [], 0, 0
    for i in range(len(test)):
        upload = victim_gradients(method, test.pixels[i : i + 1], test.labels[i : i + 1], ids=torch.tensor([i]))
        features, label = read_classifier(upload, name)
        right += label == int(test.labels[i])
        if features is not None:
            errors.append(float((features - truth[i]).norm() / truth[i].norm()))
            reidentified += int((truth - features).norm(dim=1).argmin()) == i
    error = f"{max(errors):.1g}" if errors else "unknown"
    return (
        "for one image its gradient is (p - y) times the features: without a defence and at batch 1 the features "
        f"are read with a relative error of at most {error}, the label is right for {right} of {len(test)}, and "
        f"{reidentified} of {counted(len(test), 'images')} {verb(reidentified, 'are')} found again among "
        "themselves by their features. A picture takes a search (matching)"
    )

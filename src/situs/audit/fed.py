"""The real input of the patch embedding in a step, as pictures: the reference of a score.

A module may flip, crop, shift, colour or mix its images before its first layer. An attacker recovers the input of that
layer; compared with the images given to the module, an exact recovery would look like a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from situs.audit.products import unfold
from situs.audit.stem import Stem, find_embedding, find_stem, patches_of, to_images
from situs.backbones.base import Backbone

SAME = 1e-3
"""Relative: a layer that is fed what the images say differs by rounding alone."""


def reading_stem(backbone: Backbone) -> Stem | None:
    """The layer whose input is recorded: the patch embedding, with or without a table behind it."""
    stem = find_stem(backbone)
    stem = find_embedding(backbone) if isinstance(stem, str) else stem
    return None if isinstance(stem, str) else stem


@contextmanager
def recorded(backbone: nn.Module, stem: Stem | None) -> Iterator[list[Tensor]]:
    """Records the inputs [B, N, K] of the patch embedding, pass after pass, also those of copies of the model; none
    where its weight does not belong to a convolution or linear layer."""
    inputs: list[Tensor] = []
    handle = on_input(backbone, stem, inputs.append)
    try:
        yield inputs
    finally:
        if handle is not None:
            handle.remove()


def on_input(backbone: nn.Module, stem: Stem | None, take: Callable[[Tensor], None]) -> RemovableHandle | None:
    """Calls `take` with the input [B, N, K] of the patch embedding in each forward pass; None where it has no layer."""
    layer = None if stem is None else _layer(backbone, stem.weight)
    if stem is None or layer is None:
        return None
    return layer.register_forward_pre_hook(lambda part, args: take(_rows(part, args[0].detach(), stem)))


def _layer(backbone: nn.Module, weight: str) -> nn.Conv2d | nn.Linear | None:
    """The layer that a weight belongs to, by the weight's name."""
    name, _, last = weight.rpartition(".")
    layer = dict(backbone.named_modules()).get(name)
    if last == "weight" and (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)):
        return layer
    return None


def _rows(layer: nn.Module, inputs: Tensor, stem: Stem) -> Tensor:
    """The rows [B, N, K] that a layer multiplies with its weight, in the order of the stem's equations."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(len(inputs), -1, inputs.shape[-1])
    assert isinstance(layer, nn.Conv2d)
    rows = unfold(inputs, layer.weight.shape[2:], layer.stride, layer.padding, layer.dilation)
    if stem.layout != "patches":
        return rows
    return rows.unflatten(-1, (inputs.shape[1], -1)).mT.flatten(-2)  # the channels of a pixel beside one another


@torch.no_grad()
def pictures_fed(backbone: Backbone, stem: Stem | None, inputs: list[Tensor], images: Tensor) -> Tensor | None:
    """The normalised images [B, C, H, W] that the layer was fed; None where those are `images`, or cannot be known.

    inputs: as recorded. Of several passes over as many images the first counts.
    """
    rows = torch.cat(inputs)[: len(images)] if inputs and len({part.shape[1:] for part in inputs}) == 1 else None
    if stem is None or rows is None or len(rows) < len(images):
        return None
    usual = patches_of(images, backbone, stem)
    if usual.shape == rows.shape and float((usual - rows).norm()) <= SAME * float(usual.norm()):
        return None
    return to_images(rows.double(), backbone, stem).to(images.dtype)

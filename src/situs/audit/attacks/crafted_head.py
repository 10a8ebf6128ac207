"""A server that chooses the weights, and a client that sends the classifier's gradient alone.

The frozen model is written to copy the picture into its features: each head looks at one place, or at the places of a
small square, and adds the first numbers of what stands there to channels of its own. The classifier is 0, so that every
class is as likely: its gradient is then, up to a part that all classes share, the sum of the features of the images of
each class, and the gradient of its bias counts them. An image whose class no other image of the batch has is read.

    channels   first directions of a patch | bits of the place | constants | directions × squares

As many numbers come back as the features have channels: a small picture, exact only where that is all of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused, absent, device_of, known_numbers
from situs.audit.attacks.crafted import (
    GATE,
    LARGE,
    Channels,
    Plan,
    basis_of,
    classifier,
    clear,
    deviation_of,
    matrix,
    plan_of,
    write_tokens,
)
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import to_images
from situs.backbones.base import Backbone
from situs.findings import ACTIVE, Fact

WHOLE = 0.01
"""How far a count of images may be from a whole number: rounding."""


@dataclass(frozen=True)
class Copying:
    """How pictures are copied into features. squares: for each place the number of its square. directions: numbers of
    a square that are copied; they stand behind the constants, square by square."""

    plan: Plan
    squares: tuple[int, ...]
    directions: int

    @property
    def count(self) -> int:
        return max(self.squares) + 1

    def stored(self, square: int) -> slice:
        """The channels of a square."""
        first = self.plan.channels.zero + 1 + square * self.directions
        return slice(first, first + self.directions)


def copying_of(backbone: Backbone) -> Copying | str:
    """How a model copies pictures, or the reason why it cannot: one sentence."""
    plan = plan_of(backbone, neurons=False)
    if isinstance(plan, str):
        return plan
    layers = [layer for layer in backbone.model.modules() if isinstance(layer, nn.Linear) and layer.bias is not None]
    if not any(layer.out_features == backbone.num_classes > 0 for layer in layers):
        return "it has no linear classifier with a bias, whose gradient counts the images of a class"
    (height, width), heads = backbone.grid, sum(block.attention.heads for block in backbone.parts())
    side = next(side for side in range(1, max(height, width) + 1) if -(-height // side) * -(-width // side) <= heads)
    across = -(-width // side)
    squares = tuple(row // side * across + column // side for row in range(height) for column in range(width))
    bits = math.ceil(math.log2(max(squares) + 2))
    free = backbone.dim - bits - 8
    least = min(block.attention.out.weight.shape[1] // block.attention.heads for block in backbone.parts())
    directions = min(free // (max(squares) + 2), backbone.patch_values, least)
    if directions < 1:
        return f"it has too few channels ({backbone.dim}) for {max(squares) + 1} squares"
    basis = basis_of(backbone, directions)
    return Copying(replace(plan, channels=Channels(directions, bits), basis=basis), squares, directions)


@torch.no_grad()
def write_copy(model: Backbone, copying: Copying) -> None:
    """Writes the weights in place."""
    plan, c, blocks = copying.plan, copying.plan.channels, model.parts()
    unit = c.up
    clear(model)
    write_tokens(model, plan, prefix_place=False, numbers=copying.squares)
    free = [(block, head) for block in blocks for head in range(block.attention.heads)]
    for square, (block, head) in zip(range(copying.count), free, strict=False):
        attention, width = block.attention, model.dim // block.attention.heads
        scale = width**-0.5 if attention.scale is None else attention.scale
        parts = [matrix(layer) for layer in attention.qkv]
        queries, keys, values = parts if len(parts) == 3 else parts[0].split(model.dim)
        row = head * width
        block.norm1.weight[unit], block.norm1.bias[unit] = 0.0, 1.0
        queries[row, unit] = 1.0
        keys[row, c.place] = GATE / scale * c.signs(square + 1).to(keys)
        keys[row, c.one] = -GATE / scale * (c.bits - 1)  # above the class token's 0
        keys[row, c.zero] = -keys[row].sum()
        for number in range(copying.directions):
            values[row + number, number], values[row + number, c.zero] = 1.0, -1.0
            matrix(attention.out)[copying.stored(square).start + number, row + number] = deviation_of(model, plan)


class ChosenHead(Attack):
    """Reads the classifier's gradient of a model that `write_copy` wrote."""

    name: ClassVar[str] = "crafted-head"
    about: ClassVar[str] = "the server wrote the frozen weights: features are small pictures, which classes separate"
    closed_form: ClassVar[bool] = True
    active: ClassVar[bool] = True
    knows: ClassVar[str] = "the weights, which it chose itself"
    needs: ClassVar[str] = "the classifier's weight and bias; images of different classes"
    difference: ClassVar[str] = "only the classifier needs to be sent; it limits how many numbers can be read"
    measured: ClassVar[str] = "benchmarks/active.py"

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        copying = copying_of(backbone)
        if isinstance(copying, str):
            return Refused(copying)
        if known.step.local_steps > 1 or known.step.adam:
            return Refused("it reads the gradient of one step, and several steps or Adam were made")
        names = _names(backbone)
        return absent(sent, names) or Ready(names)

    def write(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> None:  # noqa: ARG002
        copying = copying_of(backbone)
        assert isinstance(copying, Copying)
        write_copy(backbone, copying)

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        return "; ".join(filter(None, (super().spoiled(known, noise), ACTIVE.unproved)))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known, copying = known or Knowledge(), copying_of(backbone)
        assert isinstance(copying, Copying)
        batch, images, facts = known.step.batch, list[Tensor](), list[dict[str, Fact]]()
        for upload in uploads:
            if images and deadline is not None and deadline.over():
                break
            alone, others = read_copy(backbone, copying, upload, batch)
            grey = torch.zeros(batch, *alone.shape[1:], dtype=torch.float64)
            patches = torch.cat([alone, others, grey])[:batch]
            images.append(to_images(patches, backbone, copying.plan.stem).float().to(device_of(upload)))
            facts.append(_facts(copying, len(alone), batch))
        cut = None if len(images) == len(uploads) else f"{len(images)} of {len(uploads)} uploads"
        return Recovery(torch.cat(images), facts, partial=cut)


def _names(backbone: Backbone) -> tuple[str, str]:
    head, names = classifier(backbone), {id(p): name for name, p in backbone.named_parameters()}
    return names[id(head.weight)], names[id(head.bias)]


def _facts(copying: Copying, alone: int, batch: int) -> dict[str, Fact]:
    every, read = copying.plan.places * copying.plan.basis.shape[1], copying.count * copying.directions
    verdict = f"{alone} of {batch} images were alone in their class; {read} of {every} numbers of an image were read"
    whole = alone >= batch and read >= every
    return {"fits": whole, "alone": alone, "unseen": every - read, "verdict": "" if whole else verdict}


def read_copy(backbone: Backbone, copying: Copying, upload: Gradients, batch: int) -> tuple[Tensor, Tensor]:
    """Patches of images that were alone in their class, and the means of others; both [n, N, K].

    With C classes as likely as each other, ∂b = 1/C - (images of the class) / batch, and ∂W is the same sum of
    features. What all classes share is the row of a class without images.
    """
    c = copying.plan.channels
    weight, bias = (known_numbers(upload[name]).cpu() for name in _names(backbone))
    shares = (1 / len(bias) - bias) * batch
    counts = shares.round().clamp(min=0)
    empty = counts == 0
    nothing = torch.zeros(0, copying.plan.places, copying.plan.basis.shape[1], dtype=torch.float64)
    if not bool(empty.any()) or not bool(shares.isfinite().all()):
        return nothing, nothing
    features = (weight[empty].mean(dim=0) - weight) * batch / counts.clamp(min=1).unsqueeze(1)
    deviation = 2 * LARGE / (features[:, c.plus] - features[:, c.minus])
    stored = (features - features[:, c.zero, None]) * deviation.unsqueeze(1)
    numbers = torch.stack([stored[:, copying.stored(square)] for square in copying.squares], dim=1)
    patches = (numbers @ copying.plan.basis).nan_to_num(0.0, 0.0, 0.0)
    if float((shares - counts).abs().max()) > WHOLE or int(counts.sum()) != batch:  # noise: nothing is counted
        return nothing, patches[shares.argsort(descending=True)[:batch]]
    return patches[counts == 1], patches[counts > 1]

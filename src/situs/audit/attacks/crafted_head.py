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
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.crafted import (
    LARGE,
    Channels,
    CraftedAttack,
    Plan,
    basis_of,
    classifier,
    clear,
    deviation_of,
    look,
    matrix,
    plan_of,
    projections,
    write_tokens,
)
from situs.audit.defences import Gradients
from situs.backbones.base import Backbone

WHOLE = 0.01
"""How far a count of images may be from a whole number: rounding."""


@dataclass(frozen=True)
class Copying(Plan):
    """How pictures are copied into features. squares: for each place the number of its square. As many numbers of a
    square are copied as `channels` has of a patch; they stand behind the constants, square by square."""

    squares: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.squares) + 1

    def stored(self, square: int) -> slice:
        """The channels of a square."""
        first = self.channels.zero + 1 + square * self.channels.patch
        return slice(first, first + self.channels.patch)


class ChosenHead(CraftedAttack[Copying]):
    """Reads the classifier's gradient."""

    name: ClassVar[str] = "crafted-head"
    about: ClassVar[str] = (
        "the server crafts the frozen weights, so that the features are a small copy of the image. The "
        "classifier's gradient keeps images of different classes apart"
    )
    needs: ClassVar[str] = "the classifier's weight and bias; images of different classes"
    difference: ClassVar[str] = (
        "needs only the classifier's gradient; the classifier's size limits how many values can be read"
    )
    separated: ClassVar[str] = "by their class"

    def plan(self, backbone: Backbone, batch: int) -> Copying | str:  # noqa: ARG002
        plan = plan_of(backbone, neurons=False)
        if isinstance(plan, str):
            return plan
        layers = [part for part in backbone.model.modules() if isinstance(part, nn.Linear) and part.bias is not None]
        if not any(layer.out_features == backbone.num_classes > 0 for layer in layers):
            return (
                "the model has no linear classifier with a bias; the attack needs this bias to count the images of a "
                "class"
            )
        (height, width), heads = backbone.grid, sum(block.attention.heads for block in backbone.parts())
        sides = range(1, max(height, width) + 1)
        side = next(side for side in sides if -(-height // side) * -(-width // side) <= heads)
        across = -(-width // side)
        squares = tuple(row // side * across + column // side for row in range(height) for column in range(width))
        bits = math.ceil(math.log2(max(squares) + 2))
        free = backbone.dim - bits - 8
        least = min(block.attention.out.weight.shape[1] // block.attention.heads for block in backbone.parts())
        directions = min(free // (max(squares) + 2), backbone.patch_values, least)
        if directions < 1:
            return f"the model has too few channels ({backbone.dim}) for the {max(squares) + 1} parts of an image"
        channels, basis = Channels(directions, bits), basis_of(backbone, directions)
        return plan.extended(Copying, channels=channels, basis=basis, squares=squares)

    def sources(self, backbone: Backbone, plan: Copying) -> list[Tensor]:  # noqa: ARG002
        head = classifier(backbone)
        return [head.weight, head.bias]

    def fill(self, model: Backbone, plan: Copying, batch: int, public: Tensor | None) -> None:  # noqa: ARG002
        c = plan.channels
        clear(model)
        write_tokens(model, plan, prefix_place=False, numbers=plan.squares)
        free = [(block, head) for block in model.parts() for head in range(block.attention.heads)]
        for square, (block, head) in zip(range(plan.count), free, strict=False):
            block.norm1.weight[c.up], block.norm1.bias[c.up] = 0.0, 1.0
            row = look(block.attention, head, square, c, above=1)
            values, out = projections(block.attention)[2], matrix(block.attention.out)
            for number in range(c.patch):
                values[row + number, number], values[row + number, c.zero] = 1.0, -1.0
                out[plan.stored(square).start + number, row + number] = deviation_of(model, plan)

    def read(self, backbone: Backbone, plan: Copying, upload: Gradients, batch: int) -> tuple[Tensor, Tensor]:
        """Patches of images that were alone in their class and overflowed nowhere, and the means of others.

        With C classes as likely as each other, ∂b = 1/C - (images of the class) / batch, and ∂W is the same sum of
        features. What all classes share is the row of a class without images.
        """
        c = plan.channels
        weight, bias = (known_numbers(upload[name]).cpu() for name in self.names(backbone, plan))
        shares = (1 / len(bias) - bias) * batch
        counts = shares.round().clamp(min=0)
        empty = counts == 0
        nothing = torch.zeros(0, plan.places, plan.basis.shape[1], dtype=torch.float64)
        if not bool(empty.any()) or not bool(shares.isfinite().all()):
            return nothing, nothing
        features = weight[empty].mean(dim=0) - weight  # times a factor that the deviation takes out
        deviation = 2 * LARGE / (features[:, c.plus] - features[:, c.minus])
        stored = (features - features[:, c.zero, None]) * deviation.unsqueeze(1)
        numbers = torch.stack([stored[:, plan.stored(square)] for square in plan.squares], dim=1)
        patches = (numbers @ plan.basis).nan_to_num(0.0, 0.0, 0.0)
        if float((shares - counts).abs().max()) > WHOLE or int(counts.sum()) != batch:  # noise: nothing is counted
            return nothing, patches[shares.argsort(descending=True)[:batch]]
        alone = (counts == 1) & numbers.isfinite().flatten(1).all(dim=1)
        return patches[alone], patches[(counts > 0) & ~alone]

    def unread(self, plan: Copying) -> tuple[int, list[str]]:
        every, read = plan.places * plan.basis.shape[1], plan.count * plan.channels.patch
        return every - read, [f"{read} of {every} numbers of an image were read"]

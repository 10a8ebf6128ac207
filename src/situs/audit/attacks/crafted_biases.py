"""A server that chooses the weights, and a client that sends the gradients of biases alone.

A neuron's bias has the gradient g · act'(z), where z is the neuron's input. The activation of a transformer is curved
(GELU): act' rises with z around 0, so a neuron whose z is one number of one patch shows that number. Each number of
each place has a neuron of its own, which the bits of the place switch off for all other tokens. Beside them each place
has neurons with a known z: one gives g, one the deviation of the token's channels, and one shows the first number at
half its size: two images at once do not agree in both, so an image alone is known.

In a batch the first block writes a veto for images whose code is below an edge: the one above it is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.crafted import (
    CODE,
    GATE,
    LARGE,
    OUT,
    Channels,
    CraftedAttack,
    Plan,
    basis_of,
    carry,
    clear,
    codes_of,
    deviation_of,
    matrix,
    plan_of,
    write_classifier,
    write_tokens,
)
from situs.audit.defences import Gradients
from situs.backbones.base import Backbone
from situs.backbones.block import Block

SPAN = 3.0
"""Normalised pixels lie within ± this."""

REACH = 1.2
"""The largest z: GELU' rises up to √2."""

KNOWN = 0.5
"""z of the neuron that shows the deviation, for a token without a patch."""

STEEP = 1e4
"""Steepness of the veto."""

EXTRA = 3
"""Neurons of a place beside those of its numbers."""

AGREES = 1e-3
"""By how much two readings of one number may differ, as a share of `SPAN`: rounding."""


@dataclass(frozen=True)
class Spread(Plan):
    """Which neurons show what. first: the first block that is read; sizes: the largest size of each direction."""

    first: int
    sizes: Tensor

    def rows(self, place: int) -> tuple[int, slice]:
        """The block that serves a place, and its neurons."""
        number, part = divmod(place, self.per_block)
        count = len(self.sizes) + EXTRA
        return self.first + number, slice(part * count, (part + 1) * count)


def _slope(block: Block, z: Tensor) -> Tensor:
    """The activation's derivative."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(block.mlp.act(z).sum(), z)[0]


class ChosenBiases(CraftedAttack[Spread]):
    """Reads the gradients of biases of the MLPs' first layers."""

    name: ClassVar[str] = "crafted-biases"
    about: ClassVar[str] = (
        "the server crafts the frozen weights, so that gradients of biases before a smooth activation (such as GELU) "
        "reveal pixels"
    )
    needs: ClassVar[str] = "biases of the MLPs' first layers, before a smooth activation (such as GELU, not ReLU)"
    difference: ClassVar[str] = "needs only the biases; each neuron reveals one value of one patch"
    separated: ClassVar[str] = "by the threshold; another round with another threshold may read the other images"

    def plan(self, backbone: Backbone, batch: int) -> Spread | str:
        plan = plan_of(backbone, neurons=False)
        if isinstance(plan, str):
            return plan
        blocks, first = backbone.parts(), int(batch > 1)
        for block in blocks:
            if block.mlp.up[0].bias is None:
                return "the model's MLPs have no biases"
            if not bool((_slope(block, torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)).diff() > 0.01).all()):
                return (
                    "the model's activation is not curved around 0, so the gradient of a bias does not show the input"
                )
        hidden = min(block.mlp.up[0].out_features for block in blocks)
        if len(blocks) - first < 2:
            return "the model has too few blocks"
        per_block = -(-plan.places // (len(blocks) - first - 1))  # the last one carries what they add to the classifier
        count = min(hidden // per_block - EXTRA, plan.channels.patch - first, backbone.patch_values)
        if count < 1:
            return f"the model has too few neurons ({hidden} a block) for {plan.places} positions"
        basis, channels = basis_of(backbone, count), Channels(count, plan.channels.bits)
        sizes = SPAN * basis.abs().sum(dim=1)
        return plan.extended(Spread, channels=channels, basis=basis, per_block=per_block, first=first, sizes=sizes)

    def sources(self, backbone: Backbone, plan: Spread) -> list[Tensor]:
        blocks = backbone.parts()
        return [blocks[plan.rows(place)[0]].mlp.up[0].bias for place in range(plan.places)]

    def fill(self, model: Backbone, plan: Spread, batch: int, public: Tensor | None) -> None:
        c, blocks = plan.channels, model.parts()
        clear(model)
        write_tokens(model, plan)
        deviation, veto = deviation_of(model, plan), c.zero + 1
        if plan.first:
            carry(blocks[0], c.brightness, c.code, c.zero, CODE)
            codes, up = codes_of(model, plan, public), blocks[0].mlp.up[0]
            matrix(up)[0, c.code], matrix(up)[0, c.zero] = -STEEP, STEEP
            up.bias[0] = STEEP * float(codes.mean() + codes.std() * torch.special.ndtri(torch.tensor(1 - 1 / batch)))
            matrix(blocks[0].mlp.down)[veto, 0] = -1.0
        carry(blocks[-1], c.out, c.up, c.zero, 1.0)
        for place in range(plan.places):
            number, rows = plan.rows(place)
            up = blocks[number].mlp.up[0]
            weight = torch.zeros(len(plan.sizes) + EXTRA, model.dim, dtype=torch.float64)
            weight[:, c.place], weight[:, c.one] = GATE * c.signs(place + 1).double(), -GATE * c.bits
            weight[1, c.plus], weight[1, c.minus] = (KNOWN * deviation / (2 * LARGE) * sign for sign in (1, -1))
            weight[2, 0] = REACH * deviation / plan.sizes[0] / 2
            for direction, size in enumerate(plan.sizes):
                weight[EXTRA + direction, direction] = REACH * deviation / size
            if plan.first:
                weight[:, veto] = GATE
            weight[:, c.zero] -= weight.sum(dim=1)
            matrix(up)[rows] = weight.to(up.weight)
            matrix(blocks[number].mlp.down)[c.out, rows] = OUT
        write_classifier(model, (c.up,), c.zero)

    def read(self, backbone: Backbone, plan: Spread, upload: Gradients, batch: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The patches of the image above the edge; alone where two readings of one number agree and none overflowed."""
        blocks = backbone.parts()
        grid = torch.linspace(-math.sqrt(2), math.sqrt(2), 200_001, dtype=torch.float64)
        numbers, agree = torch.zeros(plan.places, len(plan.sizes), dtype=torch.float64), True
        slopes: dict[int, Tensor] = {}
        for place, name in enumerate(self.names(backbone, plan)):
            number, rows = plan.rows(place)
            slope = slopes.setdefault(number, _slope(blocks[number], grid))
            gradients = known_numbers(upload[name][rows]).cpu()
            level = _slope(blocks[number], torch.zeros(1, dtype=torch.float64))
            share = gradients / (gradients[0] / level)
            agree &= bool(share.isfinite().all())
            after = torch.searchsorted(slope, share).clamp(1, len(grid) - 1)
            part = ((share - slope[after - 1]) / (slope[after] - slope[after - 1])).clamp(0, 1)
            z = grid[after - 1] + part * (grid[after] - grid[after - 1])
            scale = KNOWN / z[1] / REACH  # the token's deviation over that of the constants
            numbers[place] = z[EXTRA:] * plan.sizes * scale
            twice = 2 * z[2] * plan.sizes[0] * scale
            agree &= bool((twice - numbers[place, 0]).abs() <= AGREES * plan.sizes[0])
        patches = (numbers.nan_to_num(0.0, 0.0, 0.0) @ plan.basis)[None]
        return (patches, patches[:0]) if agree else (patches[:0], patches)

    def unread(self, plan: Spread) -> tuple[int, list[str]]:
        return plan.places * (plan.basis.shape[1] - len(plan.sizes)), plan.lost(
            "are not read, because the model has too few neurons"
        )

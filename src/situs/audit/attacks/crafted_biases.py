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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused, absent, device_of, known_numbers
from situs.audit.attacks.crafted import (
    CODE,
    GATE,
    LARGE,
    OUT,
    Channels,
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
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import to_images
from situs.backbones.base import Backbone
from situs.backbones.block import Block
from situs.findings import ACTIVE, Fact

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
class Spread:
    """Which neurons show what. first: the first block that is read; sizes: the largest size of each direction."""

    plan: Plan
    first: int
    sizes: Tensor


def spread_of(backbone: Backbone, batch: int) -> Spread | str:
    """How a model is written, or the reason why it cannot be: one sentence."""
    plan = plan_of(backbone, neurons=False)
    if isinstance(plan, str):
        return plan
    blocks, first = backbone.parts(), int(batch > 1)
    for block in blocks:
        if block.mlp.up[0].bias is None:
            return "its MLPs have no biases"
        if not bool((_slope(block, torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)).diff() > 0.01).all()):
            return "its activation is not curved around 0, so that the gradient of a bias does not show the input"
    hidden = min(block.mlp.up[0].out_features for block in blocks)
    if len(blocks) - first < 2:
        return "it has too few blocks"
    per_block = -(-plan.places // (len(blocks) - first - 1))  # the last one carries what they add to the classifier
    count = min(hidden // per_block - EXTRA, plan.channels.patch - first, backbone.patch_values)
    if count < 1:
        return f"it has too few neurons ({hidden} a block) for {plan.places} places"
    basis = basis_of(backbone, count)
    plan = replace(plan, channels=Channels(count, plan.channels.bits), basis=basis, per_block=per_block)
    return Spread(plan, first, SPAN * basis.abs().sum(dim=1))


def _slope(block: Block, z: Tensor) -> Tensor:
    """The activation's derivative."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(block.mlp.act(z).sum(), z)[0]


def _rows(spread: Spread, place: int) -> tuple[int, slice]:
    """The block that serves a place, and its neurons."""
    number, part = divmod(place, spread.plan.per_block)
    count = len(spread.sizes) + EXTRA
    return spread.first + number, slice(part * count, (part + 1) * count)


@torch.no_grad()
def write_biases(model: Backbone, spread: Spread, batch: int, public: Tensor | None) -> None:
    """Writes the weights in place."""
    plan, c, blocks = spread.plan, spread.plan.channels, model.parts()
    clear(model)
    write_tokens(model, plan)
    deviation, veto = deviation_of(model, plan), c.zero + 1
    if spread.first:
        carry(blocks[0], c.brightness, c.code, c.zero, CODE)
        codes, up = codes_of(model, plan, public), blocks[0].mlp.up[0]
        matrix(up)[0, c.code], matrix(up)[0, c.zero] = -STEEP, STEEP
        up.bias[0] = STEEP * float(codes.mean() + codes.std() * torch.special.ndtri(torch.tensor(1 - 1 / batch)))
        matrix(blocks[0].mlp.down)[veto, 0] = -1.0
    carry(blocks[-1], c.out, c.up, c.zero, 1.0)
    for place in range(plan.places):
        number, rows = _rows(spread, place)
        up = blocks[number].mlp.up[0]
        weight = torch.zeros(len(spread.sizes) + EXTRA, model.dim, dtype=torch.float64)
        weight[:, c.place], weight[:, c.one] = GATE * c.signs(place + 1).double(), -GATE * c.bits
        weight[1, c.plus], weight[1, c.minus] = (KNOWN * deviation / (2 * LARGE) * sign for sign in (1, -1))
        weight[2, 0] = REACH * deviation / spread.sizes[0] / 2
        for direction, size in enumerate(spread.sizes):
            weight[EXTRA + direction, direction] = REACH * deviation / size
        if spread.first:
            weight[:, veto] = GATE
        weight[:, c.zero] -= weight.sum(dim=1)
        matrix(up)[rows] = weight.to(up.weight)
        matrix(blocks[number].mlp.down)[c.out, rows] = OUT
    write_classifier(model, c.up, c.zero)


class ChosenBiases(Attack):
    """Reads the gradients of biases of a model that `write_biases` wrote."""

    name: ClassVar[str] = "crafted-biases"
    about: ClassVar[str] = (
        "the server wrote the frozen weights: through a curved activation, gradients of biases show pixels"
    )
    closed_form: ClassVar[bool] = True
    active: ClassVar[bool] = True
    knows: ClassVar[str] = "the weights, which it chose itself"
    needs: ClassVar[str] = "biases of the MLPs' first layers, before a curved activation"
    difference: ClassVar[str] = "only biases need to be sent; a neuron shows one number of one place"
    measured: ClassVar[str] = "benchmarks/active.py"

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        spread = spread_of(backbone, known.step.batch)
        if isinstance(spread, str):
            return Refused(spread)
        if known.step.local_steps > 1 or known.step.adam:
            return Refused("it reads the gradient of one step, and several steps or Adam were made")
        names = tuple(dict.fromkeys(_names(backbone, spread)))
        return absent(sent, names) or Ready(names)

    def write(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> None:  # noqa: ARG002
        spread = spread_of(backbone, known.step.batch)
        assert isinstance(spread, Spread)
        write_biases(backbone, spread, known.step.batch, known.public)

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        return "; ".join(filter(None, (super().spoiled(known, noise), ACTIVE.unproved)))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known = known or Knowledge()
        batch, images, facts = known.step.batch, list[Tensor](), list[dict[str, Fact]]()
        spread = spread_of(backbone, batch)
        assert isinstance(spread, Spread)
        for upload in uploads:
            if images and deadline is not None and deadline.over():
                break
            patches, alone = read_biases(backbone, spread, upload)
            grey = torch.zeros(batch - 1, *patches.shape, dtype=torch.float64)
            images.append(
                to_images(torch.cat([patches[None], grey]), backbone, spread.plan.stem).float().to(device_of(upload))
            )
            facts.append(_facts(spread, alone, batch))
        cut = None if len(images) == len(uploads) else f"{len(images)} of {len(uploads)} uploads"
        return Recovery(torch.cat(images), facts, partial=cut)


def _names(backbone: Backbone, spread: Spread) -> list[str]:
    """For each place the gradient that it is read from."""
    names, blocks = {id(p): name for name, p in backbone.named_parameters()}, backbone.parts()
    return [names[id(blocks[_rows(spread, place)[0]].mlp.up[0].bias)] for place in range(spread.plan.places)]


def _facts(spread: Spread, alone: bool, batch: int) -> dict[str, Fact]:
    values, read = spread.plan.basis.shape[1], len(spread.sizes)
    whole = alone and batch == 1 and read == values
    reasons = [f"{int(alone)} of {batch} images were alone above the edge; a round with another edge reads others"]
    reasons += [f"{values - read} of the {values} numbers of a patch have no neuron"] if read < values else []
    unseen = spread.plan.places * (values - read)
    return {"fits": whole, "alone": int(alone), "unseen": unseen, "verdict": "" if whole else "; ".join(reasons)}


def read_biases(backbone: Backbone, spread: Spread, upload: Gradients) -> tuple[Tensor, bool]:
    """The patches [N, K] of the image above the edge, and whether it was alone."""
    plan, blocks = spread.plan, backbone.parts()
    grid = torch.linspace(-math.sqrt(2), math.sqrt(2), 200_001, dtype=torch.float64)
    numbers, agree = torch.zeros(plan.places, len(spread.sizes), dtype=torch.float64), True
    slopes: dict[int, Tensor] = {}
    for place, name in enumerate(_names(backbone, spread)):
        number, rows = _rows(spread, place)
        slope = slopes.setdefault(number, _slope(blocks[number], grid))
        gradients = known_numbers(upload[name][rows]).cpu()
        level = _slope(blocks[number], torch.zeros(1, dtype=torch.float64))
        share = (gradients / (gradients[0] / level)).nan_to_num(0.0, 0.0, 0.0)
        after = torch.searchsorted(slope, share).clamp(1, len(grid) - 1)
        part = ((share - slope[after - 1]) / (slope[after] - slope[after - 1])).clamp(0, 1)
        z = grid[after - 1] + part * (grid[after] - grid[after - 1])
        scale = KNOWN / z[1] / REACH  # the token's deviation over that of the constants
        numbers[place] = z[EXTRA:] * spread.sizes * scale
        twice = 2 * z[2] * spread.sizes[0] * scale
        agree &= bool((twice - numbers[place, 0]).abs() <= AGREES * spread.sizes[0])
    return (numbers @ plan.basis).nan_to_num(0.0, 0.0, 0.0), agree

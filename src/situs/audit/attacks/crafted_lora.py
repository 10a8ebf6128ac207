"""A server that chooses the weights, and a client that sends LoRA's products beside queries, keys and values alone.

The gradient of `down` is the sum over tokens of their input, each times what reaches its value: upᵀ of that gradient.
So the frozen attention of a head is written to look at one place only, and one row of the product reads that head: the
row is the token of the place, times a number that a constant channel shows. Heads also compare the image's code with
an edge, and look at the class token below it, which has neither patch nor that constant: neighbouring edges then
separate images.

    channels   patch | bits of the place | brightness | code | one | +C | -C | out | unit | zero

A head has one place, so heads × blocks (at most as many heads a block as the rank) are all that can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.crafted import (
    CODE,
    LARGE,
    PLACE,
    ROUNDING,
    CraftedAttack,
    Plan,
    carry,
    clear,
    codes_of,
    deviation_of,
    look,
    matrix,
    plan_of,
    projections,
    write_classifier,
    write_tokens,
)
from situs.audit.defences import Gradients
from situs.backbones.base import Backbone
from situs.backbones.block import Block

STEEP = 1e6
"""Steepness of a head's comparison of the code with its edge."""

SAME = 4 * ROUNDING
"""By how much the deviations of the tokens of one image may miss those that their patches explain: rounding."""


class Slot(NamedTuple):
    """A head that looks at one place where the code is above one edge. row: of the product, which reads it."""

    block: int
    head: int
    row: int
    place: int
    edge: int


@dataclass(frozen=True)
class Reading(Plan):
    """edges: how many; slots: of all of them, edge by edge."""

    edges: int
    slots: tuple[Slot, ...]

    @property
    def seen(self) -> list[int]:
        """The places that a head reads."""
        return sorted({slot.place for slot in self.slots})


class ChosenLora(CraftedAttack[Reading]):
    """Reads the gradients of LoRA's products."""

    name: ClassVar[str] = "crafted-lora"
    about: ClassVar[str] = (
        "the server crafts all weights, also the frozen ones, so that each head attends to one patch and LoRA's "
        "gradients reveal this patch"
    )
    needs: ClassVar[str] = "LoRA on queries, keys and values; a class token"
    difference: ClassVar[str] = "needs only the gradients of LoRA; at most heads × blocks patches can be read"
    separated: ClassVar[str] = "by the thresholds; another round with other thresholds may read the other images"

    def plan(self, backbone: Backbone, batch: int) -> Reading | str:
        plan = plan_of(backbone, neurons=False)
        if isinstance(plan, str):
            return plan
        if not backbone.num_prefix:
            return "the heads that read no patch must attend to a class token, and the model has none"
        blocks = backbone.parts()
        first = int(batch > 1)  # its attention makes the code
        free = [(number, head) for number in range(first, len(blocks)) for head in range(_heads(blocks[number]))]
        if not free:
            return "the model has no LoRA on queries, keys and values"
        edges = min(max(len(free) // plan.places, 1), max(batch, 1))
        order = _centre_first(backbone.grid)[: len(free) // edges]
        wanted = [(edge, place) for edge in range(edges) for place in order]
        slots = [Slot(*where, where[1], place, edge) for where, (edge, place) in zip(free, wanted, strict=False)]
        return plan.extended(Reading, edges=edges, slots=tuple(slots))

    def sources(self, backbone: Backbone, plan: Reading) -> list[Tensor]:
        blocks = backbone.parts()
        return [blocks[slot.block].attention.qkv[0].parametrizations.weight[0].down for slot in plan.slots]

    def fill(self, model: Backbone, plan: Reading, batch: int, public: Tensor | None) -> None:
        """Products included, whose sum stays 0."""
        c, blocks = plan.channels, model.parts()
        clear(model)
        write_tokens(model, plan, prefix_place=False)
        if batch > 1:
            carry(blocks[0], c.brightness, c.code, c.zero, CODE)
        edges = _edges(model, plan, batch, public)
        for block in blocks:
            block.norm1.weight[c.up], block.norm1.bias[c.up] = 0.0, 1.0
        size = PLACE / deviation_of(model, plan)
        for slot in plan.slots:
            attention = blocks[slot.block].attention
            row = look(attention, slot.head, slot.place, c, above=int(batch == 1))
            if batch > 1:
                queries, keys, _ = projections(attention)
                scale = (model.dim // attention.heads) ** -0.5 if attention.scale is None else attention.scale
                queries[row + 1, c.code], queries[row + 1, c.zero] = STEEP, -STEEP
                queries[row + 1, c.up] = -STEEP * edges[slot.edge]
                keys[row + 1, c.one], keys[row + 1, c.zero] = 1 / scale / size, -1 / scale / size
            attention.qkv[0].parametrizations.weight[0].up[row + 2 * model.dim, slot.row] = 1.0
            matrix(attention.out)[c.out, row] = 1.0
        write_classifier(model, (c.out,), c.zero)

    def read(self, backbone: Backbone, plan: Reading, upload: Gradients, batch: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Patches of what lies between neighbouring edges.

        Places that no head reads are grey. Differences to `zero` take out the norm's mean, and with it the class token.
        """
        c, seen = plan.channels, plan.seen
        rows = torch.zeros(plan.edges, plan.places, backbone.dim, dtype=torch.float64)
        for slot, name in zip(plan.slots, self.names(backbone, plan), strict=True):
            rows[slot.edge, slot.place] = known_numbers(upload[name][slot.row]).cpu()
        rows = (rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])]))[:, seen]
        rows = rows - rows[..., c.zero, None]
        one = rows[..., c.one] / PLACE
        values = (rows / one.unsqueeze(-1))[..., : c.patch]
        patches = torch.zeros(plan.edges, plan.places, plan.basis.shape[1], dtype=torch.float64)
        patches[:, seen] = (values @ plan.basis).nan_to_num(0.0, 0.0, 0.0)
        present = (one.abs() > 1e-6 * float(one.abs().max())).all(dim=1)
        signs = PLACE * torch.stack([c.signs(place + 1).double().sum() + 1 for place in seen])
        parts = zip(values, patches[:, seen].mean(dim=2), one, strict=True)
        single = present & (torch.tensor([_misfit(*part, signs, backbone.dim) for part in parts]) < SAME)
        return patches[single], patches[present & ~single]

    def unread(self, plan: Reading) -> tuple[int, list[str]]:
        seen = len(plan.seen)
        reasons = [f"only {seen} of {plan.places} positions have a head that reads them"] * (seen < plan.places)
        unseen = plan.places * plan.basis.shape[1] - seen * plan.channels.patch
        return unseen, reasons + plan.lost("are not read, because the model has too few channels")


def _heads(block: Block) -> int:
    """How many heads of a block can be read: one for each row of the product."""
    [qkv] = block.attention.qkv if len(block.attention.qkv) == 1 else [None]
    if qkv is None or not parametrize.is_parametrized(qkv):
        return 0
    return min(block.attention.heads, qkv.parametrizations.weight[0].down.shape[0])


def _centre_first(grid: Sequence[int]) -> list[int]:
    """All places, those nearest to the centre first."""
    height, width = grid
    middle = [(height - 1) / 2, (width - 1) / 2]
    return sorted(range(height * width), key=lambda place: math.dist(divmod(place, width), middle))


def _edges(model: Backbone, plan: Reading, batch: int, public: Tensor | None) -> list[float]:
    """Edges above each of which one image more of a batch is expected to lie, the highest last."""
    codes = codes_of(model, plan, public)
    shares = [1 - (plan.edges - edge) / max(batch, plan.edges + 1) for edge in range(plan.edges)]
    normal = torch.special.ndtri(torch.tensor(shares, dtype=torch.float64))
    return [float(codes.mean() + codes.std() * step) for step in normal]


def _misfit(values: Tensor, brightness: Tensor, one: Tensor, signs: Tensor, dim: int) -> float:
    """How far the tokens are from being those of one image, as a share; infinite where too few places are read.

    A row is the token over its deviation, times the same number at all places: the squared deviation follows from the
    patch, but for what all places of an image have in common. A mixture's does not.
    """
    total = values.sum(dim=1) + brightness + signs
    energy = values.square().sum(dim=1) + brightness.square() - total.square() / dim
    known = torch.stack([torch.ones_like(energy), energy / (2 * LARGE**2), total / LARGE], dim=1)
    wanted = one.reciprocal().square()
    wanted = wanted / wanted.mean()
    if not bool(wanted.isfinite().all()):
        return math.inf
    if len(wanted) <= known.shape[1]:  # any mixture fits as well
        return math.inf
    solved = torch.linalg.lstsq(known, wanted.unsqueeze(1)).solution
    slope = float(solved[1] / solved[0])  # 1 but for what the place and the code add to the constants
    return float((known @ solved - wanted.unsqueeze(1)).abs().max()) if 0.8 < slope < 1.1 else math.inf

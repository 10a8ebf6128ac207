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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused, absent, device_of, known_numbers
from situs.audit.attacks.crafted import (
    CODE,
    GATE,
    LARGE,
    PLACE,
    ROUNDING,
    Plan,
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
class Reading:
    """How a model is written and read. edges: how many; slots: of all of them, edge by edge."""

    plan: Plan
    edges: int
    slots: tuple[Slot, ...]


def reading_of(backbone: Backbone, batch: int) -> Reading | str:
    """How a model with LoRA is read, or the reason why it cannot be: one sentence."""
    plan = plan_of(backbone, neurons=False)
    if isinstance(plan, str):
        return plan
    if not backbone.num_prefix:
        return "it has no class token for heads that read no place"
    blocks = backbone.parts()
    first = int(batch > 1)  # its attention makes the code
    free = [(number, head) for number in range(first, len(blocks)) for head in range(_heads(blocks[number]))]
    if not free:
        return "no product of low rank stands beside its queries, keys and values"
    edges = min(max(len(free) // plan.places, 1), max(batch, 1))
    order = _centre_first(backbone.grid)[: len(free) // edges]
    wanted = [(edge, place) for edge in range(edges) for place in order]
    slots = [Slot(*where, where[1], place, edge) for where, (edge, place) in zip(free, wanted, strict=False)]
    return Reading(plan, edges, tuple(slots))


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


@torch.no_grad()
def write_lora(model: Backbone, reading: Reading, batch: int, public: Tensor | None) -> None:
    """Writes the weights in place; products included, whose sum stays 0."""
    plan, c, blocks = reading.plan, reading.plan.channels, model.parts()
    unit = c.up
    clear(model)
    write_tokens(model, plan, prefix_place=False)
    if batch > 1:
        carry(blocks[0], c.brightness, c.code, c.zero, CODE)
    edges = _edges(model, reading, batch, public)
    for block in blocks:
        block.norm1.weight[unit], block.norm1.bias[unit] = 0.0, 1.0
    size = PLACE / deviation_of(model, plan)
    for slot in reading.slots:
        attention = blocks[slot.block].attention
        weight, width = matrix(attention.qkv[0]), model.dim // attention.heads
        query = slot.head * width
        scale = width**-0.5 if attention.scale is None else attention.scale
        key, value = query + model.dim, query + 2 * model.dim
        weight[query, unit] = 1.0
        weight[key, c.place] = GATE / scale * c.signs(slot.place + 1).to(weight)
        weight[key, c.one] = -GATE / scale * (c.bits - int(batch == 1))  # above the class token's 0, or level with it
        weight[key, c.zero] = -weight[key].sum()
        if batch > 1:
            weight[query + 1, c.code], weight[query + 1, c.zero] = STEEP, -STEEP
            weight[query + 1, unit] = -STEEP * edges[slot.edge]
            weight[key + 1, c.one], weight[key + 1, c.zero] = 1 / scale / size, -1 / scale / size
        attention.qkv[0].parametrizations.weight[0].up[value, slot.row] = 1.0
        matrix(attention.out)[c.out, query] = 1.0
    write_classifier(model, c.out, c.zero)


def _edges(model: Backbone, reading: Reading, batch: int, public: Tensor | None) -> list[float]:
    """Edges above each of which one image more of a batch is expected to lie, the highest last."""
    codes = codes_of(model, reading.plan, public)
    shares = [1 - (reading.edges - edge) / max(batch, reading.edges + 1) for edge in range(reading.edges)]
    normal = torch.special.ndtri(torch.tensor(shares, dtype=torch.float64))
    return [float(codes.mean() + codes.std() * step) for step in normal]


class ChosenLora(Attack):
    """Reads the gradients of LoRA's products of a model that `write_lora` wrote."""

    name: ClassVar[str] = "crafted-lora"
    about: ClassVar[str] = "the server wrote the frozen weights too: each head looks at one place, and LoRA reads it"
    closed_form: ClassVar[bool] = True
    active: ClassVar[bool] = True
    knows: ClassVar[str] = "the weights, which it chose itself"
    needs: ClassVar[str] = "LoRA beside queries, keys and values; a class token"
    difference: ClassVar[str] = "only LoRA needs to be sent; heads × blocks places can be read"
    measured: ClassVar[str] = "benchmarks/active.py"

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        reading = reading_of(backbone, known.step.batch)
        if isinstance(reading, str):
            return Refused(reading)
        if known.step.local_steps > 1 or known.step.adam:
            return Refused("it reads the gradient of one step, and several steps or Adam were made")
        names = tuple(dict.fromkeys(_names(backbone, reading)))
        return absent(sent, names) or Ready(names)

    def write(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> None:  # noqa: ARG002
        reading = reading_of(backbone, known.step.batch)
        assert isinstance(reading, Reading)
        write_lora(backbone, reading, known.step.batch, known.public)

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
        reading = reading_of(backbone, batch)
        assert isinstance(reading, Reading)
        for upload in uploads:
            if images and deadline is not None and deadline.over():
                break
            alone, others = read_lora(backbone, reading, upload)
            grey = torch.zeros(batch, *alone.shape[1:], dtype=torch.float64)
            patches = torch.cat([alone, others, grey])[:batch]
            images.append(to_images(patches, backbone, reading.plan.stem).float().to(device_of(upload)))
            facts.append(_facts(reading, len(alone), batch))
        cut = None if len(images) == len(uploads) else f"{len(images)} of {len(uploads)} uploads"
        return Recovery(torch.cat(images), facts, partial=cut)


def _names(backbone: Backbone, reading: Reading) -> list[str]:
    """For each slot the gradient that it reads."""
    names, blocks = {id(p): name for name, p in backbone.named_parameters()}, backbone.parts()
    return [names[id(blocks[s.block].attention.qkv[0].parametrizations.weight[0].down)] for s in reading.slots]


def _facts(reading: Reading, alone: int, batch: int) -> dict[str, Fact]:
    plan, read = reading.plan, len({slot.place for slot in reading.slots})
    values = plan.basis.shape[1]
    unseen = plan.places * values - read * plan.channels.patch
    whole = alone >= batch and not unseen
    reasons = [f"{alone} of {batch} images were alone above an edge; another round with other edges reads others"]
    reasons += [f"{read} of {plan.places} places have a head that reads them"] if read < plan.places else []
    reasons += [f"{values - plan.channels.patch} of the {values} numbers of a patch found no channel"] * (
        plan.channels.patch < values
    )
    return {"fits": whole, "alone": alone, "unseen": unseen, "verdict": "" if whole else "; ".join(reasons)}


def read_lora(backbone: Backbone, reading: Reading, upload: Gradients) -> tuple[Tensor, Tensor]:
    """Patches of what lies between neighbouring edges: of one image alone, and of several; both [n, N, K].

    Places that no head reads are grey. Differences to `zero` take out the norm's mean, and with it the class token.
    """
    plan, c = reading.plan, reading.plan.channels
    rows = torch.zeros(reading.edges, plan.places, backbone.dim, dtype=torch.float64)
    for slot, name in zip(reading.slots, _names(backbone, reading), strict=True):
        rows[slot.edge, slot.place] = known_numbers(upload[name][slot.row]).cpu()
    seen = sorted({slot.place for slot in reading.slots})
    rows = (rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])]))[:, seen]
    rows = rows - rows[..., c.zero, None]
    one = rows[..., c.one] / PLACE
    values = (rows / one.unsqueeze(-1))[..., : c.patch]
    patches = torch.zeros(reading.edges, plan.places, plan.basis.shape[1], dtype=torch.float64)
    patches[:, seen] = (values @ plan.basis).nan_to_num(0.0, 0.0, 0.0)
    present = (one.abs() > 1e-6 * float(one.abs().max())).all(dim=1)
    signs = PLACE * torch.stack([c.signs(place + 1).double().sum() + 1 for place in seen])
    parts = zip(values, patches[:, seen].mean(dim=2), one, strict=True)
    single = present & (torch.tensor([_misfit(*part, signs, backbone.dim) for part in parts]) < SAME)
    return patches[single], patches[present & ~single]


def _misfit(values: Tensor, brightness: Tensor, one: Tensor, signs: Tensor, dim: int) -> float:
    """How far the tokens are from being those of one image, as a share.

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
    if len(wanted) <= known.shape[1]:
        return 0.0
    solved = torch.linalg.lstsq(known, wanted.unsqueeze(1)).solution
    slope = float(solved[1] / solved[0])  # 1 but for what the place and the code add to the constants
    return float((known @ solved - wanted.unsqueeze(1)).abs().max()) if 0.8 < slope < 1.1 else math.inf

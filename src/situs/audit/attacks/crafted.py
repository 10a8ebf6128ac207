"""A server that chooses the weights: single images out of the gradient of a batch, architecture unchanged.

The weights are written so that the first MLPs sort images by a number that every token of an image carries (its code,
the mean brightness). Neuron j of a place is switched on by images whose code is above edge j, so the gradients of two
neighbouring neurons differ by the images between their edges: one image alone, if the edges are many. That difference
divided by the same of the bias is the layer's input: the patch itself, behind a LayerNorm that two constants undo.

    channels     patch | brightness | code | bits of the place | one | +C | -C | out | up | zero
    block 0      attention is a plain mean: every token gets the image's code
    all but one  each MLP serves some places; a token switches on the neurons of its place only, and adds to `out`, at
                 every second place to `brightness`
    last block   attention carries the means of these two to `up` and `brightness`, which the classifier reads: every
                 neuron has a gradient

Differences to `zero` take the LayerNorm's mean out. Bits of the place need log2 N channels where one channel a place
would need N, so a patch that is wider than what is left loses little: its least natural directions (`natural_basis`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused, absent, device_of, known_numbers
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, noise_for, patches_of, table_rows, to_images, writable_stem
from situs.backbones.base import Backbone
from situs.backbones.block import Attention, Block
from situs.errors import SitusError
from situs.findings import ACTIVE, Fact

LARGE = 300.0
"""C: two channels of ±C make the LayerNorm's deviation nearly the same for every token."""
PLACE = 30.0
"""Size of the bits of a place, and of the channel `one`."""
CODE = 1000.0
"""What the mean brightness is multiplied with."""
GAIN = 4e5
"""Steepness of a neuron: between two edges it goes from off to on."""
GATE = 50.0
"""By how much more a wrong bit of the place switches a neuron off than the code can switch it on."""
OUT = 1e-5
"""What a neuron adds to `out`."""
ROUNDING = 8 * 2.0**-24
"""What float32 rounds off a sum of gradients, as a share of its size: a few last digits."""
COMMON = 4.0
"""Deviations by which the mean of all places may differ from 0 by chance: one in 16,000 images is farther off."""
BELOW = -8.0
"""Deviations below the mean code where no image is."""
LOST = 0.05
"""Where rounding is a larger share of a difference, nothing is read."""


class Channels(NamedTuple):
    """Where the channels of the residual stream stand. patch: how many carry the patch, from 0 on; bits: of a place."""

    patch: int
    bits: int

    @classmethod
    def of(cls, width: int, values: int, places: int) -> Channels:
        """Of D channels, K values a patch and N places; code 0 is that of tokens without a place."""
        bits = math.ceil(math.log2(places + 1))
        return cls(min(values, width - bits - 8), bits)

    def __getattr__(self, name: str) -> int:
        order = ("brightness", "code", "one", "plus", "minus", "out", "up", "zero")
        if name not in order:
            raise AttributeError(name)
        return self.patch + self.bits + order.index(name)

    @property
    def place(self) -> slice:
        """The bits."""
        return slice(self.patch, self.patch + self.bits)

    def signs(self, number: int) -> Tensor:
        """The bits of a number as ±1."""
        return torch.tensor([1.0 if number >> bit & 1 else -1.0 for bit in range(self.bits)])


@dataclass(frozen=True)
class Plan:
    """How a model is written and read. per_block: places that one MLP serves. bins: neurons of a place."""

    stem: Stem
    channels: Channels
    basis: Tensor
    places: int
    per_block: int
    bins: int

    def extended(self, kind: type[P], **changes: Any) -> P:
        """The same with further fields, or with others."""
        return kind(**(vars(self) | changes))

    def lost(self, reason: str) -> list[str]:
        """The sentence about numbers of a patch that are not read, if there are any."""
        values = self.basis.shape[1]
        return [f"{values - self.channels.patch} of the {values} numbers of a patch {reason}"] * (
            self.channels.patch < values
        )


P = TypeVar("P", bound=Plan)


def plan_of(backbone: Backbone, neurons: bool = True, width: int = 0) -> Plan | str:
    """The plan for a model, or the reason why it cannot be written so: one sentence.

    neurons: whether those of the MLPs are what is read. width: of adapters, whose neurons are read instead."""
    stem = writable_stem(backbone)
    if isinstance(stem, str):
        return stem
    blocks = backbone.parts()
    if stem.layout != "patches":
        return "the model's patches do not tile the image"
    if backbone.depth < 2:
        return "the model has fewer than two blocks"
    if len(blocks) != backbone.depth or not all(map(_plain, blocks)):
        return "only blocks of LayerNorm, plain attention and a two-layer MLP are supported"
    if len(backbone.positions().kinds) != 1:
        return "the model has other positions besides its position table, and the attack cannot switch them off"
    probe = noise_for(backbone, 1, 3, backbone.dim)
    if not torch.equal(backbone.before_blocks(probe), probe):
        return "a layer between the position table and the first block changes the tokens"
    channels = Channels.of(backbone.dim, backbone.patch_values, backbone.num_tokens)
    hidden = width or min(block.mlp.up[0].out_features for block in blocks)
    per_block = -(-backbone.num_tokens // (backbone.depth - 1))
    if channels.patch < 1 or (neurons and hidden // per_block < 2):
        few = f"channels ({backbone.dim})" if channels.patch < 1 else f"neurons ({hidden} a block)"
        return f"the model has too few {few} for {backbone.num_tokens} positions"
    basis = basis_of(backbone, channels.patch)
    return Plan(stem, channels, basis, backbone.num_tokens, per_block, hidden // per_block)


def _plain(block: Block) -> bool:
    """Whether nothing stands between its layers that these weights do not reckon with."""
    attention, mlp = block.attention, block.mlp
    between = (*attention.head_norms, attention.norm, attention.gate, mlp.norm)
    bare = all(part is None or isinstance(part, nn.Identity) for part in between)
    other = attention.rotate or attention.biases or attention.tables or attention.by_head or attention.shared > 1
    norms = isinstance(block.norm1, nn.LayerNorm) and isinstance(block.norm2, nn.LayerNorm)
    return bare and norms and not other and block.form == "pre" and len(mlp.up) == 1 and mlp.packed == 1


def basis_of(backbone: Backbone, count: int) -> Tensor:
    """The first `count` directions of a model's patches, [count, K]."""
    assert backbone.input.patch is not None
    height, width = backbone.input.patch
    return natural_basis((height, width, backbone.input.channels), count)[:count]


def natural_basis(shape: tuple[int, int, int], count: int) -> Tensor:
    """The `count` directions of a patch [P_h, P_w, C], flat, that hold most of what photographs have: [count, K].

    Neighbouring pixels and channels are alike, the more the nearer. All directions where `count` is K.
    """
    height, width, channels = shape
    if count >= height * width * channels:
        return torch.eye(height * width * channels, dtype=torch.float64)
    rows, columns = torch.arange(height, dtype=torch.float64), torch.arange(width, dtype=torch.float64)
    alike = torch.full((channels, channels), 0.9, dtype=torch.float64).fill_diagonal_(1.0)
    by_row, by_column = (0.95 ** (side[:, None] - side).abs() for side in (rows, columns))
    covariance = torch.kron(torch.kron(by_row, by_column), alike)
    return torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :count].T.contiguous()


def craft(backbone: Backbone, public: Tensor | None = None) -> Backbone:
    """A copy with weights that give single images away; names, shapes and types are the same."""
    model = deepcopy(backbone)
    ChosenWeights().write(model, (), Knowledge(public=public))
    return model


def clear(model: Backbone) -> None:
    """Every weight 0, but for norms and the scales of branches, which are 1."""
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
    for gamma in (gamma for block in model.parts() for gamma in block.gammas if gamma is not None):
        next(iter(gamma.parameters())).fill_(1.0) if isinstance(gamma, nn.Module) else gamma.fill_(1.0)


def matrix(layer: nn.Module) -> Tensor:
    """A layer's weight; beside a product of low rank (LoRA) the frozen one."""
    return layer.parametrizations.weight.original if parametrize.is_parametrized(layer) else layer.weight  # type: ignore[union-attr]


def write_tokens(model: Backbone, plan: Plan, prefix_place: bool = True, numbers: Sequence[int] | None = None) -> None:
    """The embedding shows the patch and its brightness; the table has constants and the place.

    prefix_place: whether the class token has the bits of place 0 and the constant `one`; else neither. numbers: of the
    places, where several share one."""
    parameters = dict(model.named_parameters())
    c, weight = plan.channels, parameters[plan.stem.weight]
    rows = torch.zeros(model.dim, plan.basis.shape[1], dtype=torch.float64)
    rows[: c.patch], rows[c.brightness] = plan.basis, 1 / plan.basis.shape[1]
    height, width = plan.stem.patch_size
    weight.copy_(rows.unflatten(1, (height, width, -1)).movedim(-1, 1).to(weight))
    always = torch.zeros(model.dim)
    always[c.one], always[c.plus], always[c.minus] = PLACE, LARGE, -LARGE
    table = table_rows(parameters[plan.stem.table], plan.stem)
    table += always.to(table)
    table[:, c.place] = torch.stack([PLACE * c.signs(n + 1) for n in numbers or range(plan.places)]).to(table)
    always[c.place], always[c.one] = PLACE * c.signs(0) * prefix_place, PLACE * prefix_place
    for name in model.prefix_names:
        token = parameters.get(f"model.{name}")
        if token is not None:
            token += always.to(token)


def carry(block: Block, source: int, target: int, zero: int, factor: float, row: int = 0) -> None:
    """Attention without queries and keys: every token gets `factor` times the mean of a channel. row: of the values."""
    value = projections(block.attention)[2]
    value[row, source], value[row, zero] = 1.0, -1.0
    matrix(block.attention.out)[target, row] = factor


def projections(attention: Attention) -> Sequence[Tensor]:
    """The matrices of queries, keys and values, [D, D] each."""
    parts = [matrix(layer) for layer in attention.qkv]
    return parts if len(parts) == 3 else parts[0].chunk(3)


def look(attention: Attention, head: int, number: int, c: Channels, *, above: int) -> int:
    """A head that looks at the places of one number alone; gives the first row of its queries, keys and values.

    The query reads `up`, which the norm sets to 1. above: 1 where such a place counts more than a token without a
    place, 0 where as much."""
    queries, keys, _ = projections(attention)
    width = len(queries) // attention.heads
    row, gate = head * width, GATE / (width**-0.5 if attention.scale is None else attention.scale)
    queries[row, c.up] = 1.0
    keys[row, c.place] = gate * c.signs(number + 1).to(keys)
    keys[row, c.one] = -gate * (c.bits - above)
    keys[row, c.zero] = -keys[row].sum()
    return row


def _neurons(blocks: Sequence[Block], plan: Plan, place: int) -> tuple[Block, slice]:
    """The MLP that serves a place, and its neurons."""
    number, part = divmod(place, plan.per_block)
    return blocks[number], slice(part * plan.bins, (part + 1) * plan.bins)


def write_classifier(model: Backbone, channels: Sequence[int], zero: int) -> None:
    """Logits that are random sums of channels, so that each has a gradient, independent of the other's."""
    head, chance = classifier(model), torch.Generator().manual_seed(0)
    for channel in channels:
        head.weight[:, channel] = torch.randn(len(head.weight), generator=chance).to(head.weight)
        head.weight[:, zero] -= head.weight[:, channel]


def classifier(model: Backbone) -> nn.Linear:
    """The last linear layer, which gives the logits."""
    layers = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    fitting = [layer for layer in layers if layer.out_features == model.num_classes]
    if not model.num_classes or not fitting:
        raise SitusError(f"{model.name}: has no linear classifier, but the crafted weights need one", field="server")
    return fitting[-1]


def deviation_of(model: Backbone, plan: Plan) -> float:
    """The deviation of a token's channels, by its constants alone."""
    return math.sqrt((2 * LARGE**2 + (plan.channels.bits + 1) * PLACE**2) / model.dim)


def codes_of(model: Backbone, plan: Plan, public: Tensor | None) -> Tensor:
    """Codes of the server's images in the units of the LayerNorm's output, [n] float64; without any those that
    photographs may have."""
    brightness = torch.tensor([-1.0, 1.0]) * 0.6  # of normalised photographs
    if public is not None and len(public) > 1:
        brightness = patches_of(public.double(), model, plan.stem).mean(dim=(1, 2)).cpu()
    tokens = plan.places + model.num_prefix
    return CODE * brightness.double() * plan.places / tokens / deviation_of(model, plan) ** 2


def edges_of(model: Backbone, plan: Plan, public: Tensor | None, batch: int = 1) -> Tensor:
    """The edges between which codes fall, in the units of the LayerNorm's output, [bins] float64.

    At even shares of a normal distribution with the mean and deviation of the public images' codes, the first below all
    images. Where the bins are fewer than the images, one image is expected in each: those below the first are in none.
    """
    codes, numbers = codes_of(model, plan, public), torch.arange(plan.bins, dtype=torch.float64)
    shares = 1 - (plan.bins - numbers) / batch if batch > plan.bins else (numbers + 0.5) / plan.bins * (numbers > 0)
    return codes.mean() + codes.std() * torch.special.ndtri(shares).clamp(min=BELOW)


class CraftedAttack(Attack, Generic[P]):
    """A server that crafts the weights of a round, and reads single images from the client's upload."""

    closed_form: ClassVar[bool] = True
    active: ClassVar[bool] = True
    knows: ClassVar[str] = "the weights, which the attacker chose"
    measured: ClassVar[str] = "benchmarks/active.py"
    separated: ClassVar[str]
    """By what the attack separates one image from the others, and which attack may read the others."""

    @abstractmethod
    def plan(self, backbone: Backbone, batch: int) -> P | str:
        """How a model is written and read, or the reason why it cannot be: one sentence."""

    @abstractmethod
    def sources(self, backbone: Backbone, plan: P) -> Sequence[Tensor]:
        """The parameters whose gradients it reads; one may be there several times."""

    @abstractmethod
    def fill(self, model: Backbone, plan: P, batch: int, public: Tensor | None) -> None:
        """Writes the weights in place. public: [n, C, H, W], normalised, other images of the kind."""

    @abstractmethod
    def read(self, backbone: Backbone, plan: P, upload: Gradients, batch: int) -> tuple[Tensor, Tensor]:
        """Patches of images that are known to be separated, and of others or of mixtures; both [n, N, K]."""

    @abstractmethod
    def unread(self, plan: P) -> tuple[int, list[str]]:
        """How many numbers of an image are not read, and the reasons."""

    def planned(self, backbone: Backbone, batch: int) -> P:
        """The plan of a model that `prepare` accepts."""
        plan = self.plan(backbone, batch)
        if isinstance(plan, str):
            raise SitusError(
                f"{backbone.name}: this attack cannot craft the weights of this model, because {plan}", field="server"
            )
        return plan

    def names(self, backbone: Backbone, plan: P) -> list[str]:
        """The names of `sources`."""
        names = {id(parameter): name for name, parameter in backbone.named_parameters()}
        return [names[id(parameter)] for parameter in self.sources(backbone, plan)]

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        plan = self.plan(backbone, known.step.batch)
        if isinstance(plan, str):
            return Refused(plan)
        if known.step.local_steps > 1 or known.step.adam:
            steps = "used Adam" if known.step.adam else f"made {known.step.local_steps} steps"
            return Refused(f"the attack reads the gradient of one SGD step, but the client {steps}")
        names = tuple(dict.fromkeys(self.names(backbone, plan)))
        return absent(sent, names) or Ready(names)

    def write(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> None:  # noqa: ARG002
        batch = known.step.batch
        with torch.no_grad():
            self.fill(backbone, self.planned(backbone, batch), batch, known.public)

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        return "; ".join(filter(None, (super().spoiled(known, noise), ACTIVE.unproved)))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        batch, images, facts = (known or Knowledge()).step.batch, list[Tensor](), list[dict[str, Fact]]()
        plan = self.planned(backbone, batch)
        grey = torch.zeros(batch, plan.places, plan.basis.shape[1], dtype=torch.float64)
        for upload in uploads:
            if images and deadline is not None and deadline.over():
                break
            single, others = self.read(backbone, plan, upload, batch)
            patches = torch.cat([single, others, grey])[:batch]
            images.append(to_images(patches, backbone, plan.stem).float().to(device_of(upload)))
            facts.append(self._facts(plan, len(single), batch))
        cut = None if len(images) == len(uploads) else f"{len(images)} of {len(uploads)} uploads"
        return Recovery(torch.cat(images), facts, partial=cut)

    def _facts(self, plan: P, count: int, batch: int) -> dict[str, Fact]:
        """count: of separated images. Such a picture is exact only where no number of it is unseen."""
        unseen, reasons = self.unread(plan)
        whole = count >= batch and not unseen
        verdict = "; ".join([f"{count} of {batch} images were separated from the others {self.separated}", *reasons])
        return {"fits": whole, "separated": count, "unseen": unseen, "verdict": "" if whole else verdict}


class ChosenWeights(CraftedAttack[Plan]):
    """Reads the gradients of the MLPs' first layers."""

    name: ClassVar[str] = "crafted"
    about: ClassVar[str] = "the server crafts the weights, so that neighbouring neurons separate the images of a batch"
    paper: ClassVar[str] = "Fowl et al. 2022, Robbing the Fed (arXiv 2110.13057)"
    difference: ClassVar[str] = (
        "no layer is added to the model, because the neurons of its MLPs serve as bins; every patch is read at its "
        "position"
    )
    separated: ClassVar[str] = "by their bin; another round with other bins may read the other images"

    def plan(self, backbone: Backbone, batch: int) -> Plan | str:  # noqa: ARG002
        return plan_of(backbone)

    def layers(self, block: Block) -> tuple[Any, Any]:
        """The layer whose neurons are the bins, and the one behind them."""
        return block.mlp.up[0], block.mlp.down

    def sources(self, backbone: Backbone, plan: Plan) -> list[Tensor]:
        layers = [self.layers(block)[0] for block in backbone.parts()[: -(-plan.places // plan.per_block)]]
        return [parameter for layer in layers for parameter in (matrix(layer), layer.bias)]

    def fill(self, model: Backbone, plan: Plan, batch: int, public: Tensor | None) -> None:
        """The edges lie where the codes of the public images do, else where those of photographs are assumed to."""
        c = plan.channels
        clear(model)
        write_tokens(model, plan)
        blocks = model.parts()
        carry(blocks[0], c.brightness, c.code, c.zero, CODE)
        carry(blocks[-1], c.out, c.up, c.zero, 1.0)
        carry(blocks[-1], c.brightness, c.brightness, c.zero, 1.0, row=1)
        edges = edges_of(model, plan, public, batch)
        for place in range(plan.places):
            block, rows = _neurons(blocks, plan, place)
            (up, down), signs = self.layers(block), c.signs(place + 1)
            weight = torch.zeros(model.dim, dtype=torch.float64)
            weight[c.code], weight[c.one], weight[c.place] = GAIN, -GATE * GAIN * c.bits, GATE * GAIN * signs.double()
            weight[c.zero] = -float(weight.sum())
            matrix(up)[rows] = weight.to(up.weight)
            up.bias[rows] = (-GAIN * edges).to(up.bias)
            matrix(down)[c.brightness if place % 2 else c.out, rows] = OUT
        write_classifier(model, (c.up, c.brightness), c.zero)

    def read(self, backbone: Backbone, plan: Plan, upload: Gradients, batch: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Patches of what stood in each bin.

        One token alone has a mean square of 1 behind its LayerNorm; a mixture of tokens has another. An image is alone
        where that holds at every place up to rounding, and where what is left has no common sign: rounding has either,
        a mixture has the same at all places. An image on an edge is in one bin at some places and in the next at
        others, and alone in both together. A second image shows less, the smaller its factor, which is what the
        classifier makes of it: one that is nearly 0 leaves no trace. Even and odd places have independent factors
        (`out`, `brightness`), so both must be nearly 0 for a mixture to pass.
        """
        numbers = [known_numbers(upload[name]) for name in self.names(backbone, plan)]
        patches, single, present = _bins(backbone, plan, numbers, 1)
        wider, alone, _ = _bins(backbone, plan, numbers, 2)
        pair = alone[:-1] & present[:-1] & present[1:] & ~single[:-1] & ~single[1:]
        pair[1:] &= ~pair[:-1]
        others = present & ~single
        others[:-1] &= ~pair
        others[1:] &= ~pair
        return torch.cat([patches[single], wider[:-1][pair]]), patches[others].nan_to_num()

    def unread(self, plan: Plan) -> tuple[int, list[str]]:
        return plan.places * (plan.basis.shape[1] - plan.channels.patch), plan.lost(
            "are not read, because the model has too few channels"
        )


def _bins(backbone: Backbone, plan: Plan, numbers: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """What stands in every `width` neighbouring bins: patches [bins, N, K], whether it is one image, and whether there
    is anything."""
    c, blocks = plan.channels, backbone.parts()
    patches = torch.full((plan.bins, plan.places, plan.basis.shape[1]), torch.nan, dtype=torch.float64)
    excess = torch.full((plan.bins, plan.places), torch.nan, dtype=torch.float64)
    rounded, basis = torch.zeros_like(excess), plan.basis.to(numbers[0].device)
    for place in range(plan.places):
        weights, biases = numbers[2 * (place // plan.per_block) :][:2]
        rows = _neurons(blocks, plan, place)[1]
        weight, bias = (g[rows] - torch.cat([g[rows][width:], torch.zeros_like(g[:width])]) for g in (weights, biases))
        inputs, rounding = weight / bias.unsqueeze(1), ROUNDING * biases[rows].abs().max() / bias.abs()
        deviation = 2 * LARGE / (inputs[:, c.plus] - inputs[:, c.minus])
        token = (inputs - inputs[:, c.zero, None]) * deviation.unsqueeze(1)
        there = (rounding < LOST).cpu()
        patches[there, place] = (token[:, : c.patch] @ basis).cpu()[there]
        excess[there, place] = (inputs.square().mean(dim=1) - 1).cpu()[there]
        rounded[:, place] = rounding.cpu()
    common = excess.mean(dim=1).abs() / (excess.std(dim=1) / math.sqrt(plan.places))
    single = (excess.abs() < rounded).all(dim=1) & (common < COMMON)
    return patches, single, excess.isfinite().any(dim=1)

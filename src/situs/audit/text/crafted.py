"""A server that chooses the weights of a language model: whole sentences out of the gradient of a batch.

The weights are written so that one vector holds a sentence, word by word, and so that the neurons of the MLPs sort the
sentences of a batch. Architecture, names, shapes and types are those of the model.

    channels     place 0: digits of its word | place 1: … | word | bits of the place | one | +C | -C | zero | …
    block 0      its MLP puts a token's digits where those of its place belong: a neuron for each digit of each place
    block 1      attention is a plain mean: every token gets the digits of all places, or of all up to its own
    from there   each MLP has a random linear functional of a sentence's first digits (its code). Neuron j is on where
                 the code is above edge j, so neighbouring neurons differ by the sentences between their edges: a window

A word is two digits of a random number of its own, so that codes are spread evenly whatever the text. Digits are small
whole numbers: a mixture of sentences is seen by its digits, and a sentence that was read is put through the model and
must give the numbers that were seen.

Where the next words are learned, the last word of a sentence enters no layer. It is in the gradient of the token
before it: each neuron adds to one of the two digits of the logits, and the gradient is that digit's distance to the
mean.

What is read depends on what is sent (`Kind`). Where it is little, two neurons are the edges of a window and pass the
gradient of one channel on, which is then that of the sentences in the window alone. That channel is written by the
product beside the values, or by a head of its own: the gradient of that head's query bias is the covariance of its keys
(the digits) and its values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from situs.audit.attacks.base import known_numbers, steps_off
from situs.audit.attacks.crafted import clear
from situs.audit.attacks.crafted_adapters import pass_on, passes_on
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import IGNORED, Sentence, Task, TextVictim
from situs.backbones.adapters import adapter_of
from situs.backbones.base import Backbone
from situs.backbones.block import Block
from situs.core.precision import full_float32
from situs.errors import SitusError, counted

CRAFTED = "crafted"
"""The name of the attack."""

LARGE = 3e4
"""C: two channels of ±C make the norms' deviation nearly the same for every token."""
MEAN = 30.0
"""What the mean over the tokens is multiplied with."""
LINEAR = 20.0
"""What digits are multiplied with where an activation must not bend them."""
GATE = 2.0
"""By how much a wrong place switches a neuron off, in units of the largest digit."""
STEEP = 200.0
"""How far beyond its edge a neuron is driven by a code one bin away."""
FIRST = 12
"""How many places of an encoder's sentence its code is made of."""
STARTS = (3, 1, 8, 2, 5, 16)
"""The same for a causal model, block by block: tokens from that place on have the code of their sentence."""
ROUNDING = 4
"""How many last digits rounding takes of a sum of gradients."""
WHOLE = 0.2
"""The farthest that a digit may be from a whole number."""
FAINT = 1e-3
"""Digits that are a smaller share of the largest are held against it as if they were that share."""
SEEN = 30.0
"""How many times larger than rounding a number must be to be read."""
WINDOWS = 32
"""The most windows of a block where little is sent."""
SHORT = 48
"""The most places of a sentence where the biases of a batch are read: heads are few, and share the digits out."""
SMALL = 1e-3
"""What a head adds to its window's channel where its query bias is read."""
PRODUCT = "parametrizations.weight.0.down"
"""Where the factor of LoRA's product that sees the inputs stands beside a weight."""
ADAPTER = "adapter.down.weight"
"""Where the first matrix of an adapter stands behind a layer."""


class Channels(NamedTuple):
    """Where the channels of the residual stream stand. places: whose words it holds; digits: channels of each, the
    third a constant; bits: of a place; gates: which neurons a place switches off; windows: those that are gated."""

    places: int
    digits: int
    bits: int
    gates: int
    windows: int

    @property
    def word(self) -> int:
        """The first of the two digits of a token's own word."""
        return self.places * self.digits

    @property
    def gate(self) -> int:
        return self.word + 2

    @property
    def place(self) -> int:
        return self.gate + self.gates

    def __getattr__(self, name: str) -> int:
        order = ("one", "plus", "minus", "zero", "first", "portion", "balance", "out", "sink")
        if name not in order:
            raise AttributeError(name)
        return self.place + self.bits + order.index(name)

    @property
    def total(self) -> int:
        return self.sink + 1 + self.windows

    @property
    def telling(self) -> list[int]:
        """The digits of all places and the constants."""
        return [*range(self.word), self.plus, self.minus, self.first, self.portion]

    @classmethod
    def of(cls, backbone: Backbone, places: int, digits: int, gates: int, windows: int) -> Channels:
        """Of a model: at most so many places, as many as there is space for. The bits tell all places apart."""
        width, bits = backbone.dim, max(1, math.ceil(math.log2(backbone.num_tokens)))
        fitting = (width - cls(0, digits, bits, gates, windows).total) // digits
        return cls(max(0, min(fitting, places)), digits, bits, gates, windows)


Kind = Literal["neurons", "product", "values", "biases", "classifier"]
"""Whose gradients are read: the first matrices of MLPs or of adapters behind them, LoRA's products beside them, the
attention's values (or products beside them), the queries' biases, or the classifier alone."""


@dataclass(frozen=True)
class Plan:
    """How a model is written and read. words: of the vocabulary. bins: windows of a block, for each direction. reads:
    block -> the name of the gradient that is read of it. deviation: of a token. post: whether the norms are in the
    stream. batch: sentences in a step. heads: how many serve one window, where biases are read; head_size: their
    channels. noise: the deviation of what is added to the gradients."""

    task: Task
    kind: Kind
    channels: Channels
    words: int
    bins: int
    reads: dict[int, str]
    deviation: float
    post: bool
    batch: int
    heads: int
    head_size: int
    noise: float = 0.0

    @property
    def directions(self) -> int:
        """1 where classes are learned; where words are, one for each digit of the next word."""
        return 1 if self.task == "classes" else 2

    @property
    def base(self) -> int:
        return math.ceil(math.sqrt(self.words))

    @property
    def unit(self) -> float:
        """What a layer must add to the residual stream for 1."""
        return 1 / self.deviation if self.post else 1.0

    def start(self, block: int) -> int:
        """How many places the code of a block is made of."""
        most = STARTS[(block - 1) % len(STARTS)] if self.task == "next words" else FIRST
        return min(most, self.channels.places)

    def gate(self, block: int) -> int:
        """The channel that switches neurons of a block off."""
        return self.channels.gate + ((block - 1) % len(STARTS) if self.task == "next words" else 0)

    def gated(self, block: int) -> range:
        """The channels of a block's windows, where little is sent: a later block must not see those of another."""
        if self.kind not in ("values", "biases"):
            return range(0)
        first = self.channels.sink + 1 + self.bins * [*self.reads].index(block)
        return range(first, first + self.bins)

    def digits(self, part: int) -> range:
        """The digits that one of a window's heads carries, beside the channel of the first token."""
        most = self.head_size - 1
        return range(part * most, min((part + 1) * most, self.channels.word))

    def functional(self, block: int) -> Tensor:
        """The code's weights [places, 2] of a block: those of neighbours differ in sign, so that a sentence that ends
        early stays near the others. The first token of an encoder's sentence is always the same."""
        count, chance = self.start(block), torch.Generator().manual_seed(1000 + block)
        drawn = torch.randn(-(-count // 2), 2, generator=chance, dtype=torch.float64)
        rows = torch.stack([drawn, -drawn.flip(1)], dim=1).flatten(0, 1)[:count]
        if self.task != "next words":
            rows = torch.cat([torch.zeros(1, 2, dtype=torch.float64), rows])[:count]
        return rows / (rows.square().sum() / 12).sqrt()  # a digit is spread evenly over an interval of length 1

    def edges(self) -> Tensor:
        """The edges of neurons, [bins] float64, in deviations of the code; of windows that lie apart, [bins, 2]."""
        at = torch.arange(self.bins, dtype=torch.float64) / self.bins
        if self.kind == "neurons":
            return torch.special.ndtri(at + 0.5 / self.bins)
        return torch.special.ndtri(torch.stack([at, at + 1 / max(self.bins, self.batch)], dim=1)).clamp(-8, 8)

    def codes(self) -> Tensor:
        """The two digits of each word, [V, 2] float64, from .5 to 1.5."""
        numbers = torch.randperm(self.words, generator=torch.Generator().manual_seed(7))
        return 0.5 + torch.stack([numbers // self.base, numbers % self.base], dim=1).double() / (self.base - 1)

    def word_of(self, digits: Tensor) -> Tensor:
        """The words [...] of whole digits [..., 2]; -1 where there is none."""
        numbers = torch.randperm(self.words, generator=torch.Generator().manual_seed(7))
        names = torch.full((self.base**2,), UNNAMED)
        names[numbers] = torch.arange(self.words)
        inside = ((digits >= 0) & (digits < self.base)).all(dim=-1)
        number = (digits.clamp(0, self.base - 1) * digits.new_tensor([self.base, 1])).sum(dim=-1).long()
        return names[number].masked_fill(~inside, UNNAMED)


def plan_of(victim: TextVictim, sent: Collection[str] | None = None, batch: int = 1) -> Plan | str:
    """The plan for a model and the gradients that are sent (None: all that it trains), or why there is none."""
    backbone, task = victim.backbone, victim.task
    embedding, blocks = backbone.inner.get_input_embeddings().weight, backbone.parts()
    if reason := _unfit(victim, blocks):
        return reason
    names = {name for name, p in backbone.named_parameters() if p.requires_grad} if sent is None else set(sent)
    kind, reads = _reads(backbone, blocks, names)
    if reason := _too_little(victim, kind, reads, batch):
        return reason
    directions, heads = 1 if task == "classes" else 2, blocks[0].attention.heads
    gates = min(len(STARTS), backbone.depth - 1) if task == "next words" else 1
    hidden, tensors = min(block.mlp.up[0].bias.shape[0] for block in blocks), dict(backbone.named_parameters())
    longest = min(backbone.num_tokens, hidden // (1 + directions))
    channels = Channels.of(backbone, longest, 1 + directions, gates, 0)
    bins = hidden if kind == "neurons" else 1
    if _adapted(reads):
        bins = min(len(tensors[name]) for name in reads.values())
    elif kind in ("product", "values"):
        bins = min(WINDOWS, *(len(tensors[name]) for name in reads.values()))
    keys = backbone.dim // heads - 1  # of a head, beside that of `first`
    if kind == "biases":
        places = channels.places if batch == 1 else min(channels.places, SHORT)
        together = min(heads, -(-2 * places // keys))
        bins, heads = heads // together, together
        channels = Channels.of(backbone, min(places, together * keys // 2), 2, gates, bins * len(reads))
    elif kind == "values":
        channels = Channels.of(backbone, longest, 2, gates, bins * len(reads))
    if channels.places < 4 or bins < directions or (kind != "neurons" and hidden < 2 * bins):
        return (
            f"the model has too few channels ({backbone.dim}), too few neurons ({hidden} per block), or too low a "
            "rank of LoRA"
        )
    deviation, post = math.sqrt((2 * LARGE**2 + channels.bits + 3) / backbone.dim), blocks[0].form == "post"
    bins //= directions
    return Plan(task, kind, channels, len(embedding), bins, reads, deviation, post, batch, heads, keys + 1)


def _unfit(victim: TextVictim, blocks: Sequence[Block]) -> str | None:
    """Why no such weights are written for a model, whatever is sent; None where they are."""
    backbone = victim.backbone
    if victim.method is not None:
        return "the model's training hides positions, but the crafted weights need positions"
    if victim.task == "masked words":
        return "masked words do not enter any layer, so the crafted weights cannot read them"
    if backbone.kinds != ("table",):
        return "the model's positions are rotations inside the attention, but the crafted weights need a position table"
    if len(backbone.block_modules()) < max(backbone.depth, 2):
        return "the model has fewer than two blocks" if backbone.depth < 2 else "the model's blocks share weights"
    if backbone.inner.get_input_embeddings().weight.shape[1] != backbone.dim:
        return "the model's word embedding has fewer channels than its blocks"
    if not all(map(_plain, blocks)):
        return "only blocks of LayerNorm, plain attention and a two-layer MLP are supported"
    return None


def _too_little(victim: TextVictim, kind: Kind, reads: Mapping[int, str], batch: int) -> str | None:
    """Why these weights cannot be read by what is sent; None where they can."""
    if victim.task != "classes" and (not reads or kind not in ("neurons", "product")):
        return (
            "for a model that predicts words, the crafted weights need the gradients of the MLPs' first "
            "layers, which are not sent"
        )
    if not reads:
        return "the crafted weights need the gradient of a later block or of a classifier, and neither is sent"
    if kind == "classifier" and victim.backbone.name.startswith("Electra"):
        return (
            "if only the classifier's gradient is sent, the crafted weights need an activation before the classifier "
            "that is linear near 0 (such as tanh) or above 0 (such as ReLU)"
        )
    if kind == "classifier" and batch > 1:
        return "if only the classifier's gradient is sent, the crafted weights read a single sentence, not a batch"
    return None


def _plain(block: Block) -> bool:
    """Whether nothing stands between its layers that these weights do not reckon with."""
    attention, mlp = block.attention, block.mlp
    other = attention.head_norms or attention.norm or attention.gate or attention.rotary or attention.tables
    norms = isinstance(block.norm1, nn.LayerNorm) and isinstance(block.norm2, nn.LayerNorm)
    known = block.form in ("pre", "post") and len(mlp.up) == 1 and mlp.packed == 1 and attention.shared == 1
    return norms and known and not other and not attention.by_head and mlp.norm is None and mlp.up[0].bias is not None


def _reads(backbone: Backbone, blocks: Sequence[Block], sent: set[str]) -> tuple[Kind, dict[int, str]]:
    """Which gradients are read: the first kind that is sent, and its names by block."""
    layers = {id(module): name for name, module in backbone.named_modules()}
    first = {at: layers[id(block.mlp.up[0])] for at, block in enumerate(blocks) if at}
    parts = {at: block.attention.qkv for at, block in enumerate(blocks) if at > 1 and len(block.attention.qkv) == 3}
    queries, values = ({at: layers[id(qkv[part])] for at, qkv in parts.items()} for part in (0, 2))
    adapted = {at: layers[id(blocks[at].mlp.down)] for at in first if passes_on(blocks[at])}
    ways: list[tuple[Kind, dict[int, str], str]] = [
        ("neurons", first, "weight"),
        ("product", first, PRODUCT),
        ("neurons", adapted, ADAPTER),
        ("values", values, "weight"),
        ("values", values, PRODUCT),
        ("biases", queries, "bias"),
        ("classifier", {len(blocks): layers[id(layer)] for layer in _head_layers(backbone, blocks)[-1:]}, "weight"),
    ]
    for kind, names, ending in ways:
        present = {at: f"{name}.{ending}" for at, name in names.items() if f"{name}.{ending}" in sent}
        if present:
            return kind, present
    return "neurons", {}


def _adapted(reads: Mapping[int, str]) -> bool:
    """Whether adapters are read."""
    return any(name.endswith(ADAPTER) for name in reads.values())


def _head_layers(backbone: Any, blocks: Sequence[Block]) -> list[nn.Linear]:
    """The linear layers behind the blocks."""
    inside = {id(module) for block in blocks for module in block.module.modules()}
    return [m for m in backbone.model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]


# --- writing ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def craft_text(victim: TextVictim, sent: Collection[str] | None = None, batch: int = 1) -> TextVictim:
    """A copy with weights that give single sentences away; names, shapes and types are the same.

    sent: the gradients that the server will see, None for all that are trained. batch: sentences in a step.
    """
    plan = plan_of(victim, sent, batch)
    if isinstance(plan, str):
        raise SitusError(
            f"{victim.name}: this attack cannot craft the weights of this model, because {plan}", field="server"
        )
    backbone, c = deepcopy(victim.backbone), plan.channels
    clear(backbone)
    codes = plan.codes()
    words = backbone.inner.get_input_embeddings().weight
    words[:, c.word : c.word + 2] = codes.to(words)
    if plan.task == "classes":  # else a tied head would see it, and words would not be equally likely
        words[:, c.balance] = -codes.sum(dim=1).to(words)
    table = backbone.positions().table
    assert table is not None
    table.copy_(_table(plan, len(table), backbone.dim).to(table))
    blocks = backbone.parts()
    _write_places(blocks[0], plan, backbone.dim)
    _write_mean(blocks[1], plan, backbone.dim)
    if plan.kind != "classifier":
        for at in plan.reads:
            _write_bins(blocks[at], plan, at, backbone.dim)
    if plan.kind in ("values", "biases"):
        for at in plan.reads:
            _write_gated(blocks[at], plan, at, backbone.dim)
    _write_head(backbone, blocks, plan, codes)
    return replace(victim, backbone=backbone)


def _table(plan: Plan, length: int, width: int) -> Tensor:
    """The positions' rows [length, D]: constants, the bits of the place, and which neurons it switches off."""
    c = plan.channels
    rows = torch.zeros(length, width, dtype=torch.float64)
    rows[:, c.one], rows[:, c.plus], rows[:, c.minus], rows[0, c.first] = 1.0, LARGE, -LARGE, 1.0
    rows[:, c.place : c.place + c.bits] = torch.stack([_signs(place, c.bits) for place in range(length)])
    if plan.task == "classes":
        rows[1:, c.gate] = 1.0
    elif plan.task == "next words":
        for at in plan.reads:
            rows[: plan.start(at), plan.gate(at)] = 1.0
    return _balanced(rows, c.balance)


def _signs(number: int, bits: int) -> Tensor:
    return torch.tensor([1.0 if number >> bit & 1 else -1.0 for bit in range(bits)], dtype=torch.float64)


def _write(layer: Any, rows: Tensor, first: int = 0) -> None:
    """Writes rows [n, in] of a linear layer's weight [out, in], from row `first` on. GPT-2's is the other way round."""
    if parametrize.is_parametrized(layer, "weight"):
        weight = layer.parametrizations.weight.original
    else:
        weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
    weight[first : first + len(rows)] = rows.to(weight)


def _balanced(rows: Tensor, zero: int) -> Tensor:
    """Rows that sum to 0 by one of their numbers: a LayerNorm's mean is nothing to such weights, and 0 of such
    tokens."""
    rows[:, zero] -= rows.sum(dim=1)
    return rows


def _write_places(block: Block, plan: Plan, width: int) -> None:
    """The first MLP: a neuron for each digit of each place, which tokens of other places leave off."""
    c, numbers = plan.channels, range(plan.channels.places)
    up = torch.zeros(c.places * c.digits, width, dtype=torch.float64)
    down = torch.zeros(width, block.mlp.up[0].bias.shape[0], dtype=torch.float64)
    for place in numbers:
        rows = slice(place * c.digits, (place + 1) * c.digits)
        up[rows, c.place : c.place + c.bits] = GATE * _signs(place, c.bits)
        up[rows, c.one] = -GATE * c.bits
        for digit in range(c.digits):
            up[rows.start + digit, c.word + digit if digit < 2 else c.one] += 1.0
    down[range(len(up)), range(len(up))] = plan.unit / LINEAR
    down[c.balance, : len(up)] = -plan.unit / LINEAR
    _write(block.mlp.up[0], _balanced(up, c.zero) * LINEAR * plan.deviation)
    _write(block.mlp.down, down)


def _write_mean(block: Block, plan: Plan, width: int) -> None:
    """Attention without queries and keys: every token gets the mean of all places' digits, and that of `first`."""
    c, attention = plan.channels, block.attention
    count = c.places * c.digits
    values = torch.zeros(count + 1, width, dtype=torch.float64)
    values[range(count), range(count)], values[count, c.first] = 1.0, 1.0
    out = torch.zeros(width, width, dtype=torch.float64)
    out[range(count), range(count)], out[c.portion, count], out[c.balance, : count + 1] = 1.0, 1.0, -1.0
    first = 2 * width if len(attention.qkv) == 1 else 0
    _write(attention.qkv[-1], _balanced(values, c.zero), first)
    _write(attention.out, out * MEAN * plan.unit * plan.deviation)


def signs_of(plan: Plan, count: int) -> Tensor:
    """+ - - + …: with these the sum of neurons that are on hardly depends on how many are; + - for pairs."""
    signs = [1.0, -1.0, -1.0, 1.0] if plan.kind == "neurons" else [1.0, -1.0]
    return torch.tensor(signs, dtype=torch.float64).repeat(-(-count // len(signs)))[:count]


def _write_bins(block: Block, plan: Plan, at: int, width: int) -> None:
    """An MLP whose neurons are on where the code is above their edges; each adds to one channel of the logits."""
    c, functional, edges = plan.channels, plan.functional(at), plan.edges().flatten()
    gain = STEEP * c.places / (MEAN * math.sqrt(2 * math.pi) / plan.bins)
    row = torch.zeros(width, dtype=torch.float64)
    row[: len(functional) * c.digits].view(-1, c.digits)[:, :2] = gain * functional
    row[plan.gate(at)] = -40 * gain * MEAN
    rows = row.repeat(len(edges), 1)
    rows[:, c.portion] = -gain * (functional.sum() + edges)
    for window, channel in enumerate(plan.gated(at)):
        rows[2 * window : 2 * window + 2, channel] = gain
    signs = signs_of(plan, len(edges))
    reach = torch.linspace(-6, 6, 999, dtype=torch.float64)[:, None]
    largest = float(((reach - edges).clamp(min=0) * signs).sum(dim=1).abs().max()) * gain * MEAN
    layers: tuple[Any, Any] = block.mlp.up[0], block.mlp.down
    if (adapter := adapter_of(block)) is not None and _adapted(plan.reads):
        pass_on(*(layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight for layer in layers))
        layers = adapter.down, adapter.up
    up, behind = layers
    down = torch.zeros(width, up.bias.shape[0], dtype=torch.float64)
    for direction in range(plan.directions):
        here = slice(direction * len(edges), (direction + 1) * len(edges))
        _write(up, _balanced(rows.clone(), c.zero) * plan.deviation, here.start)
        down[c.out if plan.task == "classes" else c.word + direction, here] = signs * plan.unit / largest
        down[c.sink, here] = -signs * plan.unit / largest
        if plan.kind == "product":  # the two neurons of a window have gradients of opposite signs
            factor = up.parametrizations.weight[0].up
            for window in range(plan.bins):
                factor[here.start + 2 * window :, direction * plan.bins + window][:2] = 1.0
    _write(behind, down)


def _write_gated(block: Block, plan: Plan, at: int, width: int) -> None:
    """Attention that writes to the gated channels of the windows: nothing at first, or next to nothing."""
    c, attention = plan.channels, block.attention
    out = torch.zeros(width, width, dtype=torch.float64)
    scale = plan.unit * plan.deviation
    if plan.kind == "values":
        out[plan.gated(at), range(plan.bins)] = scale
        if parametrize.is_parametrized(attention.qkv[2], "weight"):
            attention.qkv[2].parametrizations.weight[0].up[range(plan.bins), range(plan.bins)] = 1.0
    else:
        size = width // attention.heads
        keys, values = (torch.zeros(width, width, dtype=torch.float64) for _ in range(2))
        for head in range(plan.bins * plan.heads):
            window, part = divmod(head, plan.heads)
            digits = plan.digits(part)
            keys[head * size, c.first], values[head * size, c.first] = 1.0, SMALL
            keys[range(head * size + 1, head * size + 1 + len(digits)), digits] = 1.0
            out[plan.gated(at)[window], head * size] = scale
        _write(attention.qkv[1], _balanced(keys, c.zero) * plan.deviation)
        _write(attention.qkv[2], _balanced(values, c.zero))
    _write(attention.out, out)


def _write_head(backbone: Any, blocks: Sequence[Block], plan: Plan, codes: Tensor) -> None:
    """The logits: of classes from `out`, of words from the digits, which their embedding has already if it is tied."""
    c, model = plan.channels, backbone.model
    output = model.get_output_embeddings()
    if plan.task != "classes":
        output.weight[:, c.word : c.word + 2] = codes.to(output.weight)
        return
    layers = _head_layers(backbone, blocks)
    rows = torch.zeros(layers[0].out_features, backbone.dim, dtype=torch.float64)
    if plan.kind == "classifier":
        _write(layers[0], _balanced(torch.diag(_faint(plan, backbone.dim)), c.zero) * plan.deviation)
        return
    rows[0, c.out], rows[0, c.sink] = 0.25 * plan.deviation, -0.25 * plan.deviation
    _write(layers[0], rows)
    for layer in layers[:-1]:
        layer.bias[0] = 0.5
    classes = torch.randn(layers[-1].out_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    last = torch.zeros(len(classes), layers[-1].in_features, dtype=torch.float64)
    last[:, 0 if len(layers) > 1 else c.out] = classes * (1.0 if len(layers) > 1 else plan.deviation)
    _write(layers[-1], last)


def _faint(plan: Plan, width: int) -> Tensor:
    """What the channels are multiplied with before the classifier [D], so small that tanh hardly bends them."""
    scale = torch.full((width,), 1e-3, dtype=torch.float64)
    scale[[plan.channels.plus, plan.channels.minus]] = 1e-2 / LARGE
    return scale


# --- reading ---------------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """What one window of a block showed. inputs: the words that entered the model. slopes: the gradients of the logits'
    digits at each of them, [2, n], where words are learned. targets: the words behind each, the last one `UNNAMED`
    where it is not known. length: of the sentence, or of its inputs."""

    block: int
    number: int
    inputs: Sentence
    length: int
    slopes: Tensor | None = None
    targets: Sentence = ()

    @property
    def sentence(self) -> Sentence:
        """The sentence as far as it is known."""
        return (*self.inputs, *self.targets[-1:], *(UNNAMED,) * (self.length - len(self.inputs)))


def windows_of(plan: Plan, at: int, gradient: Tensor, number: int | None = None) -> tuple[Tensor, Tensor]:
    """What the windows of a block show, [directions, bins, D], without the norm's mean; and its rounding, [D].

    number: of the one window that is wanted, [directions, 1, D].
    """
    c = plan.channels
    if plan.kind == "biases":
        shown = _keys(plan, known_numbers(gradient).cpu())
    elif plan.kind == "classifier":
        rows = known_numbers(gradient).cpu()
        shown = rows[rows.abs().sum(dim=1).argmax()][None, None] / _faint(plan, rows.shape[1])
    else:
        rows = gradient.T if plan.reads[at].endswith("c_fc.weight") else gradient
        shown = rows[: plan.directions * plan.bins].unflatten(0, (plan.directions, plan.bins))
    signs = signs_of(plan, plan.bins)
    if number is not None:
        wanted = slice(number, number + (2 if plan.kind == "neurons" else 1))
        shown, signs = shown[:, wanted], signs[wanted]
    shown = known_numbers(shown).cpu()
    size = shown.abs().amax(dim=(0, 1)) * (plan.batch if plan.kind == "product" else 1)
    rounding = ROUNDING * torch.finfo(gradient.dtype).eps * size + plan.noise
    if plan.kind == "neurons":
        signed = shown * signs[:, None]
        shown = signed - torch.cat([signed[:, 1:], torch.zeros_like(signed[:, :1])], dim=1)
    shown = shown if number is None else shown[:, :1]
    return shown - shown[..., c.zero, None], rounding


def _keys(plan: Plan, gradient: Tensor) -> Tensor:
    """The gradient of the queries' biases as channels, [1, bins, D]."""
    c, width = plan.channels, len(gradient)
    size, shown = plan.head_size, torch.zeros(1, plan.bins, width, dtype=torch.float64)
    for head in range(plan.bins * plan.heads):
        window, part = divmod(head, plan.heads)
        digits = plan.digits(part)
        shown[0, window, digits] = gradient[head * size + 1 :][: len(digits)]
        shown[0, window, c.first] += gradient[head * size] / plan.heads
    return shown


def read_windows(plan: Plan, upload: Gradients) -> list[Window]:
    """What stood alone in each window: all its digits are whole numbers and name words."""
    windows = list[Window]()
    for at, name in plan.reads.items():
        shown, rounding = windows_of(plan, at, upload[name])
        if plan.task == "classes":
            windows += _read_classes(plan, at, shown[0], rounding)
        else:
            windows += _read_words(plan, at, shown, rounding)
    return windows


def _named(plan: Plan, values: Tensor) -> tuple[Tensor, Tensor]:
    """Words [...] of digits' values [..., 2], and how far these are from whole digits."""
    digits = (values - 0.5) * (plan.base - 1)
    nearest = digits.nan_to_num(-9.0, -9.0, -9.0).round()
    return plan.word_of(nearest), (digits - nearest).abs().amax(dim=-1)


def _read_classes(plan: Plan, at: int, rows: Tensor, rounding: Tensor) -> Iterator[Window]:
    """One token stands for a sentence, the first one; or the mean of all its tokens does (values), or a covariance
    (biases). rows: [bins, D]."""
    c = plan.channels
    digits, first = rows[:, : c.word].unflatten(1, (c.places, c.digits))[..., :2].clone(), rows[:, c.first, None, None]
    large = rows[:, c.plus] / LARGE
    clear = rows[:, c.plus].abs() > SEEN * rounding[c.plus]
    clear &= (
        rows[:, c.portion if plan.kind in ("neurons", "product") else c.first].abs() > SEEN * plan.base * plan.noise
    )
    if plan.kind == "biases":
        digits /= first
        length = 1.0 + ((digits[:, 1:].sum(dim=2) < -0.2 / c.places).long().cumprod(dim=1).sum(dim=1))
        digits[:, 1:] *= 1 - length[:, None, None]
        clear = rows[:, c.first].abs() > SEEN * plan.base * plan.noise * c.places
    elif plan.kind == "values":
        length = large / rows[:, c.first]
        digits /= first * (1 + MEAN)
    else:
        length = MEAN * large / rows[:, c.portion]
        digits /= rows[:, c.portion, None, None]
        digits[:, 0] /= 1 + length[:, None] / MEAN
    words, off = _named(plan, digits)
    clear &= (length > 0.8) & ((length - length.round()).abs() < WHOLE)
    for number in clear.nonzero()[:, 0].tolist():
        count = int(length[number].round())
        there, beyond = slice(count), slice(count, None)
        names = tuple(words[number, there].tolist())
        empty = bool((digits[number, beyond].abs() < 0.1).all())
        if empty and UNNAMED not in names and bool((off[number, there] < WHOLE).all()):
            yield Window(at, number, names, count)


def _read_words(plan: Plan, at: int, seen: Tensor, rounding: Tensor) -> Iterator[Window]:
    """Every token that must predict a word stands for its sentence; a third digit, which is 1, shows how much of their
    gradients each place has."""
    c = plan.channels
    digits = seen[..., : c.word].unflatten(2, (c.places, 3))
    share = digits[..., 2]
    strength = share.square().sum(dim=0)
    words, off = _named(plan, (digits[..., :2] * share[..., None]).sum(dim=0) / strength[..., None])
    there = strength.sqrt() > SEEN * (rounding[: c.word].view(c.places, 3)[:, 2] + plan.base * plan.noise)
    counts = there.long().cumprod(dim=1).sum(dim=1)
    for number in (counts > 0).nonzero()[:, 0].tolist():
        count = int(counts[number])
        names = tuple(words[number, :count].tolist())
        if UNNAMED in names or not bool((off[number, :count] < WHOLE).all()):
            continue
        slopes = _slopes(plan, at, share[:, number, :count])
        yield Window(at, number, names, count, slopes)


def _slopes(plan: Plan, at: int, share: Tensor) -> Tensor:
    """The gradients of the tokens [2, n] by the places' shares [2, n]: a token has its own word once, and the mean."""
    count, slopes = share.shape[1], torch.zeros_like(share)
    after = torch.zeros_like(share[:, 0])
    for token in range(count - 1, plan.start(at) - 1, -1):
        slopes[:, token] = (share[:, token] - after) / (MEAN / (token + 1) + 1)
        after = after + slopes[:, token] * MEAN / (token + 1)
    return slopes


def predicted(plan: Plan, windows: Sequence[Window]) -> list[Window]:
    """The windows with their sentences' last words.

    The gradient of a token is the distance of the next word's digits to the mean digits, times a factor that all tokens
    of the batch share; words that are known already give it. A sentence that fills the places may go on, and its last
    word is not known.
    """
    codes = plan.codes()
    mean = codes.mean(dim=0)
    factors = [_factor(plan, window, codes, mean) for window in windows]
    shared = sorted(factor for factor, count in factors if count > 2)
    named = []
    for window, (by_itself, count) in zip(windows, factors, strict=True):
        factor = by_itself if count else shared[len(shared) // 2] if shared else None
        last = UNNAMED
        if factor is not None and len(window.inputs) < plan.channels.places and window.slopes is not None:
            word, off = _named(plan, mean - factor * window.slopes[:, -1])
            last = int(word) if float(off) < WHOLE else UNNAMED
        named.append(window._replace(targets=(*window.inputs[1:], last)))
    return named


def _factor(plan: Plan, window: Window, codes: Tensor, mean: Tensor) -> tuple[float, int]:
    """What slopes are to be multiplied with, by the words of a sentence that follow known ones, and how many these
    are."""
    assert window.slopes is not None
    first = plan.start(window.block)
    known = list(window.inputs[first + 1 :])
    if not known:
        return 0.0, 0
    slopes, distance = window.slopes[:, first:-1].T, mean - codes[known]
    return float((slopes * distance).sum() / slopes.square().sum()), len(known)


def confirmed(
    victim: TextVictim, plan: Plan, upload: Gradients, windows: Sequence[Window], deadline: Deadline
) -> list[Window]:
    """Those windows whose sentence, put through the model alone, gives the numbers that were seen, up to rounding and
    one factor (the sentence's share in the batch, its label)."""
    right, shown = list[Window](), dict[int, tuple[Tensor, Tensor]]()
    for window in windows:
        if deadline.over():
            break
        if window.block not in shown:
            shown[window.block] = windows_of(plan, window.block, upload[plan.reads[window.block]])
        every, rounding = shown[window.block]
        seen, alone = every[:, window.number], _alone(victim, plan, window)
        alone = alone * (seen * alone).sum() / alone.square().sum()
        digits = alone[:, : plan.channels.word].abs()
        allowed = alone.abs().clamp(min=FAINT * float(digits.max())) * WHOLE / plan.base + 4 * rounding
        if bool(((seen - alone).abs() <= allowed)[:, plan.channels.telling].all()):
            right.append(window)
    return right


def _alone(victim: TextVictim, plan: Plan, window: Window) -> Tensor:
    """What a window would show, [directions, D], were its sentence the whole batch."""
    backbone = victim.backbone
    weight = dict(backbone.named_parameters())[plan.reads[window.block]]
    device = weight.device
    with torch.enable_grad(), full_float32():
        beyond = window.inputs[:1] * (window.length - len(window.inputs))  # of these only their number enters
        logits = backbone(torch.tensor([(*window.inputs, *beyond)], device=device))
        if plan.task == "classes":
            loss = F.cross_entropy(logits, torch.zeros(1, dtype=torch.long, device=device))
        else:
            targets = torch.tensor(window.targets, device=device)
            loss = F.cross_entropy(logits[0], targets.masked_fill(targets == UNNAMED, IGNORED), ignore_index=IGNORED)
        [gradient] = torch.autograd.grad(loss, [weight])
    return windows_of(plan, window.block, gradient, window.number)[0][:, 0]


def crafted_sentences(
    victim: TextVictim,
    upload: Gradients,
    batch: int,
    *,
    noise: float = 0.0,
    steps: bool = False,
    deadline: Deadline | None = None,
) -> Recovered:
    """The sentences behind an upload of a model that `craft_text` wrote for such uploads.

    noise: its deviation, which the attacker knows. steps: whether numbers come in even steps (int8).
    """
    deadline, plan = deadline or Deadline(), plan_of(victim, set(upload), batch)
    if isinstance(plan, str):
        return Recovered(reason=plan)
    if steps:
        noise = max(steps_off(upload[name]) for name in plan.reads.values())
    plan = replace(plan, noise=noise)
    windows = read_windows(plan, upload)
    windows = windows if plan.task == "classes" else predicted(plan, windows)
    deadline.say(f"the gradients suggest {counted(len(windows), 'sentences')}; each of them is checked with the model")
    by_sentence = dict[Sentence, Window]()
    for window in confirmed(victim, plan, upload, _once(windows), deadline):
        by_sentence.setdefault(window.sentence, window)
    sentences = tuple(by_sentence)
    words = frozenset(word for sentence in sentences for word in sentence if word != UNNAMED)
    partial = f"{len(sentences)} of {counted(batch, 'sentences')}" if deadline.over() else None
    reason = None
    if len(sentences) < batch:
        reason = f"the crafted neurons isolated {len(sentences)} of {counted(batch, 'sentences')}; "
        reason += "noise hides the rest" if noise else "another round with other thresholds may read the rest"
        if plan.task == "next words" and victim.backbone.num_tokens > plan.channels.places + 1:
            reason += f"; a sentence of more than {plan.channels.places} words is not read"
    elif any(UNNAMED in sentence for sentence in sentences):
        reason = (
            f"the weights read only the first {counted(plan.channels.places, 'positions')} of a sentence, "
            "and some sentences are longer"
        )
    return Recovered(words, sentences, {"windows": len(windows)}, reason, partial)


def _once(windows: Sequence[Window]) -> list[Window]:
    """One window for each sentence, the first whose words are all known."""
    best = dict[Sentence, Window]()
    for window in windows:
        kept = best.get(window.inputs)
        if kept is None or (UNNAMED in kept.sentence and UNNAMED not in window.sentence):
            best[window.inputs] = window
    return list(best.values())

"""Layers of a language model by the names of their weights: their inputs, and the spans of their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from situs.audit.attacks.solver import SPARE, TELLING, Span, whole_rows
from situs.audit.client import EPS
from situs.audit.defences import Gradients, Step
from situs.audit.products import module_inputs
from situs.backbones.base import Backbone
from situs.backbones.hf.text import TextBackbone
from situs.backbones.layout import LayoutBuilder
from situs.core.position import Positions

Model = TypeVar("Model", bound=TextBackbone)

ONE = Step()
"""One step of plain SGD."""

CHUNK = 8192
"""Words that are looked at together."""

ROUNDING = 30.0
"""The noise of a float gradient whose rows have size 1 is at most so many times its type's step."""

LOOSE = 0.05
"""The largest relative residual of a word in float32; words below it are tested again in float64."""


UP, DOWN = ".parametrizations.weight.0.up", ".parametrizations.weight.0.down"
"""How the names of LoRA's two factors end, behind their layer's."""


def weight_names(backbone: TextBackbone, depth: int) -> list[str]:
    """Names of the matrices of block `depth`, counted from 1 without repetitions; beside LoRA's factors the layer's."""
    roles = backbone.roles()
    names = [name for name, p in backbone.named_parameters() if p.dim() == 2 and roles[name].depth == depth]
    return list(dict.fromkeys(re.sub(r"\.parametrizations\.weight\..*", ".weight", name) for name in names))


def qkv_weights(backbone: TextBackbone, depth: int) -> list[str]:
    """Names of the matrices that make queries, keys and values in block `depth`, counted from 1."""
    roles, layer = backbone.roles(), backbone.layers()[depth - 1]
    block = 1 + [module for (module,) in backbone.block_modules()].index(
        layer
    )  # where several share their weights, one
    parts = {name.partition(".parametrizations.")[0].removesuffix(".weight"): role.part for name, role in roles.items()}
    return [name for name in weight_names(backbone, block) if parts[name.removesuffix(".weight")] == "qkv"]


def read_names(weight: str, sent: Container[str]) -> list[str]:
    """The gradients that are read of a layer: its weight's, or those of LoRA's factors beside it; [] if not sent."""
    layer = weight.removesuffix(".weight")
    return [weight] if weight in sent else [name for name in (layer + UP, layer + DOWN) if name in sent]


def calls_before(backbone: TextBackbone, depth: int) -> int:
    """How often the weights of block `depth` are used before it (ALBERT's blocks share them)."""
    layers = backbone.layers()
    return sum(layer is layers[depth - 1] for layer in layers[: depth - 1])


def module_of(backbone: Backbone, weight: str) -> Any:
    """The layer that has this weight."""
    return backbone.get_submodule(weight.rpartition(".")[0])


def as_rows(backbone: Backbone, weight: str, gradient: Tensor) -> Tensor:
    """A weight, or its gradient, as [out, in]."""
    return gradient if LayoutBuilder(backbone).projection(module_of(backbone, weight)).into == 1 else gradient.T


class Inputs(NamedTuple):
    """Where the common input of several layers must lie, as their gradients tell.

    spans: each with the matrix [r, in] through which it sees an input; None where it sees all of it. clear: whether
    what is left beside their directions is no more than noise; else it is further tokens.
    """

    spans: tuple[tuple[Span, Tensor | None], ...]
    clear: bool = True

    @property
    def plain(self) -> Span:
        """The span of the input itself."""
        return self.spans[0][0]

    @property
    def rank(self) -> int:
        return max(span.rank for span, _ in self.spans)

    @property
    def tells(self) -> bool:
        """Whether a span has directions, and leaves enough of them out to exclude anything."""
        return self.clear and any(_tells(span) for span, _ in self.spans)

    @property
    def channels(self) -> int:
        """How many channels of an input are seen at once."""
        return max(len(span.column) for span, _ in self.spans)

    def holds(self, inputs: Tensor) -> Tensor:
        """Whether inputs [..., D] lie in every span as far as noise lets one tell, [...] bool."""
        seen = [span.holds(inputs if matrix is None else inputs @ matrix.T) for span, matrix in self.spans]
        return torch.stack(seen).all(dim=0)

    def near(self, inputs: Tensor) -> Tensor:
        """Whether inputs [m, D] of any type lie near every span, [m] bool."""
        near = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        for span, matrix in self.spans:
            scaled = inputs if matrix is None else inputs @ matrix.T.to(inputs.dtype)
            scaled = scaled * span.column.to(inputs)
            within = (scaled @ span.inside.T.to(inputs)).square().sum(dim=-1) / scaled.square().sum(dim=-1)
            near &= within > 1 - LOOSE**2
        return near


def span_of(
    backbone: Backbone, upload: Gradients, weights: Sequence[str], even: bool = False, step: Step = ONE
) -> Inputs:
    """Where the common input of several layers lies; even: noise of one deviation was added. step: the client's; of
    Adam's the gradients are computed back, from numbers of the step's type.

    From all their gradients together; where these do not determine it, from the first that does. Of LoRA's products
    up · down beside frozen weights, the gradient of `up` sees inputs through `down`, and that of `down`, which is 0
    until the second of several local steps, sees all of them.
    """
    drifts = step.local_steps > 1
    if weights[0] not in upload:
        return _low_rank(backbone, upload, weights, even, drifts)
    parts = [as_rows(backbone, name, upload[name]) for name in weights]
    whole, *parts = torch.cat(parts), *parts
    span = Span(whole, even=even, drifts=drifts)
    if drifts:  # what is left are changes of the inputs, which may be more than rounding
        return Inputs(((span, None),))
    some = ((part, span if part is whole else Span(part, even=even)) for part in (whole, *parts))
    best = next((one for part, one in some if _tells(one) and (even or one.noise < _rounding(part, step))), None)
    return Inputs(((best or span, None),), clear=best is not None)


def _rounding(gradient: Tensor, step: Step) -> float:
    """The most noise that rounding makes of a gradient whose rows have size 1.

    From a step of Adam, u = g / (|g| + ε), the relative error of g is 1 + |g| / ε times that of u.
    """
    if not step.adam:
        return ROUNDING * torch.finfo(gradient.dtype).eps
    g = whole_rows(gradient).abs()
    size = g.square().mean(dim=1, keepdim=True).sqrt()
    errors = (g / size * (1 + g / EPS))[size[:, 0] > 0]
    return ROUNDING * torch.finfo(step.dtype).eps * float(errors.square().mean().sqrt())


def _low_rank(backbone: Backbone, upload: Gradients, weights: Sequence[str], even: bool, drifts: bool) -> Inputs:
    named, roles = dict(backbone.named_parameters()), backbone.roles()
    layers = [name.removesuffix(".weight") for name in weights]
    spans: list[tuple[Span, Tensor | None]] = [
        (Span(upload[layer + UP], even=even, drifts=drifts), named[layer + DOWN].detach().double()) for layer in layers
    ]
    downs = [upload[layer + DOWN] for layer in layers]
    first = min(roles[layer + DOWN].depth for layer in layers) == 1
    frozen = all(name.endswith((UP, DOWN)) for name in upload if name in roles and roles[name].depth <= 1)
    if first and frozen and any(bool(down.any()) for down in downs):  # elsewhere inputs move after the first step
        spans = [(Span(torch.cat(downs), even=even), None), *spans]
    # Without a direction that is left to noise, a rank cannot be read off.
    telling = [pair for pair in spans if _tells(pair[0]) and pair[0].noise < TELLING * pair[0].values[-1]]
    if not telling:
        return Inputs((spans[0],))
    if telling[0][1] is None:
        return Inputs((telling[0],))
    # A first token of a causal model is in no gradient of the queries: the spans with most directions have all tokens.
    most = max(span.rank for span, _ in telling)
    return Inputs(tuple(pair for pair in telling if pair[0].rank == most))


def _tells(span: Span) -> bool:
    return 0 < span.rank < len(span.column) - SPARE


def entering(backbone: Backbone, weight: str, run: Callable[[], Any], *, on: bool = False, calls: int = 0) -> Tensor:
    """The input of the layer of a weight while `run` goes through the model; the pass ends there unless it goes `on`.

    calls: how many calls of that layer come before the one that is meant.
    """
    with module_inputs(module_of(backbone, weight), None if on else calls) as inputs:
        run()
    return inputs[calls].detach()


@torch.no_grad()
def midway(backbone: Model, upload: Gradients, step: Step) -> Model:
    """The model with the weights in the middle of a client's local steps.

    To first order in the rate, the mean of the steps' gradients is the gradient of these weights, at every layer: the
    changes of inputs and of what is learned of them then cancel out.
    """
    moved = deepcopy(backbone)
    for name, parameter in moved.named_parameters():
        if name in upload:
            parameter -= step.lr * (step.local_steps - 1) / 2 * upload[name].to(parameter.dtype)
    return moved


@torch.no_grad()
def word_inputs(backbone: TextBackbone, words: Tensor, place: int, unknown: Tensor | None = None) -> Tensor:
    """[m, D]: the input of the first block's attention for each of `words` [m] at a place.

    unknown: [D], a vector instead of the position's.
    """
    every = backbone.positions((place + 1,))
    table = None if every.table is None else every.table[place:] if unknown is None else unknown.unsqueeze(0)
    rotary = None if every.rotary is None else every.rotary[..., place:, :]
    stream = backbone.assemble(backbone.embed(words.unsqueeze(1)), Positions(table=table, rotary=rotary))
    return entering(backbone, qkv_weights(backbone, 1)[0], lambda: backbone.blocks(stream))[:, 0]


def words_at(backbone: TextBackbone, span: Inputs, words: Tensor, place: int, unknown: Tensor | None = None) -> Tensor:
    """Those of `words` whose vector at a place, or with `unknown`, lies in the span of the first block's gradients."""
    passing = []
    for some in words.split(CHUNK):
        inputs = word_inputs(backbone, some, place, unknown)
        near = span.near(inputs)
        passing.append(some[near][span.holds(inputs[near].double())])
    return torch.cat(passing)

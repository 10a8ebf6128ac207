"""Layers of a language model by the names of their weights: their inputs, and the spans of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from situs.audit.attacks.solver import SPARE, Span
from situs.audit.defences import Gradients
from situs.audit.products import module_inputs
from situs.backbones.base import Backbone
from situs.backbones.hf.text import TextBackbone
from situs.backbones.layout import LayoutBuilder
from situs.core.position import Positions

CHUNK = 8192
"""Words that are looked at together."""

LOOSE = 0.05
"""The largest relative residual of a word in float32; words below it are tested again in float64."""


def qkv_weights(backbone: TextBackbone, depth: int) -> list[str]:
    """Names of the matrices that make queries, keys and values in block `depth`, counted from 1."""
    roles, layer = backbone.roles(), backbone.layers()[depth - 1]
    block = 1 + [module for (module,) in backbone.block_modules()].index(
        layer
    )  # where several share their weights, one
    matrices = [name for name, p in backbone.named_parameters() if p.dim() == 2]
    return [name for name in matrices if roles[name].part == "qkv" and roles[name].depth == block]


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


def span_of(backbone: Backbone, upload: Gradients, weights: Sequence[str], even: bool = False) -> Span:
    """The span of the common input of several layers; even: noise of one deviation was added.

    From all their gradients together; where these do not determine it, from the first that does.
    """
    parts = [as_rows(backbone, name, upload[name]) for name in weights]
    spans = (Span(part, even=even) for part in [torch.cat(parts), *parts])
    whole = next(spans)
    return whole if tells(whole) else next((span for span in spans if tells(span)), whole)


def tells(span: Span) -> bool:
    """Whether a span has directions, and leaves enough of them out to exclude anything."""
    return 0 < span.rank < len(span.column) - SPARE


def entering(backbone: Backbone, weight: str, run: Callable[[], Any], *, on: bool = False, calls: int = 0) -> Tensor:
    """The input of the layer of a weight while `run` goes through the model; the pass ends there unless it goes `on`.

    calls: how many calls of that layer come before the one that is meant.
    """
    with module_inputs(module_of(backbone, weight), None if on else calls) as inputs:
        run()
    return inputs[calls].detach()


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


def words_at(backbone: TextBackbone, span: Span, words: Tensor, place: int, unknown: Tensor | None = None) -> Tensor:
    """Those of `words` whose vector at a place, or with `unknown`, lies in the span of the first block's gradients."""
    passing = []
    column, inside = span.column.to(words.device), span.inside.to(words.device)
    for some in words.split(CHUNK):
        inputs = word_inputs(backbone, some, place, unknown)
        scaled = inputs * column.to(inputs.dtype)
        within = (scaled @ inside.T.to(inputs.dtype)).square().sum(dim=-1) / scaled.square().sum(dim=-1)
        near = within > 1 - LOOSE**2
        passing.append(some[near][span.holds(inputs[near].double())])
    return torch.cat(passing)
